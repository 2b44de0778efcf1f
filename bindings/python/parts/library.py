# ---- library -------------------------------------------------------------------------------------

# generated: constants


class _Failure(c_void_p):
    """A pllm_error. _check raises it as an Error."""


# generated: structs


# generated: functions


def _load() -> ctypes.CDLL:
    here = pathlib.Path(__file__).resolve().parent
    named = os.environ.get("PAGEDLLM_LIBRARY")
    above = list(here.parents)
    files = [here / "libpagedllm.so"]
    files += [root / "target" / "release" / "libpagedllm.so" for root in above[2:3]]  # root/bindings/python/pagedllm
    files += [prefix / "lib" / "libpagedllm.so.1" for prefix in above[3:4]]  # prefix/share/pagedllm/python/pagedllm
    path = named or next((str(file) for file in files if file.exists()), "libpagedllm.so.1")
    try:
        lib = ctypes.CDLL(path)
    except OSError as error:
        remedy = "install the package for this machine, or set PAGEDLLM_LIBRARY to the path of the library"
        raise ImportError(f"{_why_not_loaded(path) or error}; {remedy}") from error
    if lib.pllm_abi_version() != _ABI_VERSION:
        raise ImportError(f"{path} has ABI version {lib.pllm_abi_version()} (this module: {_ABI_VERSION}); "
                          "use the module and the library of one release")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(lib, name, None)
        if function is None:
            version = ctypes.CFUNCTYPE(c_char_p)(("pllm_version", lib))().decode()
            raise ImportError(f"{path} is version {version}, which has no {name}; "
                              f"use the module and the library of one release")
        function.restype, function.argtypes = result, arguments
        if result is _Failure:
            function.errcheck = _check
    return lib


def _why_not_loaded(path: str) -> Optional[str]:
    """Return the reason if the file is for another machine. The message of the loader can be wrong then."""
    try:
        with open(path, "rb") as file, open("/proc/self/exe", "rb") as program:
            header, own = file.read(20), program.read(20)
    except OSError:
        return None
    if header[:4] != b"\x7fELF":
        return f"{path} is no shared library (first bytes: {header[:4]!r})"
    # The class, the byte order and the machine of an ELF file.
    if header[4:6] + header[18:] == own[4:6] + own[18:]:
        return None
    return f"{path} is for another machine ({_machine(header)}, this process: {_machine(own)})"


def _machine(header: bytes) -> str:
    number = int.from_bytes(header[18:20], "little")
    return {3: "x86", 40: "ARM", 62: "x86-64", 183: "AArch64"}.get(number, f"ELF machine {number}")


def _check(error: _Failure, _function: Any, _arguments: Any) -> None:
    if error:
        try:
            # Both numbers are 0 unless a prompt is too long.
            raise Error(_lib.pllm_error_code(error), _lib.pllm_error_message(error).decode(),
                        _lib.pllm_error_prompt_tokens(error) or None, _lib.pllm_error_max_model_len(error) or None,
                        _lib.pllm_error_is_temporary(error) != 0)
        finally:
            _lib.pllm_error_free(error)


_lib = _load()


def version() -> str:
    """Return the version of the loaded library, such as "0.3.0"."""
    return _lib.pllm_version().decode()


def build_info() -> Dict[str, Any]:
    """Return a description of this build and machine, as pllm_build_info does."""
    return json.loads(_lib.pllm_build_info())
