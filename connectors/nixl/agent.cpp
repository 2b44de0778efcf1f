#include "agent.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>

#include "connector.hpp"

namespace pllm_nixl {
namespace {

using pllm_connector::Error;

constexpr char DEFAULT_LIBRARY[] = "libnixl_capi.so";
// Constants of the C API.
constexpr int SUCCESS = 0, IN_PROGRESS = 1, MEMORY_DRAM = 0, OPERATION_READ = 0;

struct Free {
    void operator()(void *data) const { std::free(data); }
};

}  // namespace

Api load_api(const std::string &library) {
    const std::string name = library.empty() ? DEFAULT_LIBRARY : library;
    void *handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *reason = dlerror();
        throw Error{PLLM_E_UNSUPPORTED, "NIXL cannot be loaded (" + std::string(reason ? reason : name) +
                                            "); install NIXL, and set library to the path of its libnixl_capi.so"};
    }
    Api api;
    const auto find = [&](const char *function) {
        void *address = dlsym(handle, function);
        if (!address)
            throw Error{PLLM_E_UNSUPPORTED, name + " is no C API of NIXL, or an old one (" + function + " is missing); install NIXL 1.x"};
        return address;
    };
#define PLLM_NIXL_LOAD(function, ...) api.function = reinterpret_cast<int (*)(__VA_ARGS__)>(find("nixl_capi_" #function));
    PLLM_NIXL_FUNCTIONS(PLLM_NIXL_LOAD)
#undef PLLM_NIXL_LOAD
    api.create_configured_agent =
        reinterpret_cast<int (*)(const char *, const Config *, Handle *)>(dlsym(handle, "nixl_capi_create_configured_agent"));
    return api;
}

Agent::Agent(const Api &api, std::string name, const std::string &backend, char *memory, size_t len) : api_(api), name_(std::move(name)) {
    try {
        create(backend, memory, len);
    } catch (...) {
        destroy();
        throw;
    }
}

Agent::~Agent() { destroy(); }

void Agent::create(const std::string &backend, char *memory, size_t len) {
    const auto unsupported = [](const std::string &text) { throw Error{PLLM_E_UNSUPPORTED, text}; };
    // By default, the thread of the backend polls without a pause, which occupies a CPU.
    const Config config;
    const int created = api_.create_configured_agent ? api_.create_configured_agent(name_.c_str(), &config, &agent_)
                                                     : api_.create_agent(name_.c_str(), &agent_);
    if (created != SUCCESS) unsupported("NIXL cannot create an agent; set NIXL_LOG_LEVEL=DEBUG to see why");
    Handle memory_types = nullptr, params = nullptr;
    if (api_.get_plugin_params(agent_, backend.c_str(), &memory_types, &params) != SUCCESS)
        unsupported("backend is " + backend + ", which NIXL cannot load; set NIXL_PLUGIN_DIR to the folder of its plugins");
    const int status = api_.create_backend(agent_, backend.c_str(), params, &backend_);
    api_.destroy_mem_list(memory_types);
    api_.destroy_params(params);
    if (status != SUCCESS) unsupported("backend is " + backend + ", which NIXL cannot start; set NIXL_LOG_LEVEL=DEBUG to see why");
    const bool is_registered =
        api_.create_opt_args(&args_) == SUCCESS && api_.opt_args_add_backend(args_, backend_) == SUCCESS &&
        api_.create_reg_dlist(MEMORY_DRAM, &registered_, false) == SUCCESS &&
        api_.reg_dlist_add_desc(registered_, reinterpret_cast<uintptr_t>(memory), len, 0, nullptr, 0) == SUCCESS &&
        api_.register_mem(agent_, registered_, args_) == SUCCESS;
    if (!is_registered)
        throw Error{PLLM_E_OUT_OF_MEMORY, "backend " + backend + " cannot register " + std::to_string(len) +
                                              " bytes of memory; lower max_bytes, or raise RLIMIT_MEMLOCK"};
}

void Agent::destroy() noexcept {
    // The agent deregisters its memory.
    if (agent_) api_.destroy_agent(agent_);
    if (registered_) api_.destroy_reg_dlist(registered_);
    if (args_) api_.destroy_opt_args(args_);
    if (backend_) api_.destroy_backend(backend_);
}

std::string Agent::metadata() const {
    void *data = nullptr;
    size_t len = 0;
    if (api_.get_local_md(agent_, &data, &len) != SUCCESS)
        throw Error{PLLM_E_UNSUPPORTED, "NIXL has no metadata of its agent; set NIXL_LOG_LEVEL=DEBUG to see why"};
    const std::unique_ptr<void, Free> owner(data);
    return {static_cast<const char *>(data), len};
}

bool Agent::load(const std::string &peer, std::string_view metadata) {
    char *name = nullptr;
    if (api_.load_remote_md(agent_, metadata.data(), metadata.size(), &name) != SUCCESS) return false;
    const std::unique_ptr<char, Free> owner(name);
    if (peer == name) return true;
    unload(name);
    return false;
}

void Agent::unload(const std::string &peer) { api_.invalidate_remote_md(agent_, peer.c_str()); }

Handle Agent::list_of(uint64_t address, size_t len) const {
    Handle list = nullptr;
    if (api_.create_xfer_dlist(MEMORY_DRAM, &list, false) != SUCCESS) return nullptr;
    if (api_.xfer_dlist_add_desc(list, address, len, 0) == SUCCESS) return list;
    api_.destroy_xfer_dlist(list);
    return nullptr;
}

Handle Agent::start_read(const std::string &peer, char *to, uint64_t from, size_t len) {
    const Handle local = list_of(reinterpret_cast<uintptr_t>(to), len), remote = list_of(from, len);
    Handle request = nullptr;
    // The request has copies of the lists.
    const bool is_created = local && remote &&
                            api_.create_xfer_req(agent_, OPERATION_READ, local, remote, peer.c_str(), &request, args_) == SUCCESS;
    for (const Handle list : {local, remote})
        if (list) api_.destroy_xfer_dlist(list);
    if (!is_created) return nullptr;
    const int status = api_.post_xfer_req(agent_, request, nullptr);
    if (status == SUCCESS || status == IN_PROGRESS) return request;
    release(request);
    return nullptr;
}

Transfer Agent::state(Handle request) const {
    const int status = api_.get_xfer_status(agent_, request);
    return status == IN_PROGRESS ? Transfer::RUNNING : status == SUCCESS ? Transfer::DONE : Transfer::FAILED;
}

bool Agent::release(Handle request) {
    if (api_.release_xfer_req(agent_, request) != SUCCESS) return false;
    api_.destroy_xfer_req(request);
    return true;
}

}  // namespace pllm_nixl
