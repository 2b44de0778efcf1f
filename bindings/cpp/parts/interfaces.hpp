// ---- structs of functions -----------------------------------------------------------------------

namespace detail {

// A struct of functions that the library takes. It is closed if no call has taken it.
template <class C>
class Interface {
public:
    Interface(Interface &&other) noexcept : c_(other.c_), state_(std::exchange(other.state_, State::moved)) {}
    Interface &operator=(Interface &&other) noexcept {
        if (this != &other) {
            close();
            c_ = other.c_;
            state_ = std::exchange(other.state_, State::moved);
        }
        return *this;
    }
    ~Interface() { close(); }

    // Gives the struct to a call of the C API that has succeeded.
    void release() noexcept { state_ = State::taken; }

protected:
    enum class State { owned, taken, moved };

    explicit Interface(const C &c) noexcept : c_(c) {}

    [[nodiscard]] const C &c() const noexcept { return c_; }
    [[nodiscard]] State state() const noexcept { return state_; }

private:
    void close() noexcept {
        if (state_ == State::owned && c_.close) c_.close(c_.user_data);
    }

    C c_;
    State state_ = State::owned;
};

}  // namespace detail
