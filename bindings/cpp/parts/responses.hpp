// ---- responses -----------------------------------------------------------------------------------

// Separates reasoning, content and tool calls of one response while it is generated.
//
//     ResponseParser parser = ResponseParser::create(engine, R"({"tools": [...]})").value();
//     std::string deltas = parser.feed(output.text).value();  // [{"content": "..."}]
class ResponseParser {
public:
    // `settings_json` is documented at pllm_response_parser_create. Feed the texts of a request with
    // skip_special = false. The parser does not need the engine later.
    static Result<ResponseParser> create(const Engine &engine, std::string_view settings_json = "{}") {
        return of(engine.native(), settings_json);
    }

    // Creates a parser without an engine. The settings must name a format.
    static Result<ResponseParser> create(std::string_view settings_json) { return of(nullptr, settings_json); }

    // Returns the deltas of the next piece as a JSON array, as a chat completion streams them.
    Result<std::string> feed(std::string_view text) {
        return detail::copied(detail::create<pllm_bytes, pllm_bytes_free>([&](pllm_bytes **out) {
            return pllm_response_parser_feed(parser_.get(), text.data() ? text.data() : "", text.size(), out);
        }));
    }

    // Ends the response and returns the last deltas.
    Result<std::string> finish() {
        return detail::copied(detail::create<pllm_bytes, pllm_bytes_free>(
            [&](pllm_bytes **out) { return pllm_response_parser_finish(parser_.get(), out); }));
    }

private:
    using Owned = detail::Handle<pllm_response_parser, pllm_response_parser_free>;
    explicit ResponseParser(Owned parser) noexcept : parser_(std::move(parser)) {}

    static Result<ResponseParser> of(const pllm_engine *engine, std::string_view settings_json) {
        auto parser = detail::create<pllm_response_parser, pllm_response_parser_free>([&](pllm_response_parser **out) {
            return pllm_response_parser_create(engine, settings_json.data(), settings_json.size(), out);
        });
        if (!parser) return parser.error();
        return ResponseParser(std::move(*parser));
    }

    Owned parser_;
};

}  // inline namespace
}  // namespace pagedllm

#endif  // PAGEDLLM_HPP
