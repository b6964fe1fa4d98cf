// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/mem/dma_queue.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace verbena::nic {
namespace {

using transport::AtomicKind;
using transport::AtomicOperation;
using transport::MemoryAccess;
using transport::MemoryStatus;
using transport::Ticket;

constexpr uint32_t kNone = UINT32_MAX;
constexpr uint32_t kWord = 8;        // bytes; the unit that is never torn
constexpr uint32_t kMaxGroups = 64;  // address spaces in one run
// Remote pieces of one call. More gain nothing: a piece costs far more than its
// share of the call.
constexpr uint32_t kMaxPieces = 256;
constexpr uint32_t kMaxPiecesPerEntry = 5;
// Payloads up to this are copied together, which saves an iovec each. Larger ones
// are copied by the kernel from where they are.
constexpr uint32_t kSmallPlacement = 64;
// Fetches up to this are read together with the bytes between them, if those are
// few and in the same page. [measured: a remote piece costs 0.2-0.4 µs, reading
// 512 bytes more 0.02]
constexpr uint32_t kSmallFetch = 128;
constexpr uint32_t kMaxGap = 512;
constexpr uint64_t kPage = 4096;
constexpr uint32_t kScratchBytes = 256 * 1024;
// On x86 the kernel copies with `rep movsb`. Where the destination lies 1-31 bytes
// behind the source, modulo 4096, that goes byte by byte: 30-150 times slower, and
// it tears words [measured on Sapphire Rapids]. Twice that, to be sure.
constexpr uint64_t kAliasWindow = 64;
// What scratch skips to get out of it, so far that neighbours do not get into it.
constexpr uint32_t kAliasSkip = 2048;
constexpr uint32_t kMaxAtomics = 32;  // of one read and one write
constexpr auto kSlowCopy = std::chrono::milliseconds(5);

void* Remote(uint64_t address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }
uint64_t AddressOf(const iovec& remote) {
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(remote.iov_base));
}
uint64_t AddressOf(const void* local) {
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(local));
}
// A copy from `from` to `to` is one of the bad ones.
bool Aliases(uint64_t to, uint64_t from) {
  return (to - from) % kPage - 1 < kAliasWindow - 1;  // 0 is a good distance
}
iovec Local(const void* from, size_t bytes) { return {const_cast<void*>(from), bytes}; }

// Something queued for an address space, in the order of its chain.
struct Placement {
  enum class Kind : uint8_t { kUnwatched, kWatched, kLast, kAtomic };
  enum class Status : uint8_t { kQueued, kDone, kFailed };

  uint64_t address;
  const std::byte* from;
  Ticket ticket;
  uint32_t length;       // kAtomic: index of the operation
  uint32_t slot;         // of the owner
  uint32_t next;         // in the chain of its address space
  uint16_t first_piece;  // while in a call: the remote pieces that hold it
  uint16_t last_piece;
  Kind kind;
  Status status;
  [[no_unique_address]] DmaClaim claim;
};

struct AtomicEntry {
  AtomicOperation operation;
  uint64_t original;
};

// An owner with placements in a batch.
struct Slot {
  DmaOwner* owner;  // nullptr: forgotten
  uint32_t bucket;
  uint32_t run;  // the run in which `group` is valid
  uint32_t group;
  bool failed;           // during the copies
  bool failed_reported;  // during the report
  Ticket placed;         // to report; 0: nothing
};

struct Chain {
  AddressSpace* space;
  uint32_t head;
  uint32_t tail;
};

// The address spaces of a run, each with the chain of its entries.
struct Chains {
  Chain chains[kMaxGroups];
  uint32_t count = 0;
  uint32_t recent = 0;

  // Index of the chain of `space`, or kNone if there is no room for a new one.
  uint32_t Find(AddressSpace* space) {
    if (recent < count && chains[recent].space == space) return recent;
    for (uint32_t i = 0; i < count; ++i) {
      if (chains[i].space == space) return recent = i;
    }
    if (count == kMaxGroups) return kNone;
    chains[count] = {space, kNone, kNone};
    return recent = count++;
  }
  // `entries` have a `next`.
  template <typename Entry>
  void Append(uint32_t chain, Entry* entries, uint32_t index) {
    Chain& c = chains[chain];
    entries[index].next = kNone;
    if (c.tail == kNone) {
      c.head = index;
    } else {
      entries[c.tail].next = index;
    }
    c.tail = index;
  }
  void Clear() { count = 0; }
};

