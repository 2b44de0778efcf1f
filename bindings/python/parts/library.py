# ---- library -------------------------------------------------------------------------------------

# generated: constants


class _Failure(c_void_p):
    """A pllm_error. _check raises it as an Error."""


# generated: structs


# generated: functions


def _load() -> ctypes.CDLL:
    here = pathlib.Path(__file__).resolve().parent
    named = os.environ.get("PAGEDLLM_LIBRARY")
    root = here.parents[1]
    files = (here / "libpagedllm.so", root / "target" / "release" / "libpagedllm.so", root.parent / "lib" / "libpagedllm.so.1")
    path = named or next((str(file) for file in files if file.exists()), "libpagedllm.so.1")
    try:
        lib = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"{error}; set PAGEDLLM_LIBRARY to the path of the library") from error
    if lib.pllm_abi_version() != _ABI_VERSION:
        raise ImportError(f"{path} has ABI version {lib.pllm_abi_version()} (this module: {_ABI_VERSION}); "
                          "use the module and the library of one release")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
        if result is _Failure:
            function.errcheck = _check
    return lib


def _check(error: _Failure, _function: Any, _arguments: Any) -> None:
    if error:
        try:
            # Both numbers are 0 unless a prompt is too long.
            raise Error(_lib.pllm_error_code(error), _lib.pllm_error_message(error).decode(),
                        _lib.pllm_error_prompt_tokens(error) or None, _lib.pllm_error_max_model_len(error) or None)
        finally:
            _lib.pllm_error_free(error)


_lib = _load()


def version() -> str:
    """Return the version of the loaded library, such as "0.3.0"."""
    return _lib.pllm_version().decode()


def build_info() -> Dict[str, Any]:
    """Return a description of this build and machine, as pllm_build_info does."""
    return json.loads(_lib.pllm_build_info())
