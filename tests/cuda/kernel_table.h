// Kernels by name, as a module has them.
#pragma once
#include <functional>
#include <tuple>
#include <utility>

struct Kernel {
    const char *name;
    // The kernel with a copy of its arguments, which lie where `parameters` points to.
    std::function<void()> (*bind)(void **parameters);
};

extern const Kernel kernel_table[]; // ends with a null name

template <class... T, size_t... i>
std::function<void()> bind_parameters(void (*kernel)(T...), void **parameters, std::index_sequence<i...>) {
    std::tuple<T...> copied(*static_cast<T *>(parameters[i])...);
    return [=] { std::apply(kernel, copied); };
}

template <class... T> std::function<void()> bind_parameters(void (*kernel)(T...), void **parameters) {
    return bind_parameters(kernel, parameters, std::index_sequence_for<T...>());
}

#define KERNEL(name) {#name, [](void **parameters) { return bind_parameters(name, parameters); }},