// Placements between two reports.
struct Batch {
  explicit Batch(uint32_t capacity)
      : entries(std::make_unique_for_overwrite<Placement[]>(capacity)),
        atomics(std::make_unique_for_overwrite<AtomicEntry[]>(capacity)),
        slots(std::make_unique_for_overwrite<Slot[]>(capacity)),
        bucket_count(std::bit_ceil(2 * capacity)),
        buckets(std::make_unique<uint32_t[]>(bucket_count)) {}

  std::unique_ptr<Placement[]> entries;
  std::unique_ptr<AtomicEntry[]> atomics;
  std::unique_ptr<Slot[]> slots;
  const uint32_t bucket_count;
  std::unique_ptr<uint32_t[]> buckets;  // slot + 1, by hash of the owner; 0: empty
  uint32_t count = 0;
  uint32_t atomic_count = 0;
  uint32_t slot_count = 0;
  uint32_t recent_slot = 0;
  uint32_t run = 1;
  Chains chains;  // what is not copied yet

  uint32_t* BucketOf(DmaOwner* owner) {
    auto hash = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(owner)) * 0x9e3779b97f4a7c15u;
    for (uint64_t i = hash >> 32;; ++i) {
      uint32_t& bucket = buckets[i & (bucket_count - 1)];
      if (bucket == 0 || slots[bucket - 1].owner == owner) return &bucket;
    }
  }

  uint32_t SlotOf(DmaOwner* owner) {
    if (recent_slot < slot_count && slots[recent_slot].owner == owner) return recent_slot;
    uint32_t* bucket = BucketOf(owner);
    if (*bucket == 0) {
      slots[slot_count] = {.owner = owner,
                           .bucket = static_cast<uint32_t>(bucket - buckets.get()),
                           .run = 0,
                           .group = 0,
                           .failed = false,
                           .failed_reported = false,
                           .placed = 0};
      *bucket = ++slot_count;
    }
    return recent_slot = *bucket - 1;
  }

  // The slot stays in its bucket, so that searches pass over it.
  void Forget(DmaOwner* owner) {
    const uint32_t bucket = *BucketOf(owner);
    if (bucket != 0) slots[bucket - 1].owner = nullptr;
  }

  bool IsVoid(const Placement& entry) const {
    const Slot& slot = slots[entry.slot];
    return slot.failed || slot.owner == nullptr;
  }

  void Clear() {
    for (uint32_t i = 0; i < slot_count; ++i) buckets[slots[i].bucket] = 0;
    count = atomic_count = slot_count = 0;
    chains.Clear();
    ++run;
  }
};

struct FetchEntry {
  uint64_t address;
  std::byte* to;
  uint32_t length;
  uint32_t tag;
  uint32_t next;
  uint16_t piece;
  bool failed;
  const std::byte* bounced;  // where in scratch it was read to, or nullptr
  [[no_unique_address]] DmaClaim claim;
};

// The lists of one call and what they are made of.
struct CallLists {
  iovec remote[kMaxPieces];
  iovec local[kMaxPieces + 1024];
  uint32_t remote_count = 0;
  uint32_t local_count = 0;
  uint32_t scratch_used = 0;
  std::unique_ptr<std::byte[]> scratch = std::make_unique<std::byte[]>(kScratchBytes);

