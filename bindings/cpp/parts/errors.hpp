// ---- errors -------------------------------------------------------------------------------------

// PLLM_E_*. A newer library can return codes without a name here.
//: enum Code

// An error: a code, and a message with the numbers and the remedy.
struct Error {
    Code code;
    std::string message;
    // Number of tokens of a prompt that is too long for max_model_len. 0 for any other error.
    uint64_t prompt_tokens = 0;
    // max_model_len of the engine for which a prompt is too long. 0 for any other error.
    uint64_t max_model_len = 0;
    // Whether the same call can succeed later without a change, for example when fewer requests wait.
    bool is_temporary = false;
};

#ifdef __cpp_exceptions
// The exception that value() throws.
class Exception : public std::runtime_error {
public:
    explicit Exception(const Error &error)
        : std::runtime_error(error.message),
          code_(error.code),
          prompt_tokens_(error.prompt_tokens),
          max_model_len_(error.max_model_len),
          is_temporary_(error.is_temporary) {}

    [[nodiscard]] Code code() const noexcept { return code_; }

    // As the fields of Error.
    [[nodiscard]] uint64_t prompt_tokens() const noexcept { return prompt_tokens_; }
    [[nodiscard]] uint64_t max_model_len() const noexcept { return max_model_len_; }
    [[nodiscard]] bool is_temporary() const noexcept { return is_temporary_; }

private:
    Code code_;
    uint64_t prompt_tokens_;
    uint64_t max_model_len_;
    bool is_temporary_;
};
#endif

// A value or an error.
template <class T>
class [[nodiscard]] Result {
public:
    Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
    Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

    [[nodiscard]] bool ok() const noexcept { return state_.index() == 0; }
    [[nodiscard]] explicit operator bool() const noexcept { return ok(); }

    // Requires ok(). On a temporary, the value is moved out, so that a range-for over `*call()` is
    // safe.
    [[nodiscard]] T &operator*() & noexcept { return *get(); }
    [[nodiscard]] const T &operator*() const & noexcept { return *get(); }
    [[nodiscard]] T operator*() && { return std::move(*get()); }
    [[nodiscard]] T *operator->() noexcept { return get(); }
    [[nodiscard]] const T *operator->() const noexcept { return get(); }

    // Requires !ok().
    [[nodiscard]] const Error &error() const noexcept {
        assert(!ok());
        return *std::get_if<1>(&state_);
    }

#ifdef __cpp_exceptions
    // Returns the value. Throws Exception if there is none.
    T &value() & { return check(), *get(); }
    const T &value() const & { return check(), *get(); }
    T value() && { return check(), std::move(*get()); }
#endif

private:
    T *get() noexcept {
        assert(ok());
        return std::get_if<0>(&state_);
    }
    const T *get() const noexcept {
        assert(ok());
        return std::get_if<0>(&state_);
    }
#ifdef __cpp_exceptions
    void check() const {
        if (!ok()) throw Exception(error());
    }
#endif

    std::variant<T, Error> state_;
};

// Success or an error.
template <>
class [[nodiscard]] Result<void> {
public:
    Result() = default;
    Result(Error error) : error_(std::move(error)) {}

    [[nodiscard]] bool ok() const noexcept { return error_.code == success; }
    [[nodiscard]] explicit operator bool() const noexcept { return ok(); }

    // Requires !ok().
    [[nodiscard]] const Error &error() const noexcept {
        assert(!ok());
        return error_;
    }

#ifdef __cpp_exceptions
    // Throws Exception if the call failed.
    void value() const {
        if (!ok()) throw Exception(error_);
    }
#endif

private:
    static constexpr Code success{0};  // no error has this code

    Error error_{success, {}};
};

using Status = Result<void>;

// ---- spans --------------------------------------------------------------------------------------

// A view of an array. Converts from any type with data() and size(), and to std::span in C++20. It
// is not std::span itself, so that files of one program can be compiled as C++17 and as C++20.
template <class T>
class Span {
public:
    constexpr Span() noexcept = default;
    constexpr Span(T *data, size_t size) noexcept : data_(data), size_(size) {}

    template <class Array, class Element = std::remove_pointer_t<decltype(std::data(std::declval<const Array &>()))>,
              class = std::enable_if_t<std::is_convertible_v<Element (*)[], T (*)[]>>>
    constexpr Span(const Array &array) noexcept : Span(std::data(array), std::size(array)) {}

    [[nodiscard]] constexpr T *data() const noexcept { return data_; }
    [[nodiscard]] constexpr size_t size() const noexcept { return size_; }
    [[nodiscard]] constexpr bool empty() const noexcept { return size_ == 0; }
    [[nodiscard]] constexpr T *begin() const noexcept { return data_; }
    [[nodiscard]] constexpr T *end() const noexcept { return data_ + size_; }
    [[nodiscard]] constexpr T &operator[](size_t i) const noexcept { return assert(i < size_), data_[i]; }

private:
    T *data_ = nullptr;
    size_t size_ = 0;
};
