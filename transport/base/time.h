// SPDX-License-Identifier: Apache-2.0
//
// Time and Duration: strong nanosecond types for sans-I/O code. Nothing here
// reads a clock: the caller passes the device clock's `now`. Time has no epoch
// of its own; only differences and order mean something. Time::Never() is
// later than every other time and stays so when a Duration is added.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>

namespace verbena::transport {

class Duration {
 public:
  constexpr Duration() = default;
  static constexpr Duration Nanoseconds(int64_t n) { return Duration(n); }
  static constexpr Duration Microseconds(int64_t n) { return Duration(n * 1'000); }
  static constexpr Duration Milliseconds(int64_t n) { return Duration(n * 1'000'000); }
  static constexpr Duration Seconds(int64_t n) { return Duration(n * 1'000'000'000); }
  static constexpr Duration Zero() { return Duration(0); }
  static constexpr Duration Max() { return Duration(std::numeric_limits<int64_t>::max()); }

  constexpr int64_t ns() const { return ns_; }
  constexpr int64_t us() const { return ns_ / 1'000; }
  constexpr int64_t ms() const { return ns_ / 1'000'000; }

  constexpr auto operator<=>(const Duration&) const = default;

  constexpr Duration& operator+=(Duration d) {
    ns_ += d.ns_;
    return *this;
  }
  constexpr Duration& operator-=(Duration d) {
    ns_ -= d.ns_;
    return *this;
  }
  friend constexpr Duration operator+(Duration a, Duration b) { return a += b; }
  friend constexpr Duration operator-(Duration a, Duration b) { return a -= b; }
  friend constexpr Duration operator*(Duration a, int64_t k) { return Duration(a.ns_ * k); }
  friend constexpr Duration operator*(int64_t k, Duration a) { return a * k; }
  friend constexpr Duration operator/(Duration a, int64_t k) { return Duration(a.ns_ / k); }

 private:
  explicit constexpr Duration(int64_t ns) : ns_(ns) {}
  int64_t ns_ = 0;
};

class Time {
 public:
  constexpr Time() = default;
  static constexpr Time FromNanoseconds(int64_t ns) { return Time(ns); }
  static constexpr Time Zero() { return Time(0); }
  static constexpr Time Max() { return Time(std::numeric_limits<int64_t>::max()); }
  static constexpr Time Never() { return Max(); }

  constexpr int64_t ns() const { return ns_; }
  constexpr bool IsNever() const { return *this == Never(); }

  constexpr auto operator<=>(const Time&) const = default;

  // Saturates at Never(), so "now + a very long timeout" cannot wrap.
  friend constexpr Time operator+(Time t, Duration d) {
    if (d.ns() > 0 && t.ns_ > Max().ns_ - d.ns()) return Never();
    if (t.IsNever()) return t;
    return Time(t.ns_ + d.ns());
  }
  friend constexpr Time operator-(Time t, Duration d) {
    return t.IsNever() ? t : Time(t.ns_ - d.ns());
  }
  friend constexpr Duration operator-(Time a, Time b) {
    return Duration::Nanoseconds(a.ns_ - b.ns_);
  }
  constexpr Time& operator+=(Duration d) { return *this = *this + d; }

 private:
  explicit constexpr Time(int64_t ns) : ns_(ns) {}
  int64_t ns_ = 0;
};

}  // namespace verbena::transport
