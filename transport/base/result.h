// SPDX-License-Identifier: Apache-2.0
//
// Result<T, E>: a value or a typed error, for code that must not throw
// (std::expected is C++23, gcc 12 does not have it). T and E are different
// types, so `return value;` and `return Error::kX;` both convert.
// Trivially copyable when T and E are. Reading the side that is not there is
// a programming error (assert).
#pragma once

#include <cassert>
#include <type_traits>
#include <utility>
#include <variant>

namespace verbena::transport {

template <typename T, typename E>
class [[nodiscard]] Result {
  static_assert(!std::is_same_v<T, E>, "value and error need different types");

 public:
  using value_type = T;
  using error_type = E;

  constexpr Result(T value)  // NOLINT(google-explicit-constructor)
      : state_(std::in_place_index<0>, std::move(value)) {}
  constexpr Result(E error)  // NOLINT(google-explicit-constructor)
      : state_(std::in_place_index<1>, std::move(error)) {}

  constexpr bool ok() const { return state_.index() == 0; }
  constexpr explicit operator bool() const { return ok(); }

  constexpr T& value() & {
    assert(ok());
    return *std::get_if<0>(&state_);
  }
  constexpr const T& value() const& {
    assert(ok());
    return *std::get_if<0>(&state_);
  }
  constexpr T&& value() && {
    assert(ok());
    return std::move(*std::get_if<0>(&state_));
  }
  constexpr T& operator*() & { return value(); }
  constexpr const T& operator*() const& { return value(); }
  constexpr T* operator->() { return &value(); }
  constexpr const T* operator->() const { return &value(); }

  constexpr const E& error() const {
    assert(!ok());
    return *std::get_if<1>(&state_);
  }

  constexpr T value_or(T fallback) const { return ok() ? value() : std::move(fallback); }

 private:
  std::variant<T, E> state_;
};

// Success without a value, or an error. `return {};` is success.
template <typename E>
class [[nodiscard]] Result<void, E> {
 public:
  using value_type = void;
  using error_type = E;

  constexpr Result() = default;
  constexpr Result(E error)  // NOLINT(google-explicit-constructor)
      : failed_(true), error_(std::move(error)) {}

  constexpr bool ok() const { return !failed_; }
  constexpr explicit operator bool() const { return ok(); }
  constexpr const E& error() const {
    assert(failed_);
    return error_;
  }

 private:
  bool failed_ = false;
  E error_{};
};

}  // namespace verbena::transport
