// SPDX-License-Identifier: Apache-2.0
//
// mpi_check [SECTION...]: an MPI program that checks each byte it gets. Sections:
// p2p, wildcards, collectives, datatypes, onesided. Rank 0 prints "SECTION: ok";
// a wrong result ends the job with a line that says what was wrong. Runs with 2
// ranks or more, with any MPI.
#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

namespace {

int rank, size;

void Check(bool good, const char* what, int line) {
  if (good) return;
  fprintf(stderr, "rank %d of %d, line %d: %s is wrong\n", rank, size, line, what);
  MPI_Abort(MPI_COMM_WORLD, 1);
}
#define CHECK(condition) Check(condition, #condition, __LINE__)

// What message number `number` of `from` to `to` holds at `i`.
uint8_t Pattern(int from, int to, int number, size_t i) {
  return static_cast<uint8_t>(static_cast<size_t>(from * 131 + to * 17 + number * 7) + i * 3 +
                              (i >> 8));
}

std::vector<uint8_t> Message(int from, int to, int number, size_t bytes) {
  std::vector<uint8_t> message(bytes);
  for (size_t i = 0; i < bytes; ++i) message[i] = Pattern(from, to, number, i);
  return message;
}

int Count(size_t n) { return static_cast<int>(n); }

constexpr size_t kSizes[] = {0,    1,     7,     8,      100,     1000,   4096,
                             8191, 65536, 70001, 300000, 1048579, 4194304};

// --- Point to point

// Around the ring, blocking, in every mode.
void Ring() {
  const int to = (rank + 1) % size, from = (rank + size - 1) % size;
  int number = 0;
  for (const size_t bytes : kSizes) {
    const auto out = Message(rank, to, number, bytes);
    std::vector<uint8_t> in(bytes + 1, 0xee);
    MPI_Status status;
    if (rank % 2 == 0) {
      if (number % 2 == 0) {
        MPI_Send(out.data(), Count(bytes), MPI_BYTE, to, number, MPI_COMM_WORLD);
      } else {
        MPI_Ssend(out.data(), Count(bytes), MPI_BYTE, to, number, MPI_COMM_WORLD);
      }
      MPI_Recv(in.data(), Count(bytes + 1), MPI_BYTE, from, number, MPI_COMM_WORLD, &status);
    } else {
      MPI_Recv(in.data(), Count(bytes + 1), MPI_BYTE, from, number, MPI_COMM_WORLD, &status);
      MPI_Send(out.data(), Count(bytes), MPI_BYTE, to, number, MPI_COMM_WORLD);
    }
    int count = -1;
    MPI_Get_count(&status, MPI_BYTE, &count);
    CHECK(count == Count(bytes) && status.MPI_SOURCE == from && status.MPI_TAG == number);
    CHECK(std::equal(in.begin(), in.end() - 1, Message(from, rank, number, bytes).begin()));
    CHECK(in.back() == 0xee);
    ++number;
  }
}

// Everybody with everybody, many requests at once, received in another order than sent.
void Windows() {
  constexpr int kWindow = 48;
  std::vector<std::vector<uint8_t>> in, out;
  std::vector<MPI_Request> requests;
  for (int peer = 0; peer < size; ++peer) {
    for (int i = kWindow - 1; i >= 0; --i) {
      const size_t bytes = kSizes[static_cast<size_t>(i) % 10];
      in.emplace_back(bytes);
      MPI_Irecv(in.back().data(), Count(bytes), MPI_BYTE, peer, i, MPI_COMM_WORLD,
                &requests.emplace_back());
    }
  }
  for (int peer = 0; peer < size; ++peer) {
    for (int i = 0; i < kWindow; ++i) {
      const size_t bytes = kSizes[static_cast<size_t>(i) % 10];
      out.push_back(Message(rank, peer, i, bytes));
      MPI_Isend(out.back().data(), Count(bytes), MPI_BYTE, peer, i, MPI_COMM_WORLD,
                &requests.emplace_back());
    }
  }
  MPI_Waitall(Count(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
  size_t next = 0;
  for (int peer = 0; peer < size; ++peer) {
    for (int i = kWindow - 1; i >= 0; --i, ++next) {
      CHECK(in[next] == Message(peer, rank, i, in[next].size()));
    }
  }
}

void PersistentAndSendrecv() {
  const int to = (rank + 1) % size, from = (rank + size - 1) % size;
  std::vector<uint8_t> out(5000), in(5000);
  MPI_Request requests[2];
  MPI_Send_init(out.data(), 5000, MPI_BYTE, to, 3, MPI_COMM_WORLD, &requests[0]);
  MPI_Recv_init(in.data(), 5000, MPI_BYTE, from, 3, MPI_COMM_WORLD, &requests[1]);
  for (int i = 0; i < 20; ++i) {
    const auto message = Message(rank, to, i, 5000);
    std::copy(message.begin(), message.end(), out.begin());  // it keeps its place
    MPI_Startall(2, requests);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
    CHECK(in == Message(from, rank, i, 5000));
  }
  MPI_Request_free(&requests[0]);
  MPI_Request_free(&requests[1]);
  in = Message(rank, to, 99, 5000);
  MPI_Sendrecv_replace(in.data(), 5000, MPI_BYTE, to, 4, from, 4, MPI_COMM_WORLD,
                       MPI_STATUS_IGNORE);
  CHECK(in == Message(from, rank, 99, 5000));
}

void PointToPoint() {
  Ring();
  Windows();
  PersistentAndSendrecv();
  // A receive that nothing answers can be taken back.
  int unused = 0, cancelled = 0;
  MPI_Request request;
  MPI_Status status;
  MPI_Irecv(&unused, 1, MPI_INT, (rank + 1) % size, 12345, MPI_COMM_WORLD, &request);
  MPI_Cancel(&request);
  MPI_Wait(&request, &status);
  MPI_Test_cancelled(&status, &cancelled);
  CHECK(cancelled != 0);
}

// --- Wildcards

// Rank 0 takes whatever comes; messages of one sender come in order.
void Wildcards() {
  constexpr int kMessages = 200;
  if (rank != 0) {
    for (int i = 0; i < kMessages; ++i) {
      const auto out = Message(rank, 0, i, static_cast<size_t>(i * 37 % 9000));
      MPI_Send(out.data(), Count(out.size()), MPI_BYTE, 0, i % 5, MPI_COMM_WORLD);
    }
  } else {
    std::vector<int> next(static_cast<size_t>(size), 0);
    for (int n = 0; n < kMessages * (size - 1); ++n) {
      MPI_Status status;
      int bytes = 0;
      std::vector<uint8_t> in(9000);
      if (n % 3 == 0) {
        MPI_Probe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
        MPI_Get_count(&status, MPI_BYTE, &bytes);
        MPI_Recv(in.data(), bytes, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, MPI_COMM_WORLD,
                 &status);
      } else if (n % 3 == 1) {
        MPI_Message message;
        MPI_Mprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &message, &status);
        MPI_Mrecv(in.data(), 9000, MPI_BYTE, &message, &status);
      } else {
        MPI_Recv(in.data(), 9000, MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
      }
      MPI_Get_count(&status, MPI_BYTE, &bytes);
      const int i = next[static_cast<size_t>(status.MPI_SOURCE)]++;
      CHECK(status.MPI_TAG == i % 5 && bytes == i * 37 % 9000);
      in.resize(static_cast<size_t>(bytes));
      CHECK(in == Message(status.MPI_SOURCE, 0, i, in.size()));
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

// --- Collectives

void CollectivesOn(MPI_Comm comm, size_t n) {
  int me, all;
  MPI_Comm_rank(comm, &me);
  MPI_Comm_size(comm, &all);
  const auto members = static_cast<size_t>(all);
  const int count = Count(n);
  std::vector<int64_t> mine(n), got(n), wide(n * members), wide_got(n * members);
  const auto value = [](int who, size_t i) { return who * int64_t{1000003} + int64_t(i) * 31; };
  for (size_t i = 0; i < n; ++i) mine[i] = value(me, i);
  const int64_t ranks = int64_t{all} * (all - 1) / 2;

  for (int root = 0; root < all; ++root) {
    got = mine;
    MPI_Bcast(got.data(), count, MPI_INT64_T, root, comm);
    for (size_t i = 0; i < n; ++i) CHECK(got[i] == value(root, i));
    MPI_Reduce(mine.data(), got.data(), count, MPI_INT64_T, MPI_SUM, root, comm);
    for (size_t i = 0; me == root && i < n; ++i) {
      CHECK(got[i] == ranks * 1000003 + int64_t{all} * int64_t(i) * 31);
    }
    MPI_Gather(mine.data(), count, MPI_INT64_T, wide_got.data(), count, MPI_INT64_T, root, comm);
    for (size_t i = 0; me == root && i < n * members; ++i) {
      CHECK(wide_got[i] == value(int(i / n), i % n));
    }
    for (size_t i = 0; i < n * members; ++i) wide[i] = value(int(i / n) + root, i % n);
    MPI_Scatter(wide.data(), count, MPI_INT64_T, got.data(), count, MPI_INT64_T, root, comm);
    for (size_t i = 0; i < n; ++i) CHECK(got[i] == value(me + root, i));
  }
  MPI_Allreduce(mine.data(), got.data(), count, MPI_INT64_T, MPI_MAX, comm);
  for (size_t i = 0; i < n; ++i) CHECK(got[i] == value(all - 1, i));
  MPI_Allgather(mine.data(), count, MPI_INT64_T, wide_got.data(), count, MPI_INT64_T, comm);
  for (size_t i = 0; i < n * members; ++i) CHECK(wide_got[i] == value(int(i / n), i % n));
  for (size_t i = 0; i < n * members; ++i) wide[i] = value(me, i % n) + int64_t(i / n) * 7;
  MPI_Alltoall(wide.data(), count, MPI_INT64_T, wide_got.data(), count, MPI_INT64_T, comm);
  for (size_t i = 0; i < n * members; ++i) {
    CHECK(wide_got[i] == value(int(i / n), i % n) + me * int64_t{7});
  }
  MPI_Scan(mine.data(), got.data(), count, MPI_INT64_T, MPI_SUM, comm);
  for (size_t i = 0; i < n; ++i) {
    CHECK(got[i] == int64_t{me} * (me + 1) / 2 * 1000003 + (me + 1) * int64_t(i) * 31);
  }
  MPI_Reduce_scatter_block(wide.data(), got.data(), count, MPI_INT64_T, MPI_SUM, comm);
  for (size_t i = 0; i < n; ++i) {
    CHECK(got[i] == ranks * 1000003 + all * (int64_t(i) * 31 + me * int64_t{7}));
  }
  // Two that do not block, at once.
  std::vector<int64_t> sum(n);
  got = mine;
  MPI_Request requests[2];
  MPI_Ibcast(got.data(), count, MPI_INT64_T, all - 1, comm, &requests[0]);
  MPI_Iallreduce(mine.data(), sum.data(), count, MPI_INT64_T, MPI_SUM, comm, &requests[1]);
  MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
  for (size_t i = 0; i < n; ++i) {
    CHECK(got[i] == value(all - 1, i));
    CHECK(sum[i] == ranks * 1000003 + int64_t{all} * int64_t(i) * 31);
  }
}

// Each pair exchanges another number of bytes.
void UnevenAlltoall() {
  const auto bytes = [](int from, int to) { return 1 + (from * 5 + to * 3) * 977 % 20000; };
  std::vector<int> out_counts, out_at, in_counts, in_at;
  int out_bytes = 0, in_bytes = 0;
  for (int peer = 0; peer < size; ++peer) {
    out_at.push_back(out_bytes);
    in_at.push_back(in_bytes);
    out_counts.push_back(bytes(rank, peer));
    in_counts.push_back(bytes(peer, rank));
    out_bytes += out_counts.back();
    in_bytes += in_counts.back();
  }
  std::vector<uint8_t> out, in(static_cast<size_t>(in_bytes));
  for (int peer = 0; peer < size; ++peer) {
    const auto part = Message(rank, peer, 5, static_cast<size_t>(bytes(rank, peer)));
    out.insert(out.end(), part.begin(), part.end());
  }
  MPI_Alltoallv(out.data(), out_counts.data(), out_at.data(), MPI_BYTE, in.data(), in_counts.data(),
                in_at.data(), MPI_BYTE, MPI_COMM_WORLD);
  size_t at = 0;
  for (int peer = 0; peer < size; ++peer) {
    for (size_t i = 0; i < static_cast<size_t>(bytes(peer, rank)); ++i, ++at) {
      CHECK(in[at] == Pattern(peer, rank, 5, i));
    }
  }
}

void Collectives() {
  for (const size_t n : {1u, 13u, 1500u, 40000u}) CollectivesOn(MPI_COMM_WORLD, n);
  MPI_Comm half;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  CollectivesOn(half, 500);
  MPI_Comm_free(&half);
  UnevenAlltoall();
  for (int i = 0; i < 20; ++i) MPI_Barrier(MPI_COMM_WORLD);
}

// --- Derived data types

struct Particle {
  double position[3];
  char kind;
  int64_t id;
};

void Datatypes() {
  const int to = (rank + 1) % size, from = (rank + size - 1) % size;
  // A column of a matrix is sent, and comes as a row.
  constexpr int kRows = 300, kColumns = 50;
  std::vector<int> matrix(kRows * kColumns), row(kRows);
  std::iota(matrix.begin(), matrix.end(), rank * 100000);
  MPI_Datatype column;
  MPI_Type_vector(kRows, 1, kColumns, MPI_INT, &column);
  MPI_Type_commit(&column);
  MPI_Sendrecv(&matrix[7], 1, column, to, 0, row.data(), kRows, MPI_INT, from, 0, MPI_COMM_WORLD,
               MPI_STATUS_IGNORE);
  for (int i = 0; i < kRows; ++i) {
    CHECK(row[static_cast<size_t>(i)] == from * 100000 + i * kColumns + 7);
  }
  MPI_Type_free(&column);

  // A structure with holes, which stay as they were.
  Particle layout{};
  const int lengths[] = {3, 1, 1};
  MPI_Aint base, at[3];
  MPI_Get_address(&layout, &base);
  MPI_Get_address(&layout.position, &at[0]);
  MPI_Get_address(&layout.kind, &at[1]);
  MPI_Get_address(&layout.id, &at[2]);
  for (MPI_Aint& each : at) each -= base;
  const MPI_Datatype types[] = {MPI_DOUBLE, MPI_CHAR, MPI_INT64_T};
  MPI_Datatype fields, particle;
  MPI_Type_create_struct(3, lengths, at, types, &fields);
  MPI_Type_create_resized(fields, 0, sizeof(Particle), &particle);
  MPI_Type_commit(&particle);
  constexpr int kParticles = 3000;
  std::vector<Particle> out(kParticles), in(kParticles);
  std::memset(static_cast<void*>(in.data()), 0x5a, in.size() * sizeof(Particle));
  for (int i = 0; i < kParticles; ++i) {
    out[static_cast<size_t>(i)] = {
        {rank + i * 0.5, i * 0.25, -i * 1.0}, static_cast<char>('a' + i % 26), rank * 10000L + i};
  }
  MPI_Sendrecv(out.data(), kParticles, particle, to, 1, in.data(), kParticles, particle, from, 1,
               MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  for (int i = 0; i < kParticles; ++i) {
    const Particle& got = in[static_cast<size_t>(i)];
    CHECK(got.position[0] == from + i * 0.5 && got.position[2] == -i * 1.0);
    CHECK(got.kind == 'a' + i % 26 && got.id == from * 10000L + i);
    CHECK(reinterpret_cast<const char*>(&got)[offsetof(Particle, kind) + 1] == 0x5a);
  }
  MPI_Type_free(&particle);
  MPI_Type_free(&fields);

  // A block out of the middle of a cube.
  const int whole[] = {20, 30, 40}, part[] = {10, 11, 12}, start[] = {3, 5, 7};
  std::vector<int> cube(20 * 30 * 40), block(10 * 11 * 12);
  std::iota(cube.begin(), cube.end(), rank * 1000000);
  MPI_Datatype inner;
  MPI_Type_create_subarray(3, whole, part, start, MPI_ORDER_C, MPI_INT, &inner);
  MPI_Type_commit(&inner);
  MPI_Sendrecv(cube.data(), 1, inner, to, 2, block.data(), Count(block.size()), MPI_INT, from, 2,
               MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  for (int x = 0; x < 10; ++x) {
    for (int y = 0; y < 11; ++y) {
      for (int z = 0; z < 12; ++z) {
        CHECK(block[static_cast<size_t>((x * 11 + y) * 12 + z)] ==
              from * 1000000 + ((x + 3) * 30 + y + 5) * 40 + z + 7);
      }
    }
  }
  MPI_Type_free(&inner);
}

// --- One-sided

constexpr int kWords = 20000;  // a rank's part of the window, in int64_t

void PutAndGet(MPI_Win window, int64_t* memory) {
  const int to = (rank + 1) % size, from = (rank + size - 1) % size;
  std::vector<int64_t> out(kWords), in(kWords);
  for (int i = 0; i < kWords; ++i) out[static_cast<size_t>(i)] = rank * 1000000L + i;
  for (int i = 0; i < kWords; ++i) memory[i] = -1;
  MPI_Win_fence(0, window);
  MPI_Put(out.data(), kWords, MPI_INT64_T, to, 0, kWords, MPI_INT64_T, window);
  MPI_Win_fence(0, window);
  for (int i = 0; i < kWords; ++i) CHECK(memory[i] == from * 1000000L + i);
  MPI_Get(in.data(), kWords, MPI_INT64_T, to, 0, kWords, MPI_INT64_T, window);
  MPI_Win_fence(0, window);
  CHECK(in == out);
  // With the target asleep.
  MPI_Win_lock(MPI_LOCK_EXCLUSIVE, to, 0, window);
  const int64_t word = 77 + rank;
  MPI_Put(&word, 1, MPI_INT64_T, to, 5, 1, MPI_INT64_T, window);
  MPI_Win_unlock(to, window);
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, window);
  CHECK(memory[5] == 77 + from);
  MPI_Win_unlock(rank, window);
  MPI_Barrier(MPI_COMM_WORLD);
}

void Atomics(MPI_Win window, int64_t* memory) {
  constexpr int kRounds = 100;
  MPI_Win_fence(0, window);
  for (int i = 0; i < 10; ++i) memory[i] = 0;
  MPI_Win_fence(0, window);
  MPI_Win_lock_all(0, window);
  const int64_t one = 1, numbers[] = {rank + 1, 2};
  std::vector<int64_t> tickets;
  for (int i = 0; i < kRounds; ++i) {
    int64_t before = -1;
    MPI_Fetch_and_op(&one, &before, MPI_INT64_T, 0, 0, MPI_SUM, window);
    MPI_Win_flush(0, window);
    CHECK(tickets.empty() || before > tickets.back());
    tickets.push_back(before);
    // A counter by compare and swap.
    for (int64_t expected = 0, found = -1; found != expected;) {
      if (found != -1) expected = found;
      const int64_t wanted = expected + 1;
      MPI_Compare_and_swap(&wanted, &expected, &found, MPI_INT64_T, 0, 1, window);
      MPI_Win_flush(0, window);
    }
    MPI_Accumulate(numbers, 2, MPI_INT64_T, (rank + i) % size, 2, 2, MPI_INT64_T, MPI_SUM, window);
  }
  MPI_Win_unlock_all(window);
  MPI_Barrier(MPI_COMM_WORLD);
  // Every ticket was drawn once.
  int64_t drawn = std::accumulate(tickets.begin(), tickets.end(), int64_t{0}), sum = 0;
  MPI_Allreduce(&drawn, &sum, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
  const int64_t n = int64_t{kRounds} * size;
  CHECK(sum == n * (n - 1) / 2);
  MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, window);
  int64_t end[2] = {};
  MPI_Get(end, 2, MPI_INT64_T, 0, 0, 2, MPI_INT64_T, window);
  MPI_Win_unlock(0, window);
  CHECK(end[0] == n && end[1] == n);
  MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, window);
  int64_t accumulated[2] = {memory[2], memory[3]}, total[2] = {};
  MPI_Win_unlock(rank, window);
  MPI_Allreduce(accumulated, total, 2, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
  CHECK(total[0] == kRounds * int64_t{size} * (size + 1) / 2 && total[1] == 2 * n);
}

// Post, start, complete, wait; a vector type on the target.
void Generalised(MPI_Win window, int64_t* memory) {
  const int to = (rank + 1) % size, from = (rank + size - 1) % size;
  MPI_Group world, targets, origins;
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  MPI_Group_incl(world, 1, &to, &targets);
  MPI_Group_incl(world, 1, &from, &origins);
  for (int i = 0; i < 100; ++i) memory[i] = -1;
  MPI_Datatype every_second;
  MPI_Type_vector(50, 1, 2, MPI_INT64_T, &every_second);
  MPI_Type_commit(&every_second);
  std::vector<int64_t> out(50);
  std::iota(out.begin(), out.end(), rank * 1000);
  MPI_Win_post(origins, 0, window);
  MPI_Win_start(targets, 0, window);
  MPI_Put(out.data(), 50, MPI_INT64_T, to, 0, 1, every_second, window);
  MPI_Win_complete(window);
  MPI_Win_wait(window);
  for (int i = 0; i < 100; ++i) CHECK(memory[i] == (i % 2 == 0 ? from * 1000 + i / 2 : -1));
  MPI_Type_free(&every_second);
  MPI_Group_free(&world);
  MPI_Group_free(&targets);
  MPI_Group_free(&origins);
}

void OneSided() {
  int64_t* memory = nullptr;
  MPI_Win window;
  MPI_Win_allocate(kWords * sizeof(int64_t), sizeof(int64_t), MPI_INFO_NULL, MPI_COMM_WORLD,
                   &memory, &window);
  PutAndGet(window, memory);
  Atomics(window, memory);
  Generalised(window, memory);
  MPI_Win_free(&window);
  std::vector<int64_t> own(kWords);
  MPI_Win_create(own.data(), kWords * sizeof(int64_t), sizeof(int64_t), MPI_INFO_NULL,
                 MPI_COMM_WORLD, &window);
  PutAndGet(window, own.data());
  MPI_Win_free(&window);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const struct {
    const char* name;
    void (*run)();
  } kSections[] = {{"p2p", PointToPoint},
                   {"wildcards", Wildcards},
                   {"collectives", Collectives},
                   {"datatypes", Datatypes},
                   {"onesided", OneSided}};
  for (const auto& section : kSections) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted |= std::string(argv[i]) == section.name;
    if (!wanted) continue;
    section.run();
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
      printf("%s: ok\n", section.name);
      fflush(stdout);
    }
  }
  MPI_Finalize();
  return 0;
}
