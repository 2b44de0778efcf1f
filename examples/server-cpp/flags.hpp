// The flags of the program.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server.hpp"

namespace server {

struct ModelFlag {
    std::string name, path;
};

struct Flags {
    std::vector<ModelFlag> models;
    std::map<std::string, std::string> formats;  // by model; "": of models without their own
    boost::asio::ip::tcp::endpoint address{boost::asio::ip::address_v4::loopback(), 8080};
    uint64_t kv_bytes = 1 << 30;
    pagedllm::Options engine;
    Options server;
    uint32_t workers = 2;

    [[nodiscard]] std::string format_of(const std::string &model) const;
};

// Throws std::invalid_argument if a flag is wrong. Returns nullopt after it has printed the help.
std::optional<Flags> parse_flags(int argc, char **argv);

}  // namespace server
