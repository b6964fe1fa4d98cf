// SPDX-License-Identifier: Apache-2.0
//
// /dev/infiniband/rdma_cm between preload and device: what write(2) on the
// kernel's ucma file is.
//
// An opened file is one SOCK_SEQPACKET connection to the daemon's socket, and
// the application holds that very socket as its descriptor: poll, epoll, dup,
// fork, exec and passing it on are the kernel's own, and the file lives as long
// as any copy of the descriptor. What arrives on it, after the answer to the
// hello, are tokens of one byte: as many as there are events to fetch. So it is
// readable exactly while events wait.
//
// A command is one message, the bytes that were written: ucma's 8-byte header
// {u32 command, u16 in, u16 out} and `in` bytes of payload (struct rdma_ucm_* of
// <rdma/rdma_user_cm.h>; pointers in it mean nothing to the device), for
// SET_OPTION followed by the value. Its first descriptor is a socket of its own
// to answer on; the second, of MIGRATE_ID, is the file that the id leaves.
// GET_EVENT never waits: EAGAIN if there is no event. Who wants one takes a
// token first, and gives it up by asking. RdmaCmWithdrawn gives up tokens
// otherwise; nothing comes in answer.
#pragma once

#include <cstdint>

#include "nic_sim/abi/commands.h"

namespace verbena::abi {

// First message of the application. Descriptor: the socket itself, by which the
// device recognises the file later (MIGRATE_ID).
struct RdmaCmHello {
  uint32_t magic;  // kMagic
  uint32_t kind;   // kClientRdmaCm
  uint16_t version_min;
  uint16_t version_max;
  uint32_t reserved;
  char comm[16];
};
static_assert(sizeof(RdmaCmHello) == 32);

struct RdmaCmHelloReply {
  uint32_t magic;
  int32_t error;  // 0 or a positive errno
};
static_assert(sizeof(RdmaCmHelloReply) == 8);

// Answer to a command, followed by the first `response_bytes` (at most the
// request's `out`) of what the kernel would have written to its `response`.
struct RdmaCmReply {
  int32_t error;  // 0 or a positive errno
  // Tokens whose events are gone (DESTROY_ID, LEAVE_MCAST: of this file;
  // MIGRATE_ID: of the other one). The application takes as many as it finds,
  // and tells, before it goes on.
  uint32_t surplus;
  uint32_t response_bytes;
  uint32_t reserved;
};
static_assert(sizeof(RdmaCmReply) == 16);

struct RdmaCmWithdrawn {
  uint32_t command;  // kRdmaCmWithdrawn, which is no command of ucma's
  uint32_t tokens;
};
inline constexpr uint32_t kRdmaCmWithdrawn = 0xffff0001;

inline constexpr uint32_t kMaxRdmaCmRequest = 2048;
inline constexpr uint32_t kMaxRdmaCmResponse = 1024;

// The preload binds its end to the abstract address "\0" + this + 16 hex
// digits: the kernel's note, on the socket, that it is one of these.
inline constexpr char kRdmaCmSocketPrefix[] = "verbena-rdma_cm-";

// Device number of /dev/infiniband/rdma_cm: a misc device.
inline constexpr uint32_t kMiscMajor = 10;
inline constexpr uint32_t kRdmaCmMinor = 122;

}  // namespace verbena::abi
