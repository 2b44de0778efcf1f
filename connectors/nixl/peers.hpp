// The other agents: whether they are there, and whether their memory can be read.
#pragma once

#include <unordered_map>

#include "agent.hpp"
#include "index.hpp"

namespace pllm_nixl {

class Peers {
public:
    // The lease of a peer is looked up again after a third of `lease`.
    Peers(Agent &agent, Index &index, std::string prefix, std::chrono::milliseconds lease)
        : agent_(agent), index_(index), prefix_(std::move(prefix)), lease_(lease) {}

    // Adds a command to the index that looks up the lease of a peer, if that is not known. After the next
    // `run` of the index, `is_usable` and `has_ended` are up to date.
    void look_up(const std::string &name, Clock::time_point now);

    bool is_usable(const std::string &name, Clock::time_point now) const;
    // The lease of the peer has ended. False if the index does not answer.
    bool has_ended(const std::string &name) const;

    // A transfer has failed, or does not end: the peer is not used for the time of a lease.
    void fail(const std::string &name, Clock::time_point now);

    // Notes that values of a peer are being read.
    void use(const std::string &name, Clock::time_point now);

    // Forgets the peers that were not used for several leases.
    void sweep(Clock::time_point now);

    std::string name_of_lease(const std::string &name) const { return prefix_ + "agent:" + name; }

private:
    struct Peer {
        bool is_alive = false, is_loaded = false, has_ended = false;
        Clock::time_point checked{}, used{}, avoided_until{};
    };

    void process(const std::string &name, const Reply &reply);
    void unload(const std::string &name, Peer &peer);

    Agent &agent_;
    Index &index_;
    const std::string prefix_;
    const std::chrono::milliseconds lease_;
    std::unordered_map<std::string, Peer> peers_;
};

}  // namespace pllm_nixl