  void Clear() { remote_count = local_count = scratch_used = 0; }
  bool HasRoom(uint32_t pieces) const {
    return remote_count + pieces <= kMaxPieces && local_count < std::size(local);
  }
  bool ScratchHasRoom(uint32_t bytes) const {
    return scratch_used + bytes + kAliasSkip <= kScratchBytes;
  }
  static bool WantsScratch(uint64_t to, const std::byte* from, uint32_t length) {
    return length <= kSmallPlacement || Aliases(to, AddressOf(from));
  }
  // Room must be there. What is taken is good to copy from, or to, `address`.
  std::byte* TakeScratch(uint32_t bytes, uint64_t address, bool write) {
    const uint64_t here = AddressOf(scratch.get() + scratch_used);
    if (write ? Aliases(address, here) : Aliases(here, address)) scratch_used += kAliasSkip;
    std::byte* taken = scratch.get() + scratch_used;
    scratch_used += bytes;
    return taken;
  }
  void AddRemote(uint64_t address, uint64_t end) {
    remote[remote_count++] = {Remote(address), static_cast<size_t>(end - address)};
  }
  // Bytes that go to `to`.
  void AddLocal(const std::byte* from, uint32_t length, uint64_t to) {
    if (WantsScratch(to, from, length) && ScratchHasRoom(length)) {
      std::byte* copy = TakeScratch(length, to, /*write=*/true);
      std::memcpy(copy, from, length);
      iovec* last = local_count > 0 ? &local[local_count - 1] : nullptr;
      if (last != nullptr && static_cast<std::byte*>(last->iov_base) + last->iov_len == copy) {
        last->iov_len += length;
        return;
      }
      from = copy;
    }
    local[local_count++] = Local(from, length);
  }
  std::span<const iovec> remotes() const { return {remote, remote_count}; }
  std::span<const iovec> locals() const { return {local, local_count}; }
};

constexpr uint64_t AlignDown(uint64_t address) { return address & ~uint64_t{kWord - 1}; }
constexpr uint64_t AlignUp(uint64_t address) { return AlignDown(address + kWord - 1); }

}  // namespace

struct DmaQueue::State {
  explicit State(uint32_t queue_capacity)
      : capacity(queue_capacity),
        batches{Batch(queue_capacity), Batch(queue_capacity)},
        fetches(std::make_unique_for_overwrite<FetchEntry[]>(queue_capacity)) {
    failed_tags.reserve(queue_capacity);
    reported_tags.reserve(queue_capacity);
  }

  const uint32_t capacity;
  bool claims_required = false;
  Counters counters;
  CallLists call;

  // Placements. New ones go to batches[filling]; the other one is empty or being
  // reported.
  Batch batches[2];
  uint32_t filling = 0;
  bool reporting = false;

  Batch& current() { return batches[filling]; }
  Placement& Append(AddressSpace* space, DmaOwner* owner);
  void Run(Batch& batch);
  void RunChain(Batch& batch, const Chain& chain);
  uint32_t BuildCall(Batch& batch, const Chain& chain, uint32_t cursor, uint32_t unmerged_until);
  void AddPlacement(Placement& entry, bool may_merge);
  uint32_t RunAtomics(Batch& batch, AddressSpace* space, uint32_t cursor);
  void Fail(Batch& batch, Placement& entry);
  void Report(Batch& batch);
  void Flush();

  // Fetches.
  std::unique_ptr<FetchEntry[]> fetches;
  uint32_t fetch_count = 0;
  Chains fetch_chains;
  std::vector<uint32_t> failed_tags;    // since the last FlushFetches
  std::vector<uint32_t> reported_tags;  // being reported by FlushFetches

  void RunFetches();
  void RunFetchChain(const Chain& chain);
  uint32_t BuildFetchCall(const Chain& chain, uint32_t cursor, uint32_t single_until);
  bool AddToSpan(FetchEntry& entry, bool may_merge);
  void PlaceSpan(const iovec& span);
  void Deliver(FetchEntry& entry);

  // The last remote piece can take more: what was added last, and for whom.
  bool open_piece = false;
  uint32_t open_slot = 0;
  // For each remote piece of a fetch: where its span lies in scratch, or nullptr.
  std::byte* span_scratch[kMaxPieces];
  std::byte* span_base = nullptr;  // of the last piece, if it is a span

  // Of each entry, when the lists of a call are made.
  void CheckRight(const DmaClaim& claim, const AddressSpace* space, uint64_t address,
                  uint64_t length) const {
    if constexpr (kCheckDma) {
      if (claims_required || HasClaim(claim)) CheckClaim(claim, space, address, length);
    }
  }

  size_t Copy(AddressSpace* space, bool write) {
    const auto start = std::chrono::steady_clock::now();
    const uint64_t calls = space->system_calls();
    const size_t done = write ? space->Write(call.locals(), call.remotes())
                              : space->Read(call.locals(), call.remotes());
    counters.system_calls += space->system_calls() - calls;
    if (std::chrono::steady_clock::now() - start > kSlowCopy) ++counters.slow_copies;
    return done;
  }
};

