// ---- workers of several processes ---------------------------------------------------------------

// A rank of a group whose ranks compute one model: rank 0 with Engine::create, each other rank with
// run_worker. Both take the communicator of Options::communicator if they succeed, and the library
// then closes it. If they fail, destroying the communicator closes it, which the other ranks wait
// for.
//
//     auto world = pagedllm::Communicator::shared_memory("/dev/shm/my-service", rank, 2).value();
//     options.communicator = &world;
//     options.tensor_parallel = 2;
//     if (rank > 0) return pagedllm::run_worker(options).ok() ? 0 : 1;
//     auto engine = pagedllm::Engine::create(options).value();
class Communicator : public detail::Interface<pllm_communicator> {
public:
    // Joins a group of processes, or threads, of this host, which communicate through shared
    // memory. Waits until all ranks have joined. Rank 0 creates the file at `path`, usually below
    // /dev/shm. A timeout of 0 is no limit. See pllm_communicator_shared_memory.
    static Result<Communicator> shared_memory(const std::string &path, uint32_t rank, uint32_t size,
                                              std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
        if (path.find('\0') != std::string::npos) {
            return Error{Code::invalid_argument, "path has a NUL byte; pass a path of a file"};
        }
        // A negative duration becomes the shortest one.
        const auto limit = timeout.count() < 0 ? uint64_t{1} : static_cast<uint64_t>(timeout.count());
        auto c = detail::filled<pllm_communicator>([&](pllm_communicator *out) {
            return pllm_communicator_shared_memory(path.c_str(), rank, size, limit, out);
        });
        if (!c) return c.error();
        return Communicator(*c);
    }

    // Takes ownership of a communicator of the host: its own struct of functions, or that of
    // bindings/mpi.
    //
    //     pllm_communicator mpi{};
    //     mpi.struct_size = sizeof mpi;
    //     if (pllm_mpi_communicator(MPI_COMM_WORLD, &mpi) != MPI_SUCCESS) return 1;
    //     auto world = pagedllm::Communicator::adopt(mpi);
    [[nodiscard]] static Communicator adopt(const pllm_communicator &c) { return Communicator(c); }

    // Number of this rank, below size.
    [[nodiscard]] uint32_t rank() const noexcept { return c().rank; }
    // Number of ranks.
    [[nodiscard]] uint32_t size() const noexcept { return c().size; }

    // Returns the C struct. A communicator that an engine or a worker has taken, or that has been
    // moved from, is an error.
    Result<const pllm_communicator *> named() const {
        if (state() == State::taken) {
            return Error{Code::invalid_argument, "the communicator is closed, or belongs to an engine or a worker; create another one"};
        }
        if (state() == State::moved) {
            return Error{Code::invalid_argument, "the communicator has been moved from; pass another communicator"};
        }
        return &c();
    }

private:
    explicit Communicator(const pllm_communicator &c) noexcept : Interface(c) {}
};
