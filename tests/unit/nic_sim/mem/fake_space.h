// SPDX-License-Identifier: Apache-2.0
//
// FakeSpace: an AddressSpace over a byte array at a made-up address. Records
// each call and fails where it is told to.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "nic_sim/mem/address_space.h"

namespace verbena::nic::testing {

class FakeSpace final : public AddressSpace {
 public:
  struct Call {
    bool write;
    std::vector<std::pair<uint64_t, size_t>> pieces;  // offset from base, bytes
    size_t local_pieces;
    bool operator==(const Call&) const = default;
  };

  FakeSpace(uint64_t base, size_t bytes) : base_(base), memory(bytes) {}

  uint64_t base() const { return base_; }
  // Accesses that touch [offset, offset + bytes) fail.
  void Break(size_t offset, size_t bytes) { broken_.push_back({offset, offset + bytes}); }
  void Vanish() { gone_ = true; }
  uint64_t Word(size_t offset) const {
    uint64_t word;
    std::memcpy(&word, &memory[offset], sizeof(word));
    return word;
  }
  void SetWord(size_t offset, uint64_t word) { std::memcpy(&memory[offset], &word, sizeof(word)); }

  size_t Read(std::span<const iovec> local, std::span<const iovec> remote) override {
    return Transfer(false, local, remote);
  }
  size_t Write(std::span<const iovec> local, std::span<const iovec> remote) override {
    return Transfer(true, local, remote);
  }
  Backend backend() const override { return Backend::kProcessVm; }

 private:
  size_t Transfer(bool write, std::span<const iovec> local, std::span<const iovec> remote) {
    ++system_calls_;
    Call call{write, {}, local.size()};
    size_t local_bytes = 0;
    size_t remote_bytes = 0;
    for (const iovec& piece : local) local_bytes += piece.iov_len;
    for (const iovec& piece : remote) {
      call.pieces.push_back({reinterpret_cast<uintptr_t>(piece.iov_base) - base_, piece.iov_len});
      remote_bytes += piece.iov_len;
    }
    calls.push_back(call);
    if (local_bytes != remote_bytes) {
      errors.push_back("lists differ: " + std::to_string(local_bytes) + " local, " +
                       std::to_string(remote_bytes) + " remote");
      return 0;
    }
    if (gone_) return 0;
    size_t index = 0;
    size_t offset = 0;
    for (size_t i = 0; i < remote.size(); ++i) {
      const auto [start, bytes] = call.pieces[i];
      if (start > memory.size() || bytes > memory.size() - start) return i;
      for (auto [from, to] : broken_) {
        if (start < to && from < start + bytes) return i;
      }
      for (size_t done = 0; done < bytes;) {
        while (offset == local[index].iov_len) {
          ++index;
          offset = 0;
        }
        const size_t step = std::min(bytes - done, local[index].iov_len - offset);
        auto* ours = static_cast<std::byte*>(local[index].iov_base) + offset;
        const uint64_t theirs = base_ + start + done;
        const uint64_t distance = write ? theirs - reinterpret_cast<uintptr_t>(ours)
                                        : reinterpret_cast<uintptr_t>(ours) - theirs;
        if (distance % 4096 - 1 < 31) ++bytewise_copies;
        if (write) {
          std::memcpy(&memory[start + done], ours, step);
        } else {
          std::memcpy(ours, &memory[start + done], step);
        }
        done += step;
        offset += step;
      }
    }
    return remote.size();
  }

  uint64_t base_;
  std::vector<std::pair<size_t, size_t>> broken_;

 public:
  std::vector<std::byte> memory;
  std::vector<Call> calls;
  std::vector<std::string> errors;  // of the caller
  // Copies whose destination lies 1 to 31 bytes behind the source, modulo 4096:
  // the kernel does those byte by byte.
  uint64_t bytewise_copies = 0;
};

}  // namespace verbena::nic::testing