// ---------------------------------------------------------------- placements

Placement& DmaQueue::State::Append(AddressSpace* space, DmaOwner* owner) {
  if (current().count == capacity) {
    // Only callbacks that queue more than the whole queue get here while we report.
    if (reporting) abort();
    Flush();
  }
  Batch& batch = current();
  uint32_t chain = batch.chains.Find(space);
  const uint32_t slot = batch.SlotOf(owner);
  // Chains run one after the other. An owner that changes to another address
  // space keeps its order: what it has queued is copied first.
  if (chain == kNone || (batch.slots[slot].run == batch.run && batch.slots[slot].group != chain)) {
    Run(batch);
    chain = batch.chains.Find(space);
  }
  batch.slots[slot].run = batch.run;
  batch.slots[slot].group = chain;
  const uint32_t index = batch.count++;
  batch.chains.Append(chain, batch.entries.get(), index);
  Placement& entry = batch.entries[index];
  entry.slot = slot;
  entry.status = Placement::Status::kQueued;
  return entry;
}

void DmaQueue::State::Run(Batch& batch) {
  for (uint32_t i = 0; i < batch.chains.count; ++i) RunChain(batch, batch.chains.chains[i]);
  batch.chains.Clear();
  ++batch.run;
}

void DmaQueue::State::Fail(Batch& batch, Placement& entry) {
  entry.status = Placement::Status::kFailed;
  batch.slots[entry.slot].failed = true;
  ++counters.failures;
}

void DmaQueue::State::RunChain(Batch& batch, const Chain& chain) {
  Placement* entries = batch.entries.get();
  uint32_t cursor = chain.head;
  uint32_t unmerged_until = cursor;  // entries up to this one start a piece of their own
  while (cursor != kNone) {
    Placement& first = entries[cursor];
    if (batch.IsVoid(first)) {
      cursor = first.next;
      continue;
    }
    if (chain.space->gone()) {
      Fail(batch, first);
      cursor = first.next;
      continue;
    }
    if (first.kind == Placement::Kind::kAtomic) {
      cursor = RunAtomics(batch, chain.space, cursor);
      continue;
    }
    const uint32_t end = BuildCall(batch, chain, cursor, unmerged_until);
    const size_t done = call.remote_count == 0 ? 0 : Copy(chain.space, /*write=*/true);
    uint32_t i = cursor;
    for (; i != end; i = entries[i].next) {
      if (batch.IsVoid(entries[i])) continue;
      if (entries[i].length > 0 && entries[i].last_piece >= done) break;
      entries[i].status = Placement::Status::kDone;
    }
    if (i == end) {
      cursor = end;
      continue;
    }
    // Entry i holds a part of the bad piece. If others do too, say which one it
    // is by copying them again one by one.
    uint32_t after = entries[i].next;
    while (after != end && (batch.IsVoid(entries[after]) || entries[after].length == 0 ||
                            entries[after].first_piece <= done)) {
      after = entries[after].next;
    }
    const bool shared = entries[i].next != after && i >= unmerged_until;
    if (shared) {
      unmerged_until = after;
      cursor = i;
    } else {
      Fail(batch, entries[i]);
      cursor = entries[i].next;
    }
  }
}

// Fills `call` from `cursor` on; returns the first entry that is not in it.
uint32_t DmaQueue::State::BuildCall(Batch& batch, const Chain& chain, uint32_t cursor,
                                    uint32_t unmerged_until) {
  call.Clear();
  open_piece = false;
  while (cursor != kNone) {
    Placement& entry = batch.entries[cursor];
    if (!batch.IsVoid(entry)) {
      if (entry.kind == Placement::Kind::kAtomic || !call.HasRoom(kMaxPiecesPerEntry)) break;
      if (call.remote_count > 0 && !call.ScratchHasRoom(entry.length) &&
          CallLists::WantsScratch(entry.address, entry.from, entry.length)) {
        break;
      }
      if (entry.length > 0) {
        CheckRight(entry.claim, chain.space, entry.address, entry.length);
        AddPlacement(entry, cursor > unmerged_until);
      }
    }
    cursor = entry.next;
  }
  return cursor;
}

