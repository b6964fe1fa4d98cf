// SPDX-License-Identifier: Apache-2.0
//
// The memory of one host of the simulation, and the MemoryPort of one half of a
// QP over it. Placements are queued and become visible, or fail, when the world
// says so.
//
// Two areas: a pattern that is only read (what is sent and what READs fetch) and
// targets, which are handed out once each. So what has to stand where is known
// without a copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "transport/memory_port.h"

namespace verbena::sim {

using transport::MemoryAccess;
using transport::MemorySegment;
using transport::MemoryStatus;
using transport::Ticket;

inline constexpr uint64_t kPatternBase = 0x5000'0000;
inline constexpr uint32_t kPatternBytes = 1 << 17;
inline constexpr uint64_t kTargetBase = 0x7000'0000'0000;

inline constexpr uint32_t kPatternKey = 0x101;  // may be read, locally and remotely
inline constexpr uint32_t kTargetKey = 0x202;   // all rights
inline constexpr uint32_t kLocalKey = 0x303;    // the targets, without remote rights
inline constexpr uint32_t kForeignKey = 0x404;  // of another protection domain
inline constexpr uint32_t kUnknownKey = 0x999;
// Keys that go away: they are invalidated, or the application takes them back.
// Even ones are over the pattern, odd ones over the targets, for local use.
inline constexpr uint32_t kFirstWindow = 0x1000;

// The pattern, the same on all hosts. `offset` + `bytes` <= kPatternBytes.
std::span<const std::byte> Pattern(uint64_t offset, uint64_t bytes);

class HostMemory {
 public:
  HostMemory();

  // Room that nobody else has; never overlaps or touches another one.
  uint64_t Allocate(uint32_t bytes);
  uint32_t AddWindow(bool over_targets = false);
  void RemoveWindow(uint32_t key) { windows_[key - kFirstWindow] = false; }
  bool IsWindow(uint32_t key) const {
    return key >= kFirstWindow && key - kFirstWindow < windows_.size();
  }

  MemoryStatus Check(uint32_t key, uint64_t address, uint64_t length, MemoryAccess access) const;
  MemoryStatus Invalidate(uint32_t key);
  MemoryStatus Bind(const transport::WindowBind& bind);
  // The range must have passed Check.
  std::span<const std::byte> Read(uint64_t address, uint64_t bytes) const;
  void Write(uint64_t address, std::span<const std::byte> bytes);
  bool IsTarget(uint64_t address, uint64_t bytes) const {
    return address >= kTargetBase && address - kTargetBase <= used_ &&
           bytes <= used_ - (address - kTargetBase);
  }
  uint64_t Word(uint64_t address) const;
  // A forged request may write anywhere in the targets, those of other
  // connections included: what stands there says nothing any more.
  void Spoil() { spoiled_ = true; }
  bool spoiled() const { return spoiled_; }

 private:
  std::vector<std::byte> targets_;
  uint64_t used_ = 0;
  bool spoiled_ = false;
  std::vector<bool> windows_;
};

// What watches a port.
class PortWatcher {
 public:
  virtual ~PortWatcher() = default;
  virtual void OnPlace(bool responder, const MemorySegment& to, std::span<const std::byte> bytes,
                       MemoryAccess access) = 0;
  // Returns a name for the operation, reported with OnAtomicExecuted.
  virtual uint64_t OnAtomic(uint64_t address, const transport::AtomicOperation& operation) = 0;
  virtual void OnAtomicExecuted(uint64_t name, uint64_t original) = 0;
  // `done`: the key was one that may be invalidated.
  virtual void OnInvalidate(bool responder, uint32_t key, bool done) = 0;
  virtual void OnBind(const transport::WindowBind& bind) = 0;
  // The sequence number of the request that is being handled.
  virtual uint64_t CurrentSequence() const = 0;
};

class Port final : public transport::MemoryPort {
 public:
  Port(HostMemory& memory, PortWatcher& watcher, bool responder)
      : memory_(memory), watcher_(watcher), responder_(responder) {}

  MemoryStatus Check(uint32_t key, uint64_t address, uint64_t length,
                     MemoryAccess access) override {
    return memory_.Check(key, address, length, access);
  }
  MemoryStatus CheckKey(uint32_t key, MemoryAccess access) override {
    return memory_.Check(key, kTargetBase, 0, access);
  }
  MemoryStatus Place(const MemorySegment& to, std::span<const std::byte> bytes, MemoryAccess access,
                     bool last, Ticket* ticket) override;
  MemoryStatus Atomic(uint32_t rkey, uint64_t address, const transport::AtomicOperation& operation,
                      Ticket* ticket) override;
  MemoryStatus Invalidate(uint32_t rkey) override;
  MemoryStatus Bind(const transport::WindowBind& bind) override;

  struct Committed {
    Ticket ticket = 0;
    bool is_atomic = false;
    uint64_t original = 0;
  };
  size_t pending() const { return operations_.size() - first_; }
  // The ticket of the oldest.
  Ticket oldest() const { return operations_[first_].ticket; }
  uint64_t oldest_sequence() const { return operations_[first_].sequence; }
  Committed CommitOldest();
  // Forgets all that is pending.
  void Clear();
  // No placement of a request with this or an earlier sequence number is pending.
  bool IsVisibleUpTo(uint64_t sequence) const {
    return pending() == 0 || operations_[first_].sequence > sequence;
  }

 private:
  struct Operation {
    Ticket ticket;
    uint64_t address;
    uint64_t sequence;
    uint32_t offset;  // in bytes_
    uint32_t length;
    bool is_atomic;
    uint64_t name;
    transport::AtomicOperation atomic;
  };

  Operation& Append(uint64_t address);

  HostMemory& memory_;
  PortWatcher& watcher_;
  const bool responder_;
  std::vector<Operation> operations_;
  std::vector<std::byte> bytes_;
  size_t first_ = 0;
  Ticket next_ticket_ = 1;
};

}  // namespace verbena::sim
