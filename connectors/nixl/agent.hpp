// An agent of NIXL with one block of registered memory. The functions of NIXL's C API are declared here
// and found by dlopen, so that nothing links with NIXL.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace pllm_nixl {

// Handles of the C API. They are pointers to structs of NIXL.
using Handle = void *;

// The functions of libnixl_capi.so that are used, without the prefix nixl_capi_. All return a status.
// The functions that create a list had a third parameter until NIXL 0.7; later versions ignore it.
#define PLLM_NIXL_FUNCTIONS(X)                                                                     \
    X(create_agent, const char *name, Handle *agent)                                               \
    X(destroy_agent, Handle agent)                                                                 \
    X(get_local_md, Handle agent, void **data, size_t *len)                                        \
    X(load_remote_md, Handle agent, const void *data, size_t len, char **name)                     \
    X(invalidate_remote_md, Handle agent, const char *name)                                        \
    X(get_plugin_params, Handle agent, const char *plugin, Handle *memory_types, Handle *params)   \
    X(destroy_mem_list, Handle memory_types)                                                       \
    X(destroy_params, Handle params)                                                               \
    X(create_backend, Handle agent, const char *plugin, Handle params, Handle *backend)            \
    X(destroy_backend, Handle backend)                                                             \
    X(create_opt_args, Handle *args)                                                               \
    X(destroy_opt_args, Handle args)                                                               \
    X(opt_args_add_backend, Handle args, Handle backend)                                           \
    X(create_reg_dlist, int memory_type, Handle *list, bool sorted)                                \
    X(destroy_reg_dlist, Handle list)                                                              \
    X(reg_dlist_add_desc, Handle list, uintptr_t address, size_t len, uint64_t device,             \
      const void *metadata, size_t metadata_len)                                                   \
    X(register_mem, Handle agent, Handle list, Handle args)                                        \
    X(deregister_mem, Handle agent, Handle list, Handle args)                                      \
    X(create_xfer_dlist, int memory_type, Handle *list, bool sorted)                               \
    X(destroy_xfer_dlist, Handle list)                                                             \
    X(xfer_dlist_add_desc, Handle list, uintptr_t address, size_t len, uint64_t device)            \
    X(create_xfer_req, Handle agent, int operation, Handle local, Handle remote, const char *name, \
      Handle *request, Handle args)                                                                \
    X(post_xfer_req, Handle agent, Handle request, Handle args)                                    \
    X(get_xfer_status, Handle agent, Handle request)                                               \
    X(release_xfer_req, Handle agent, Handle request)                                              \
    X(destroy_xfer_req, Handle request)

// The configuration of an agent, as NIXL 1.x reads it.
struct Config {
    uint8_t progress_thread = 1, listen_thread = 0;
    // Port, synchronization and number of workers, whose places differ between versions. 0 is the default.
    uint8_t defaults[14] = {};
    // Time after which the thread looks for events, even if it was not woken up.
    uint64_t progress_delay_us = 1000;
    uint64_t listen_delay_us = 100000;
    uint64_t telemetry = 0;
};
static_assert(sizeof(Config) == 40);

struct Api {
    // nullptr: the version of NIXL does not have it.
    int (*create_configured_agent)(const char *name, const Config *config, Handle *agent) = nullptr;
#define PLLM_NIXL_FIELD(name, ...) int (*name)(__VA_ARGS__);
    PLLM_NIXL_FUNCTIONS(PLLM_NIXL_FIELD)
#undef PLLM_NIXL_FIELD
};

// Loads the library, or throws Error. It stays loaded, because NIXL's threads may run its code.
Api load_api(const std::string &library);

enum class Transfer { RUNNING, DONE, FAILED };

class Agent {
public:
    // Throws Error if the backend cannot be created or cannot register the memory.
    Agent(const Api &api, std::string name, const std::string &backend, char *memory, size_t len);
    Agent(const Agent &) = delete;
    Agent &operator=(const Agent &) = delete;
    // Ends all transfers.
    ~Agent();

    const std::string &name() const { return name_; }

    // What other agents need to read the memory of this one.
    std::string metadata() const;

    // Loads the metadata of another agent, which must have this name.
    bool load(const std::string &peer, std::string_view metadata);

    // Forgets the metadata of an agent. Its transfers fail.
    void unload(const std::string &peer);

    // Starts to read memory of another agent. Returns nullptr if that fails.
    Handle start_read(const std::string &peer, char *to, uint64_t from, size_t len);
    Transfer state(Handle request) const;

    // Frees a request. Returns false if it still runs, so that its memory must not be reused.
    bool release(Handle request);

private:
    void create(const std::string &backend, char *memory, size_t len);
    void destroy() noexcept;
    Handle list_of(uint64_t address, size_t len) const;

    const Api api_;
    const std::string name_;
    Handle agent_ = nullptr, backend_ = nullptr, args_ = nullptr, registered_ = nullptr;
};

}  // namespace pllm_nixl
