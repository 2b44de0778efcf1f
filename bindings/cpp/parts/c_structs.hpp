// ---- C structs of options -----------------------------------------------------------------------

namespace detail {

inline uint32_t flag(bool on, uint32_t bit) noexcept { return on ? bit : 0; }

inline void set_text(const char *&data, uint64_t &len, const std::string &text) noexcept {
    data = text.data();
    len = text.size();
}

// Sets a text unless it is empty.
inline void set_optional_text(const char *&data, uint64_t &len, const std::string &text) noexcept {
    if (!text.empty()) set_text(data, len, text);
}

template <class C, class T>
void set_array(const C *&data, uint64_t &len, const std::vector<T> &array) noexcept {
    data = array.data();
    len = array.size();
}

// Sets an array of lists, whose views are stored in `lists`.
inline void set_lists(const pllm_token_list *&data, uint64_t &len, std::vector<pllm_token_list> &lists,
                      const std::vector<std::vector<uint32_t>> &from) {
    for (const std::vector<uint32_t> &tokens : from) {
        pllm_token_list &list = lists.emplace_back();
        set_array(list.tokens, list.tokens_len, tokens);
    }
    set_array(data, len, lists);
}

inline void set_milliseconds(int64_t &c, std::chrono::milliseconds duration) noexcept { c = duration.count(); }

// 0 means no limit. A negative duration becomes the shortest one instead.
inline void set_milliseconds(uint64_t &c, std::chrono::milliseconds duration) noexcept {
    c = duration.count() < 0 ? 1 : static_cast<uint64_t>(duration.count());
}

inline void set_milliseconds(uint32_t &c, std::chrono::milliseconds duration, const char *name, Status &status) {
    const int64_t milliseconds = duration.count();
    if (milliseconds >= 0 && milliseconds <= int64_t{UINT32_MAX}) {
        c = static_cast<uint32_t>(milliseconds);
    } else if (status) {
        status = Error{Code::invalid_argument,
                       std::string(name) + " is " + std::to_string(milliseconds) + " ms; must be 0 to 4294967295 ms"};
    }
}

// Sets a handle unless `view` is null.
template <class C, class View>
void set_handle(const C *&handle, const View *view, Status &status) {
    if (!view) return;
    const Result<const C *> named = view->named();
    if (named) {
        handle = *named;
    } else if (status) {
        status = named.error();
    }
}

// Pointers and lengths of strings, as the C API takes them.
class CStrings {
public:
    // Sets the fields of a C struct. The strings must outlive it.
    void install(const std::vector<std::string> &strings, const char *const *&data, const uint64_t *&lens, uint64_t &count) {
        for (const std::string &string : strings) {
            data_.push_back(string.data());
            lens_.push_back(string.size());
        }
        data = data_.data();
        lens = lens_.data();
        count = data_.size();
    }

    // As above, unless there is no list. An empty list is not NULL: NULL selects the default.
    void install(const std::optional<std::vector<std::string>> &strings, const char *const *&data, const uint64_t *&lens,
                 uint64_t &count) {
        static constexpr const char *none[1] = {};
        if (!strings) return;
        install(*strings, data, lens, count);
        if (!data) data = none;
    }

private:
    std::vector<const char *> data_;
    std::vector<uint64_t> lens_;
};

inline void set_grammar(pllm_sampling &c, CStrings &choices, const Grammar &grammar) {
    c.grammar_kind = static_cast<uint32_t>(grammar.kind);
    if (grammar.kind != GrammarKind::none || !grammar.text.empty()) set_text(c.grammar, c.grammar_len, grammar.text);
    choices.install(grammar.choices, c.choices, c.choice_lens, c.choice_count);
}

// Sets the prompt of a pllm_request or a pllm_pin.
template <class C>
void set_prompt(C &c, const Prompt &prompt) noexcept {
    // An empty prompt is not NULL: NULL means that no prompt is given.
    static constexpr uint32_t no_tokens[1] = {};
    if (const auto *text = std::get_if<std::string_view>(&prompt)) {
        c.prompt = text->data() ? text->data() : "";
        c.prompt_len = text->size();
    } else if (const auto *tokens = std::get_if<Span<const uint32_t>>(&prompt)) {
        c.prompt_token_ids = tokens->data() ? tokens->data() : no_tokens;
        c.prompt_token_ids_len = tokens->size();
    }
}

template <class C>
void set_salt(C &c, std::string_view salt) noexcept {
    c.cache_salt = reinterpret_cast<const uint8_t *>(salt.data());
    c.cache_salt_len = salt.size();
}

//: c_struct Options

//: c_struct Dry

//: c_struct Sampling

//: c_struct Beam

//: c_struct Request

//: c_struct Resume

//: c_struct Prefix

// Returns the C struct of options. It points into `options`, which must outlive it.
inline Result<pllm_engine_options> c_options(const Options &options) {
    COptions c(options);
    if (!c.status) return c.status.error();
    return c.native;
}

inline pllm_pin c_pin(const Prefix &prefix) { return CPrefix(prefix).native; }

// Passes the library's progress reports to Options::progress. It catches exceptions, which must not
// cross C frames.
class ProgressCall {
public:
    explicit ProgressCall(const Options &options) : progress_(options.progress) {}

    void install(pllm_engine_options &options) {
        if (!progress_) return;
        options.progress = [](void *self, uint64_t done, uint64_t total) noexcept -> int32_t {
            return static_cast<ProgressCall *>(self)->report(done, total) ? 0 : 1;
        };
        options.progress_data = this;
    }

    void rethrow() const {
#ifdef __cpp_exceptions
        if (thrown_) std::rethrow_exception(thrown_);
#endif
    }

private:
    bool report(uint64_t done, uint64_t total) noexcept {
#ifdef __cpp_exceptions
        try {
            return progress_(done, total);
        } catch (...) {
            thrown_ = std::current_exception();
            return false;
        }
#else
        return progress_(done, total);
#endif
    }

    const std::function<bool(uint64_t, uint64_t)> &progress_;
#ifdef __cpp_exceptions
    std::exception_ptr thrown_;
#endif
};

// Makes a call that loads a model. If it succeeds, the library has the communicator.
template <class Call>
auto load(const Options &options, Call call) -> decltype(call(std::declval<const pllm_engine_options *>())) {
    if (Status same = check_abi(); !same) return same.error();
    auto c = c_options(options);
    if (!c) return c.error();
    ProgressCall progress(options);
    progress.install(*c);
    auto result = call(&*c);
    if (result && options.communicator) options.communicator->release();
    progress.rethrow();
    return result;
}

}  // namespace detail
