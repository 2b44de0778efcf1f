class _FilesOptions(ctypes.Structure):
    """pllm_files_store_options of connectors/files/pagedllm_files.h."""
    _fields_ = [
        ("struct_size", c_uint64), ("directory", c_char_p), ("directory_len", c_uint64), ("max_bytes", c_uint64), ("io", c_uint32),
        ("threads", c_uint32),
    ]


class _ValkeyOptions(ctypes.Structure):
    """pllm_valkey_store_options of connectors/valkey/pagedllm_valkey.h."""
    _fields_ = [
        ("struct_size", c_uint64), ("host", c_char_p), ("host_len", c_uint64), ("username", c_char_p), ("username_len", c_uint64),
        ("password", c_char_p), ("password_len", c_uint64), ("key_prefix", c_char_p), ("key_prefix_len", c_uint64),
        ("ttl_seconds", c_uint64), ("port", c_uint32), ("database", c_uint32), ("timeout_ms", c_uint32), ("reserved", c_uint32),
    ]


class KvStore:
    """A store of KV blocks outside of the pool of an engine: on a disk, or on another host.

    The libraries of connectors/ have the stores, which files() and valkey() open. An engine takes
    the store if it is created, and then closes it. Each engine needs a store of its own; several
    stores may refer to the same data.

        with KvStore.files("/var/cache/my-service/kv") as store:
            engine = Engine("models/mine", kv_store=store)

    A with statement closes the store at its end, if no engine has taken it.
    """

    def __init__(self, struct: Any) -> None:
        struct.is_taken = False  # whether it belongs to an engine

        def close(_address: int) -> None:
            if not struct.is_taken:
                struct.close(struct.user_data)

        self._struct = struct
        self._taking = threading.Lock()
        self._handle = _Handle("KV store", ctypes.addressof(struct), close)

    @classmethod
    def files(cls, directory: Path, *, max_bytes: Optional[int] = None, io_uring: Optional[bool] = None,
              threads: Optional[int] = None, library: Optional[Path] = None) -> "KvStore":
        """Open a store in a directory of a local disk, which any number of engines may use.

        directory: It is created if it does not exist. An existing one must be empty or that of a
            store.
        max_bytes: Bytes that the files may occupy, at least 1 MiB. None: 10 GiB.
        io_uring: True: if the system does not permit io_uring, the call raises Code.UNSUPPORTED.
            False: threads. None: io_uring if the system permits it, otherwise threads.
        threads: Number of threads without io_uring, at most 64. None: 4.
        library: Path of libpagedllm_files.so. None: beside the library, in build/connectors of the
            repository, or as the system's loader finds it.
        """
        connector = _Connector("files", library)
        c = connector.defaults(_FilesOptions)
        _assign_path(c, "directory", directory)
        _assign(c, "max_bytes", max_bytes)
        _assign(c, "io", None if io_uring is None else 2 if io_uring else 1)  # PLLM_FILES_IO_*
        _assign(c, "threads", threads)
        return cls(connector.open(c))

    @classmethod
    def valkey(cls, host: Optional[Path] = None, port: Optional[int] = None, *, username: Optional[Text] = None,
               password: Optional[Text] = None, database: Optional[int] = None, key_prefix: Optional[Text] = None,
               ttl_seconds: Optional[int] = None, timeout_ms: Optional[int] = None,
               library: Optional[Path] = None) -> "KvStore":
        """Open a store in a Valkey or Redis server. The call does not wait for the server.

        host: Name or address. A path that begins with "/" is a Unix socket. None: 127.0.0.1.
        port: TCP port. None: 6379.
        username: User name. None: that of the server.
        password: Password. None: none.
        database: Number of the database. None: 0.
        key_prefix: Beginning of the names of all keys, at most 256 bytes. None: "pagedllm:kv:".
        ttl_seconds: Time after which an unused value expires. None: never.
        timeout_ms: Time without progress after which a connection is closed. None: 2000.
        library: Path of libpagedllm_valkey.so. None: as for files().
        """
        connector = _Connector("valkey", library)
        c = connector.defaults(_ValkeyOptions)
        _assign_path(c, "host", host)
        for name, text in (("username", username), ("password", password), ("key_prefix", key_prefix)):
            _assign_text(c, name, text)
        for name, number in (("port", port), ("database", database), ("ttl_seconds", ttl_seconds), ("timeout_ms", timeout_ms)):
            _assign(c, name, number)
        return cls(connector.open(c))

    def close(self) -> None:
        """Close the store. No effect on an engine that has taken it."""
        self._handle.close()

    def __enter__(self) -> "KvStore":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Connector:
    """A library of connectors/. It stays loaded, because a store that hangs can outlive its engine."""

    def __init__(self, name: str, library: Optional[Path]) -> None:
        file = f"libpagedllm_{name}.so"
        folders = [pathlib.Path(_lib._name).parent] if "/" in _lib._name else []
        folders += [root / "build" / "connectors" for root in pathlib.Path(__file__).resolve().parents[3:4]]
        found = (str(folder / file) for folder in folders if (folder / file).exists())
        path = next(found, f"{file}.1") if library is None else os.fsdecode(library)
        try:
            self._library = ctypes.CDLL(path)
            self._init = self._library[f"pllm_{name}_store_options_init"]
            self._open = self._library[f"pllm_{name}_store_open"]
        except (OSError, AttributeError) as error:
            remedy = f"run `make connectors`, or pass the path of {file} as library"
            raise Error(Code.IO, f"{_why_not_loaded(path) or error}; {remedy}") from error
        self._init.restype, self._init.argtypes = None, [c_void_p, c_uint64]
        self._open.argtypes = [c_void_p, c_void_p, c_char_p, c_uint64]

    def defaults(self, kind: Type[ctypes.Structure]) -> Any:
        return _defaults(kind, self._init)

    def open(self, options: Any) -> Any:
        struct, text = _KvStore(sizeof(_KvStore)), ctypes.create_string_buffer(512)
        code = self._open(byref(options), byref(struct), text, len(text))
        if code:
            raise Error(_member(Code, code), text.value.decode(errors="replace"))
        return struct


@contextlib.contextmanager
def _offered(store: Optional[KvStore], options: Any) -> Generator[None, None, None]:
    """Make the store an option of the call in a with statement, which takes it if it succeeds."""
    if store is None:
        yield
        return
    with store._handle, store._taking:
        if store._struct.is_taken:
            raise Error(Code.INVALID_ARGUMENT, "the KV store belongs to another engine; open a store for each engine")
        options.kv_store = ctypes.pointer(store._struct)
        yield
        store._struct.is_taken = True
