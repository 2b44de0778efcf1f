// ---- conversions between C and C++ --------------------------------------------------------------

namespace detail {

template <auto free>
struct Free {
    template <class T>
    void operator()(T *handle) const noexcept {
        free(handle);
    }
};

template <class T, auto free>
using Handle = std::unique_ptr<T, Free<free>>;

// Converts an error and frees it.
inline Status status(pllm_error *error) {
    if (!error) return {};
    Handle<pllm_error, pllm_error_free> owned(error);
    return Error{Code(pllm_error_code(error)), pllm_error_message(error), pllm_error_prompt_tokens(error),
                 pllm_error_max_model_len(error), pllm_error_is_temporary(error) != 0};
}

// Returns the struct that `fill` fills.
template <class T, class Fill>
Result<T> filled(Fill fill) {
    T value{};
    value.struct_size = sizeof value;
    if (Status done = status(fill(&value)); !done) return done.error();
    return value;
}

// Returns the object that `make` creates, as an owning handle.
template <class T, auto free, class Make>
Result<Handle<T, free>> create(Make make) {
    T *raw = nullptr;
    if (Status done = status(make(&raw)); !done) return done.error();
    return Handle<T, free>(raw);
}

// Returns the library's defaults.
template <class T, auto init>
const T &defaults() {
    static const T value = [] {
        T filled;
        init(&filled, sizeof filled);
        return filled;
    }();
    return value;
}

//: defaults Options
//: defaults Sampling
//: defaults Request
//: defaults Dry
//: defaults Beam
//: defaults Fork
//: defaults Resume
//: defaults Prefix

inline std::string_view view(const char *text, uint64_t len) noexcept { return {text, static_cast<size_t>(len)}; }

// Copies the fields that the library provides. An older library provides fewer; the others are
// zero.
template <class T>
T known(const T &record) noexcept {
    T c{};
    std::memcpy(&c, &record, std::min(static_cast<size_t>(record.struct_size), sizeof c));
    return c;
}

// Returns the 32 bytes of a hash, or none for null.
inline std::string_view hash(const uint8_t *data) noexcept { return {reinterpret_cast<const char *>(data), data ? size_t{32} : 0}; }

template <class T>
Span<const T> view(const T *data, uint64_t len) noexcept {
    return {data, static_cast<size_t>(len)};
}

inline Result<std::string> copied(const Result<Handle<pllm_bytes, pllm_bytes_free>> &bytes) {
    if (!bytes) return bytes.error();
    return std::string(view(pllm_bytes_data(bytes->get()), pllm_bytes_len(bytes->get())));
}

}  // namespace detail

// ---- library ------------------------------------------------------------------------------------

// Returns the version of the loaded library, such as "0.3.0".
[[nodiscard]] inline std::string_view version() { return pllm_version(); }

// Returns a JSON object that describes this build and machine, as pllm_build_info does.
[[nodiscard]] inline std::string_view build_info() { return pllm_build_info(); }

// Checks that the loaded library has the ABI version of the header. Engine::create calls it.
inline Status check_abi(uint32_t header = PLLM_ABI_VERSION) {
    const uint32_t library = pllm_abi_version();
    if (library == header) return {};
    return Error{Code::unsupported, "libpagedllm " + std::string(pllm_version()) + " has ABI version " + std::to_string(library) +
                                        " (pagedllm.h: " + std::to_string(header) +
                                        "); build the program with the header of this library"};
}

// ---- memory budgets -----------------------------------------------------------------------------

//: alias BudgetInfo

// A memory budget that a Budget or an Engine owns. Valid as long as its owner.
class BudgetView {
public:
    // Changes the size of the budget while its engines run. No request ends, and results do not
    // change. If the engines and their requests need more than `bytes`, the call returns
    // Code::capacity with the smallest possible size.
    Status resize(uint64_t bytes) const { return detail::status(pllm_budget_resize(budget_, bytes)); }

    Result<BudgetInfo> info() const {
        return detail::filled<BudgetInfo>([&](BudgetInfo *out) { return pllm_budget_get_info(budget_, out); });
    }

    [[nodiscard]] const pllm_budget *native() const noexcept { return budget_; }

    // Returns the handle. A budget that has been moved from is an error, because NULL selects a
    // budget of the engine's own.
    Result<const pllm_budget *> named() const {
        if (!budget_) return Error{Code::invalid_argument, "the budget has been moved from; pass another budget"};
        return budget_;
    }

protected:
    friend class Engine;
    explicit BudgetView(const pllm_budget *budget) noexcept : budget_(budget) {}

    const pllm_budget *budget_;
};

// A memory budget for KV pools, which several engines can share. It can be destroyed before its
// engines: they keep the budget.
//
//     pagedllm::Budget budget = pagedllm::Budget::create(1 << 30).value();
//     options.budget = &budget;
class Budget : public BudgetView {
public:
    // Creates a budget that resize can later raise to at most `max_bytes` (0: to `bytes`).
    static Result<Budget> create(uint64_t bytes, uint64_t max_bytes = 0) {
        auto budget = detail::create<pllm_budget, pllm_budget_free>(
            [&](pllm_budget **out) { return pllm_budget_create(bytes, max_bytes, out); });
        if (!budget) return budget.error();
        return Budget(std::move(*budget));
    }

    Budget(Budget &&other) noexcept : BudgetView(std::exchange(other.budget_, nullptr)), owned_(std::move(other.owned_)) {}
    Budget &operator=(Budget &&other) noexcept {
        budget_ = std::exchange(other.budget_, nullptr);
        owned_ = std::move(other.owned_);
        return *this;
    }

private:
    using Owned = detail::Handle<pllm_budget, pllm_budget_free>;
    explicit Budget(Owned owned) noexcept : BudgetView(owned.get()), owned_(std::move(owned)) {}

    Owned owned_;
};
