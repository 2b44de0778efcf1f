// GET /metrics: the metrics of HTTP and of all engines in the OpenMetrics text format.
#include <filesystem>
#include <system_error>
#include <unordered_map>

#include "server.hpp"

namespace server {

void Server::count(const Endpoint *endpoint, unsigned status) {
    const std::lock_guard lock(mutex_);
    counts_[{endpoint ? endpoint->path : "/", status}]++;
}

static std::string gauge(const std::string &name, const std::string &help, int64_t value) {
    return "# HELP " + name + " " + help + "\n# TYPE " + name + " gauge\n" + name + " " + std::to_string(value) + "\n";
}

std::string Server::http_metrics() {
    std::string text = "# HELP pagedllm_http_requests HTTP requests by endpoint and status.\n# TYPE pagedllm_http_requests counter\n";
    {
        const std::lock_guard lock(mutex_);
        for (const auto &[key, count] : counts_) {
            text += "pagedllm_http_requests_total{path=\"" + key.first + "\",status=\"" + std::to_string(key.second) + "\"} " +
                    std::to_string(count) + "\n";
        }
    }
    text += gauge("pagedllm_http_requests_in_progress", "HTTP requests in progress that use an engine.", requests_);
    text += gauge("pagedllm_http_connections", "Open connections.", connections_);
    std::error_code error;
    std::filesystem::directory_iterator descriptors("/proc/self/fd", error);
    if (!error) text += gauge("process_open_fds", "File descriptors of the process.", std::distance(begin(descriptors), end(descriptors)));
    return text;
}

namespace {

// Merges the metrics of several engines, which the label model_name distinguishes. OpenMetrics
// wants each family once, with all of its samples, and one end of the text.
class Merger {
public:
    void add(const std::string &text) {
        std::string family;
        bool is_known = false;
        for (size_t begin = 0; begin < text.size();) {
            const size_t end = std::min(text.find('\n', begin), text.size() - 1) + 1;
            const std::string line = text.substr(begin, end - begin);
            begin = end;
            if (line == "\n" || line == "# EOF\n" || line == "# EOF") continue;
            if (line[0] != '#') {
                families_[family].samples += line;
                continue;
            }
            const std::string name = word(line, 2);
            if (name != family) {
                family = name;
                is_known = families_.count(family) > 0;
                if (!is_known) order_.push_back(family);
            }
            if (!is_known) families_[family].head += line;
        }
    }

    [[nodiscard]] std::string text() const {
        std::string merged;
        for (const std::string &name : order_) merged += families_.at(name).head + families_.at(name).samples;
        return merged + "# EOF\n";
    }

private:
    struct Family {
        std::string head, samples;
    };

    // Returns a word of a line, counted from 0.
    static std::string word(const std::string &line, int index) {
        size_t begin = 0;
        for (; index > 0; index--) begin = std::min(line.find(' ', begin), line.size() - 1) + 1;
        return line.substr(begin, line.find_first_of(" \n", begin) - begin);
    }

    std::vector<std::string> order_;
    std::unordered_map<std::string, Family> families_;
};

}  // namespace

Reply Server::metrics(const HttpRequest &) {
    Merger merger;
    merger.add(http_metrics());
    for (const std::unique_ptr<Model> &model : models_) merger.add(value_of(model->engine.metrics()));
    Reply reply;
    reply.body = merger.text();
    reply.content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    return reply;
}

}  // namespace server