void DmaQueue::State::AddPlacement(Placement& entry, bool may_merge) {
  const uint64_t start = entry.address;
  const uint64_t end = start + entry.length;
  const bool last = entry.kind == Placement::Kind::kLast;
  // [start, body_end), [body_end, tail), [tail, end): for the end of a message
  // the two last parts are the aligned words that hold its last 8 bytes, each
  // with a piece of its own. One word is enough if the message ends with it.
  // Other watched packets that end inside a word have that part in a piece of its
  // own too, and so has a beginning inside a word (below): `rep movsb` of an odd
  // count, or to an odd address, shows torn words when it is interrupted [seen in
  // the litmus test]. For the same reason packets that meet inside a word are not
  // merged.
  const bool watched = entry.kind != Placement::Kind::kUnwatched;
  uint64_t tail = end;
  if (last) {
    tail = std::max(start, AlignDown(end - 1));
  } else if (watched && AlignUp(start) + kWord <= AlignDown(end)) {
    tail = AlignDown(end);
  }
  const uint64_t body_end =
      last && end % kWord != 0 && tail > start ? std::max(start, tail - kWord) : tail;

  const bool extends =
      may_merge && open_piece && open_slot == entry.slot && body_end > start &&
      (start % kWord == 0 || !watched) &&
      AddressOf(call.remote[call.remote_count - 1]) + call.remote[call.remote_count - 1].iov_len ==
          start;
  entry.first_piece = static_cast<uint16_t>(extends ? call.remote_count - 1 : call.remote_count);
  if (extends) {
    call.remote[call.remote_count - 1].iov_len += static_cast<size_t>(body_end - start);
  } else if (body_end > start) {
    uint64_t body = start;
    if (watched && start % kWord != 0 && AlignUp(start) + kWord <= body_end) {
      body = AlignUp(start);
      call.AddRemote(start, body);
    }
    call.AddRemote(body, body_end);
  }
  if (tail > body_end) call.AddRemote(body_end, tail);
  if (end > tail) call.AddRemote(tail, end);
  entry.last_piece = static_cast<uint16_t>(call.remote_count - 1);
  open_piece = !last;
  open_slot = entry.slot;
  call.AddLocal(entry.from, entry.length, start);
}

// Does the atomics that follow each other from `cursor` on: one read, one write.
// Returns where to go on.
uint32_t DmaQueue::State::RunAtomics(Batch& batch, AddressSpace* space, uint32_t cursor) {
  Placement* run[kMaxAtomics];
  uint32_t count = 0;
  uint32_t end = cursor;
  for (; end != kNone && count < kMaxAtomics; end = batch.entries[end].next) {
    Placement& entry = batch.entries[end];
    if (batch.IsVoid(entry)) continue;
    if (entry.kind != Placement::Kind::kAtomic) break;
    CheckRight(entry.claim, space, entry.address, kWord);
    run[count++] = &entry;
  }

  // Each address is read once; later operations on it take the result of the
  // one before.
  uint64_t values[kMaxAtomics];
  uint32_t value_of[kMaxAtomics];  // operation -> index in values
  call.Clear();
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t known = 0;
    while (known < i && run[known]->address != run[i]->address) ++known;
    if (known < i) {
      value_of[i] = value_of[known];
    } else {
      value_of[i] = call.remote_count;
      call.AddRemote(run[i]->address, run[i]->address + kWord);
    }
  }
  call.local[0] = Local(values, call.remote_count * sizeof(values[0]));
  call.local_count = 1;
  const auto readable = static_cast<uint32_t>(Copy(space, /*write=*/false));
  uint32_t good = 0;  // operations whose value we have
  while (good < count && value_of[good] < readable) ++good;

  uint64_t results[kMaxAtomics];
  uint32_t writer[kMaxAtomics];  // remote piece -> first operation that it is for
  call.Clear();
  for (uint32_t i = 0; i < good; ++i) {
    AtomicEntry& atomic = batch.atomics[run[i]->length];
    uint64_t& value = values[value_of[i]];
    atomic.original = value;
    if (atomic.operation.kind == AtomicKind::kFetchAdd) {
      value += atomic.operation.swap_or_add;
    } else if (value == atomic.operation.compare) {
      value = atomic.operation.swap_or_add;
    } else {
      continue;
    }
    const uint32_t pieces = call.remote_count;
    if (pieces > 0 && AddressOf(call.remote[pieces - 1]) == run[i]->address) {
      results[pieces - 1] = value;
    } else {
      results[pieces] = value;
      writer[pieces] = i;
      call.AddRemote(run[i]->address, run[i]->address + kWord);
    }
  }
  for (uint32_t i = 0; i < call.remote_count; ++i) {
    call.AddLocal(reinterpret_cast<const std::byte*>(&results[i]), kWord,
                  AddressOf(call.remote[i]));
  }
  if (call.remote_count > 0) {
    const size_t written = Copy(space, /*write=*/true);
    if (written < call.remote_count) good = writer[written];
  }
  for (uint32_t i = 0; i < good; ++i) run[i]->status = Placement::Status::kDone;
  if (good == count) return end;
  Fail(batch, *run[good]);
  return run[good]->next;
}

