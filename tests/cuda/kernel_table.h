// Kernels by name, like in a module.
#pragma once
#include <functional>
#include <tuple>
#include <utility>

struct Kernel {
    const char *name;
    // Binds the kernel to a copy of its arguments, to which `parameters` points.
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
