// ---- KV stores ----------------------------------------------------------------------------------

// A store of KV blocks outside of the pool of an engine: on a disk, on another host. Engine::create
// takes the store of Options::kv_store if it succeeds, and the engine then closes it. If it fails,
// destroying the store closes it. Each engine needs a store of its own.
//
//     pllm_files_store_options files;
//     pllm_files_store_options_init(&files, sizeof files);
//     files.directory = "/var/cache/my-service/kv";
//     auto store = pagedllm::KvStore::open(pllm_files_store_open, files).value();
//     options.kv_store = &store;
//     auto engine = pagedllm::Engine::create(options).value();
class KvStore : public detail::Interface<pllm_kv_store> {
public:
    // Opens a store with the function of a connector, such as pllm_files_store_open or
    // pllm_valkey_store_open, and its options.
    template <class ConnectorOptions>
    static Result<KvStore> open(int32_t (*connector)(const ConnectorOptions *, pllm_kv_store *, char *, uint64_t),
                                const ConnectorOptions &options) {
        pllm_kv_store c{};
        c.struct_size = sizeof c;
        char text[512] = "";
        if (const int32_t code = connector(&options, &c, text, sizeof text); code != 0) return Error{Code(code), text};
        return KvStore(c);
    }

    // Takes ownership of a store of the host: its own struct of functions.
    [[nodiscard]] static KvStore adopt(const pllm_kv_store &c) { return KvStore(c); }

    // Returns the C struct. A store that an engine has taken, or that has been moved from, is an
    // error.
    Result<const pllm_kv_store *> named() const {
        if (state() == State::taken) {
            return Error{Code::invalid_argument, "the KV store belongs to another engine; open a store for each engine"};
        }
        if (state() == State::moved) {
            return Error{Code::invalid_argument, "the KV store has been moved from; pass another store"};
        }
        return &c();
    }

private:
    explicit KvStore(const pllm_kv_store &c) noexcept : Interface(c) {}
};