void DmaQueue::State::Report(Batch& batch) {
  for (uint32_t i = 0; i < batch.count; ++i) {
    const Placement& entry = batch.entries[i];
    Slot& slot = batch.slots[entry.slot];
    if (slot.owner == nullptr || slot.failed_reported) continue;
    const bool done = entry.status == Placement::Status::kDone;
    if (done && entry.kind != Placement::Kind::kAtomic) {
      slot.placed = entry.ticket;
      continue;
    }
    if (slot.placed != 0) {
      slot.owner->OnPlaced(std::exchange(slot.placed, 0));
      if (slot.owner == nullptr) continue;  // the callback may call Forget
    }
    if (done) {
      slot.owner->OnAtomic(entry.ticket, batch.atomics[entry.length].original);
    } else {
      slot.failed_reported = true;
      slot.owner->OnPlaceFailed(entry.ticket);
    }
  }
  for (uint32_t i = 0; i < batch.slot_count; ++i) {
    Slot& slot = batch.slots[i];
    if (slot.owner != nullptr && slot.placed != 0) slot.owner->OnPlaced(slot.placed);
  }
}

void DmaQueue::State::Flush() {
  if (reporting || current().count == 0) return;
  Batch& batch = current();
  Run(batch);
  filling ^= 1;
  reporting = true;
  Report(batch);
  batch.Clear();
  reporting = false;
}

// ------------------------------------------------------------------- fetches

void DmaQueue::State::RunFetches() {
  for (uint32_t i = 0; i < fetch_chains.count; ++i) RunFetchChain(fetch_chains.chains[i]);
  fetch_chains.Clear();
  for (uint32_t i = 0; i < fetch_count; ++i) {
    const FetchEntry& entry = fetches[i];
    if (!entry.failed) continue;
    ++counters.failures;
    if (failed_tags.empty() || failed_tags.back() != entry.tag) failed_tags.push_back(entry.tag);
  }
  fetch_count = 0;
}

void DmaQueue::State::RunFetchChain(const Chain& chain) {
  FetchEntry* entries = fetches.get();
  uint32_t cursor = chain.head;
  uint32_t single_until = cursor;  // entries up to this one start a piece of their own
  while (cursor != kNone) {
    if (chain.space->gone()) {
      entries[cursor].failed = true;
      cursor = entries[cursor].next;
      continue;
    }
    const uint32_t end = BuildFetchCall(chain, cursor, single_until);
    const size_t done = Copy(chain.space, /*write=*/false);
    while (cursor != end && entries[cursor].piece < done) {
      Deliver(entries[cursor]);
      cursor = entries[cursor].next;
    }
    if (cursor == end) continue;
    // The pieces from here on: the bad one, and what was not tried.
    const uint32_t first = cursor;
    const uint16_t bad = entries[first].piece;
    uint32_t after = first;
    while (after != end && entries[after].piece == bad) after = entries[after].next;
    const bool one_page = span_scratch[bad] != nullptr;
    if (one_page || entries[first].next == after) {
      for (uint32_t i = first; i != after; i = entries[i].next) entries[i].failed = true;
      cursor = after;
    } else {
      single_until = after;
    }
  }
}

