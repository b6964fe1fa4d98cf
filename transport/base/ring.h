// SPDX-License-Identifier: Apache-2.0
//
// Ring<T, N>: a bounded queue with room for N (a power of two) and access by
// position. Allocates once, at construction, and does not touch slots that are
// not used. Starts over at slot 0 when it runs empty, so that a queue that is
// mostly short stays in few cache lines. One thread.
#pragma once

#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace verbena::transport {

template <typename T, uint32_t kCapacity>
class Ring {
  static_assert(std::has_single_bit(kCapacity));
  static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= alignof(std::max_align_t));

 public:
  // Raw bytes, so that pages of slots that are never used stay untouched: T
  // may have initialisers, and there may be ten thousand QPs.
  Ring() : bytes_(std::make_unique_for_overwrite<std::byte[]>(sizeof(T) * kCapacity)) {}

  bool empty() const { return head_ == tail_; }
  bool full() const { return size() == kCapacity; }
  uint32_t size() const { return tail_ - head_; }
  void clear() { head_ = tail_ = 0; }

  // Position 0 is the front.
  T& operator[](uint32_t position) {
    assert(position < size());
    return Slot(head_ + position);
  }
  T& front() { return (*this)[0]; }
  T& back() { return (*this)[size() - 1]; }

  // The new back, with whatever the slot held.
  T& push_back() {
    assert(!full());
    return Slot(tail_++);
  }
  void pop_front() {
    assert(!empty());
    if (++head_ == tail_) head_ = tail_ = 0;
  }
  // Keeps the first `count`.
  void truncate(uint32_t count) {
    assert(count <= size());
    tail_ = head_ + count;
    if (empty()) head_ = tail_ = 0;
  }
  // Makes room at `position`; the elements from there on move back.
  T& insert(uint32_t position) {
    push_back();
    for (uint32_t i = size() - 1; i > position; --i) (*this)[i] = (*this)[i - 1];
    return (*this)[position];
  }

 private:
  T& Slot(uint32_t number) { return reinterpret_cast<T*>(bytes_.get())[number & (kCapacity - 1)]; }

  std::unique_ptr<std::byte[]> bytes_;
  uint32_t head_ = 0;
  uint32_t tail_ = 0;
};

}  // namespace verbena::transport
