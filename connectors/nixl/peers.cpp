#include "peers.hpp"

namespace pllm_nixl {
namespace {

constexpr size_t MAX_PEERS = 4096, MAX_METADATA = 256 << 10;

}  // namespace

void Peers::look_up(const std::string &name, Clock::time_point now) {
    const auto found = peers_.find(name);
    if (found == peers_.end() && peers_.size() >= MAX_PEERS) return;
    Peer &peer = found == peers_.end() ? peers_[name] : found->second;
    peer.used = now;
    const bool is_known = is_usable(name, now) && now < peer.checked + lease_ / 3;
    if (is_known || now < peer.avoided_until) return;
    peer.checked = now;
    index_.add({"GETRANGE", name_of_lease(name), "0", std::to_string(MAX_METADATA)},
               [this, name](const Reply &reply) { process(name, reply); });
}

void Peers::process(const std::string &name, const Reply &reply) {
    const auto found = peers_.find(name);
    if (found == peers_.end()) return;
    Peer &peer = found->second;
    // GETRANGE returns an empty value for a key that does not exist.
    peer.has_ended = reply.kind == Reply::TEXT && reply.text.empty();
    peer.is_alive = reply.kind == Reply::TEXT && !reply.text.empty() && reply.text.size() <= MAX_METADATA;
    if (peer.has_ended) {
        unload(name, peer);
    } else if (!peer.is_alive) {
        return;
    } else if (!peer.is_loaded) {
        peer.is_loaded = agent_.load(name, reply.text);
        if (!peer.is_loaded) peer.avoided_until = Clock::now() + lease_;
    }
}

bool Peers::is_usable(const std::string &name, Clock::time_point now) const {
    const auto found = peers_.find(name);
    return found != peers_.end() && found->second.is_alive && found->second.is_loaded && now >= found->second.avoided_until;
}

bool Peers::has_ended(const std::string &name) const {
    const auto found = peers_.find(name);
    return found != peers_.end() && found->second.has_ended;
}

void Peers::fail(const std::string &name, Clock::time_point now) {
    const auto found = peers_.find(name);
    if (found == peers_.end() || now < found->second.avoided_until) return;
    unload(name, found->second);
    found->second.avoided_until = now + lease_;
}

void Peers::use(const std::string &name, Clock::time_point now) {
    const auto found = peers_.find(name);
    if (found != peers_.end()) found->second.used = now;
}

void Peers::unload(const std::string &name, Peer &peer) {
    if (peer.is_loaded) agent_.unload(name);
    peer.is_loaded = peer.is_alive = false;
}

void Peers::sweep(Clock::time_point now) {
    for (auto peer = peers_.begin(); peer != peers_.end();) {
        const bool is_unused = now > peer->second.used + 4 * lease_ && now >= peer->second.avoided_until;
        if (is_unused) unload(peer->first, peer->second);
        peer = is_unused ? peers_.erase(peer) : std::next(peer);
    }
}

}  // namespace pllm_nixl
