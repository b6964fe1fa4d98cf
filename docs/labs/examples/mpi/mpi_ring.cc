// SPDX-License-Identifier: Apache-2.0
//
// mpi_ring: a token goes round all ranks, and each adds one. A non-blocking large exchange comes
// after it, so that eager and rendezvous messages can be told apart.
//
//   mpicxx mpi_ring.cc -o mpi_ring
#include <mpi.h>

#include <cstdio>
#include <vector>

int main(int argc, char** argv) {
  constexpr int kRounds = 20;
  constexpr int kLarge = 1 << 20;
  // MPI's default: any error ends the program with a message.
  MPI_Init(&argc, &argv);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;

  int token = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (rank == 0) {
      ++token;
      MPI_Send(&token, 1, MPI_INT, next, 0, MPI_COMM_WORLD);
      MPI_Recv(&token, 1, MPI_INT, previous, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
      MPI_Recv(&token, 1, MPI_INT, previous, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      ++token;
      MPI_Send(&token, 1, MPI_INT, next, 0, MPI_COMM_WORLD);
    }
  }

  std::vector<char> out(kLarge, static_cast<char>(rank)), in(kLarge);
  MPI_Sendrecv(out.data(), kLarge, MPI_CHAR, next, 1, in.data(), kLarge, MPI_CHAR, previous, 1,
               MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  int wrong = 0;
  for (const char byte : in) wrong += byte != static_cast<char>(previous);
  int all_wrong = 0;
  MPI_Allreduce(&wrong, &all_wrong, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (rank == 0) {
    std::printf(
        "%d rounds over %d ranks: the token is %d, %d bytes of the large messages are wrong\n",
        kRounds, size, token, all_wrong);
  }
  MPI_Finalize();
  return all_wrong == 0 ? 0 : 1;
}