uint32_t DmaQueue::State::BuildFetchCall(const Chain& chain, uint32_t cursor,
                                         uint32_t single_until) {
  call.Clear();
  while (cursor != kNone && call.HasRoom(1)) {
    FetchEntry& entry = fetches[cursor];
    const bool may_merge = cursor > single_until && call.remote_count > 0;
    entry.bounced = nullptr;
    CheckRight(entry.claim, chain.space, entry.address, entry.length);
    if (!AddToSpan(entry, may_merge)) {
      iovec* last = call.remote_count > 0 ? &call.remote[call.remote_count - 1] : nullptr;
      if (may_merge && span_scratch[call.remote_count - 1] == nullptr &&
          AddressOf(*last) + last->iov_len == entry.address) {
        last->iov_len += entry.length;
      } else {
        span_scratch[call.remote_count] = nullptr;
        call.AddRemote(entry.address, entry.address + entry.length);
      }
      std::byte* to = entry.to;
      if (Aliases(AddressOf(to), entry.address) && call.ScratchHasRoom(entry.length)) {
        entry.bounced = to = call.TakeScratch(entry.length, entry.address, /*write=*/false);
      }
      call.local[call.local_count++] = Local(to, entry.length);
    }
    entry.piece = static_cast<uint16_t>(call.remote_count - 1);
    cursor = entry.next;
  }
  return cursor;
}

// A small piece inside a page is read into scratch, together with its
// neighbours. False if it is not such a piece.
bool DmaQueue::State::AddToSpan(FetchEntry& entry, bool may_merge) {
  const uint64_t start = entry.address;
  const uint64_t end = start + entry.length;
  if (entry.length > kSmallFetch || start / kPage != (end - 1) / kPage) return false;
  if (may_merge && span_scratch[call.remote_count - 1] != nullptr) {
    iovec& span = call.remote[call.remote_count - 1];
    const uint64_t low = std::min(start, AddressOf(span));
    const uint64_t high = std::max(end, AddressOf(span) + span.iov_len);
    const auto growth = static_cast<uint32_t>(high - low - span.iov_len);
    if (low / kPage == (high - 1) / kPage && growth <= entry.length + kMaxGap &&
        call.ScratchHasRoom(growth)) {
      span = {Remote(low), static_cast<size_t>(high - low)};
      call.scratch_used += growth;
      PlaceSpan(span);
      return true;
    }
  }
  if (!call.ScratchHasRoom(entry.length)) return false;
  span_base = call.scratch.get() + call.scratch_used;
  call.scratch_used += entry.length + static_cast<uint32_t>(kAliasWindow);
  call.AddRemote(start, end);
  ++call.local_count;
  PlaceSpan(call.remote[call.remote_count - 1]);
  return true;
}

// Says where in scratch the last piece, a span, is read to. Its start may move as
// it grows, so there is room for two places.
void DmaQueue::State::PlaceSpan(const iovec& span) {
  std::byte* to = span_base;
  if (Aliases(AddressOf(to), AddressOf(span))) to += kAliasWindow;
  call.local[call.local_count - 1] = Local(to, span.iov_len);
  span_scratch[call.remote_count - 1] = to;
}

void DmaQueue::State::Deliver(FetchEntry& entry) {
  if (entry.bounced != nullptr) {
    std::memcpy(entry.to, entry.bounced, entry.length);
    return;
  }
  if (const std::byte* span = span_scratch[entry.piece]) {
    std::memcpy(entry.to, span + (entry.address - AddressOf(call.remote[entry.piece])),
                entry.length);
  }
}

// ------------------------------------------------------------ public interface

DmaQueue::DmaQueue(uint32_t capacity) : state_(std::make_unique<State>(capacity)) {}
DmaQueue::~DmaQueue() = default;

void DmaQueue::Place(const Extent& to, std::span<const std::byte> from, bool last, DmaOwner* owner,
                     Ticket ticket, bool watched) {
  Placement& entry = state_->Append(to.space, owner);
  entry.address = to.address;
  entry.from = from.data();
  entry.length = static_cast<uint32_t>(from.size());
  entry.ticket = ticket;
  entry.claim = to.claim;
  entry.kind = !watched ? Placement::Kind::kUnwatched
               : last   ? Placement::Kind::kLast
                        : Placement::Kind::kWatched;
  ++state_->counters.placements;
  state_->counters.bytes_placed += from.size();
}

