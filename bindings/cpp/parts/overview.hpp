/*
 * libpagedllm for C++17: a header-only RAII wrapper of pagedllm.h. Link with -lpagedllm.
 *
 *     pagedllm::Options options;
 *     options.model_path = "models/mine";
 *     auto engine = pagedllm::Engine::create(options).value();
 *     auto answer = engine.generate({"Once upon a time"}).value();
 *     std::cout << answer.text << "\n";
 *
 * These rules apply to everything in this header; pagedllm.h has the others.
 *
 * Errors. A call that can fail returns Result<T>, or Status if there is no value. Test it with ok()
 * and use * and ->, or call value(), which throws Exception. With -fno-exceptions value() does not
 * exist, so that every error must be tested. -fno-rtti is supported. Besides value(), only the
 * standard library throws: std::bad_alloc, and std::system_error if generate_async cannot start a
 * thread.
 *
 * Ownership. Engine, Budget, Communicator, KvStore, Queue, Outputs, Stream, Sequence and Pin are
 * move-only and free what they own. A moved-from object can be destroyed and assigned to. Its other
 * calls return Code::invalid_argument, and its ranges are empty.
 *
 * Views. A std::string_view or Span argument needs to be valid only during the call. A returned
 * view is valid as long as its source: an Output as long as its Outputs, a ModelInfo as long as its
 * Engine.
 *
 * Threads. Unless Options::host_steps is set, a thread of the engine steps it, and sleeps while
 * there is nothing to do. Any thread may call any function of an Engine, Budget, Queue or Sequence
 * at any time. Only one thread at a time may use a Stream, an Outputs, a Communicator or a KvStore.
 * While a call on an object is in progress, no thread may move, assign or destroy the object. A call
 * on a Sequence or a Pin is also a call on its engine. All of these objects can outlive their
 * engine: requests in progress end as aborted, and later calls return Code::closed.
 */

#ifndef PAGEDLLM_HPP
#define PAGEDLLM_HPP

#include <pagedllm.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <future>
#include <iterator>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace pagedllm {

// The names have different types with and without exceptions. A program that passes these objects
// between code compiled with exceptions and code compiled without fails to link.
#ifdef __cpp_exceptions
inline namespace with_exceptions {
#else
inline namespace without_exceptions {
#endif
