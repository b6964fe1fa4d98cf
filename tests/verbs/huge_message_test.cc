// SPDX-License-Identifier: Apache-2.0
//
// The longest message, 2^31 bytes. Needs 4 GiB of memory and some time: tagged manual.
#include <gtest/gtest.h>

#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

constexpr size_t kBytes = size_t{1} << 31;

TEST(HugeMessage, TwoGibibytesArriveWhole) {
  PathOptions path;
  path.mtu = IBV_MTU_4096;
  path.timeout = 20;
  RcEnd a, b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b, path);
  Memory source(a.pd(), kBytes), target(b.pd(), kBytes);
  FillPattern(source.bytes(), 1);
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_SEND, IBV_WR_RDMA_READ}) {
    const bool read = opcode == IBV_WR_RDMA_READ;
    if (opcode == IBV_WR_SEND) {
      ASSERT_EQ(b.PostRecv(2, {target.sge(0, kBytes / 2), target.sge(kBytes / 2, kBytes / 2)}), 0);
    }
    FillPattern((read ? target : source).bytes(), static_cast<uint64_t>(opcode) + 10);
    // One SGE holds less than 2^32 bytes; two show that the sum counts.
    ASSERT_EQ(a.PostSend(RdmaWr(1, opcode, target.address(), target.rkey()),
                         {source.sge(0, kBytes / 2), source.sge(kBytes / 2, kBytes / 2)}),
              0);
    const ibv_wc wc = PollOne(a.send_cq(), std::chrono::minutes(4));
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS) << Describe(wc);
    EXPECT_EQ(PatternMismatch((read ? source : target).bytes(), static_cast<uint64_t>(opcode) + 10),
              std::nullopt);
    if (opcode == IBV_WR_SEND) {
      EXPECT_EQ(PollOne(b.recv_cq()).byte_len, static_cast<uint32_t>(kBytes));
    }
  }
}

TEST(HugeMessage, OneByteMoreIsALocalLengthError) {
  RcEnd a, b(EndOptions{.device = "verbena1"});
  ConnectPair(a, b);
  Memory source(a.pd(), kBytes + 4096);
  const int error =
      a.PostSend(SendWr(1), {source.sge(0, kBytes / 2 + 1), source.sge(0, kBytes / 2)});
  if (error == 0) {
    EXPECT_EQ(PollOne(a.send_cq()).status, IBV_WC_LOC_LEN_ERR);
  } else {
    EXPECT_EQ(error, EINVAL);
  }
}

}  // namespace
}  // namespace verbena::testing