void DmaQueue::Atomic(const Extent& at, const AtomicOperation& operation, DmaOwner* owner,
                      Ticket ticket) {
  Placement& entry = state_->Append(at.space, owner);
  Batch& batch = state_->current();
  entry.address = at.address;
  entry.from = nullptr;
  entry.length = batch.atomic_count++;
  entry.ticket = ticket;
  entry.claim = at.claim;
  entry.kind = Placement::Kind::kAtomic;
  batch.atomics[entry.length] = {operation, 0};
  ++state_->counters.atomics;
}

bool DmaQueue::has_placements() const { return state_->current().count > 0; }
uint32_t DmaQueue::room() const { return state_->capacity - state_->current().count; }
void DmaQueue::FlushPlacements() { state_->Flush(); }

void DmaQueue::Fetch(const Extent& from, std::byte* to, uint32_t length, uint32_t tag) {
  if (length == 0) return;
  State& s = *state_;
  uint32_t chain = s.fetch_chains.Find(from.space);
  if (s.fetch_count == s.capacity || chain == kNone) {
    s.RunFetches();
    chain = s.fetch_chains.Find(from.space);
  }
  const uint32_t index = s.fetch_count++;
  s.fetches[index] = {.address = from.address,
                      .to = to,
                      .length = length,
                      .tag = tag,
                      .next = kNone,
                      .piece = 0,
                      .failed = false,
                      .bounced = nullptr,
                      .claim = from.claim};
  s.fetch_chains.Append(chain, s.fetches.get(), index);
  ++s.counters.fetches;
  s.counters.bytes_fetched += length;
}

std::span<const uint32_t> DmaQueue::RunFetches() {
  State& s = *state_;
  s.RunFetches();
  s.reported_tags.clear();
  s.reported_tags.swap(s.failed_tags);
  return s.reported_tags;
}

void DmaQueue::RequireClaims() { state_->claims_required = true; }

void DmaQueue::Forget(DmaOwner* owner) {
  for (Batch& batch : state_->batches) batch.Forget(owner);
}

const DmaQueue::Counters& DmaQueue::counters() const { return state_->counters; }

// ------------------------------------------------------------------- QpMemory

MemoryStatus QpMemory::Check(uint32_t key, uint64_t address, uint64_t length, MemoryAccess access) {
  Extent extent;
  return table_.Translate(key, PdOf(access), address, length, access, &extent, qpn());
}

MemoryStatus QpMemory::CheckKey(uint32_t key, MemoryAccess access) {
  const Region* region = table_.Find(key);
  return region != nullptr ? Check(key, region->iova, 0, access) : MemoryStatus::kBadKey;
}

MemoryStatus QpMemory::Place(const transport::MemorySegment& to, std::span<const std::byte> bytes,
                             MemoryAccess access, bool last, Ticket* ticket) {
  Extent extent;
  const MemoryStatus status =
      table_.Translate(to.key, PdOf(access), to.address, bytes.size(), access, &extent, qpn());
  if (status != MemoryStatus::kOk) return status;
  // Only RDMA WRITE is watched in memory; SEND and READ have a completion.
  const bool watched = access == MemoryAccess::kRemoteWrite;
  *ticket = next_ticket_++;
  if (extent.null) bytes = {};
  dma_.Place(extent, bytes, last, owner_, *ticket, watched);
  return MemoryStatus::kOk;
}

MemoryStatus QpMemory::Atomic(uint32_t rkey, uint64_t address, const AtomicOperation& operation,
                              Ticket* ticket) {
  Extent extent;
  const MemoryStatus status =
      table_.Translate(rkey, pd_, address, kWord, MemoryAccess::kRemoteAtomic, &extent, qpn());
  if (status != MemoryStatus::kOk) return status;
  *ticket = next_ticket_++;
  dma_.Atomic(extent, operation, owner_, *ticket);
  return MemoryStatus::kOk;
}

MemoryStatus QpMemory::Invalidate(uint32_t rkey) { return table_.Invalidate(rkey, pd_, qpn()); }

MemoryStatus QpMemory::Bind(const transport::WindowBind& bind) {
  return table_.Bind(bind, pd_, qpn());
}

}  // namespace verbena::nic
