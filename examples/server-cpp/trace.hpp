// The log, and the place of a request in a trace (W3C Trace Context).
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace server {

// Writes a line such as `time=... level=INFO msg="text" name=value` to the standard error stream.
// Attributes with empty values are left out. Any thread may call it.
void log_line(const char *level, std::string_view message,
              std::initializer_list<std::pair<std::string_view, std::string>> attributes = {}) noexcept;

// The ids of a request, in hexadecimal.
struct TraceContext {
    std::string trace_id, span_id, flags;

    // Continues the trace of the header traceparent, or begins a trace.
    static TraceContext from_header(std::string_view traceparent);

    // Returns the value of the header traceresponse.
    [[nodiscard]] std::string header() const { return "00-" + trace_id + "-" + span_id + "-" + flags; }
};

}  // namespace server
