// SPDX-License-Identifier: Apache-2.0
//
// Regions of other kinds than plain ones: changed, null, on demand, of the device's memory, of
// another context; parent domains.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

class Regions : public ::testing::Test {
 protected:
  Regions() { ConnectPair(a_, b_); }

  ibv_wc_status Write(uint64_t address, uint32_t rkey, ibv_sge from) {
    EXPECT_EQ(a_.PostSend(RdmaWr(1, IBV_WR_RDMA_WRITE, address, rkey), {from}), 0);
    return PollOne(a_.send_cq()).status;
  }
  ibv_wc_status Read(uint64_t address, uint32_t rkey, ibv_sge to) {
    EXPECT_EQ(a_.PostSend(RdmaWr(1, IBV_WR_RDMA_READ, address, rkey), {to}), 0);
    return PollOne(a_.send_cq()).status;
  }

  RcEnd a_;
  RcEnd b_{EndOptions{.device = "verbena1"}};
  Memory local_{a_.pd(), 8192};
  Memory remote_{b_.pd(), 8192};
};

// --- ibv_rereg_mr(3) ---

TEST_F(Regions, ChangedRightsHoldAtOnce) {
  ASSERT_EQ(Write(remote_.address(), remote_.rkey(), local_.sge(0, 8)), IBV_WC_SUCCESS);
  ASSERT_EQ(ibv_rereg_mr(remote_.mr(), IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0,
                         IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ),
            0);
  EXPECT_EQ(Read(remote_.address(), remote_.rkey(), local_.sge(0, 8)), IBV_WC_SUCCESS);
  EXPECT_EQ(Write(remote_.address(), remote_.rkey(), local_.sge(0, 8)), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Regions, AChangedRangeIsTheNewMemory) {
  std::vector<uint8_t> other(4096);
  FillPattern(local_.bytes(), 4);
  ASSERT_EQ(ibv_rereg_mr(remote_.mr(), IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, other.data(),
                         other.size(), 0),
            0);
  EXPECT_EQ(remote_.mr()->addr, other.data());
  EXPECT_EQ(remote_.mr()->length, other.size());
  EXPECT_EQ(Write(reinterpret_cast<uint64_t>(other.data()), remote_.rkey(), local_.sge(0, 4096)),
            IBV_WC_SUCCESS);
  EXPECT_EQ(PatternMismatch(other, 4), std::nullopt);
  EXPECT_EQ(Write(remote_.address(), remote_.rkey(), local_.sge(0, 8)), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Regions, AChangedPdTakesTheRegionAlong) {
  const Owned<ibv_pd> pd(ibv_alloc_pd(b_.context()));
  ASSERT_EQ(ibv_rereg_mr(remote_.mr(), IBV_REREG_MR_CHANGE_PD, pd.get(), nullptr, 0, 0), 0);
  EXPECT_EQ(remote_.mr()->pd, pd.get());
  EXPECT_EQ(ibv_dealloc_pd(pd.get()), EBUSY);
  EXPECT_EQ(Write(remote_.address(), remote_.rkey(), local_.sge(0, 8)), IBV_WC_REM_ACCESS_ERR);
  ASSERT_EQ(ibv_rereg_mr(remote_.mr(), IBV_REREG_MR_CHANGE_PD, b_.pd(), nullptr, 0, 0), 0);
}

TEST_F(Regions, AChangeThatIsRefusedChangesNothing) {
  errno = 0;
  EXPECT_NE(ibv_rereg_mr(remote_.mr(), IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0,
                         IBV_ACCESS_REMOTE_WRITE),
            0);
  EXPECT_NE(
      ibv_rereg_mr(remote_.mr(), IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, remote_.data(), 0, 0),
      0);
  EXPECT_NE(ibv_rereg_mr(remote_.mr(), 1 << 7, nullptr, nullptr, 0, 0), 0);
  EXPECT_EQ(Write(remote_.address(8184), remote_.rkey(), local_.sge(0, 8)), IBV_WC_SUCCESS);
}

// --- ibv_alloc_null_mr(3) ---

TEST_F(Regions, ANullRegionDiscardsWhatComesAndGivesZeros) {
  const Owned<ibv_mr> null(ibv_alloc_null_mr(a_.pd()));
  ASSERT_NE(null, nullptr);
  const ibv_sge anywhere = {.addr = 0x123456789000, .length = 100, .lkey = null->lkey};
  FillPattern(remote_.bytes(), 6);
  EXPECT_EQ(Read(remote_.address(), remote_.rkey(), anywhere), IBV_WC_SUCCESS);
  EXPECT_EQ(Write(remote_.address(50), remote_.rkey(), anywhere), IBV_WC_SUCCESS);
  EXPECT_EQ(PatternMismatch(remote_.bytes().subspan(0, 50), 6), std::nullopt);
  for (size_t i = 50; i < 150; ++i) ASSERT_EQ(remote_.data()[i], 0) << i;
  // A hole in the middle of a receive.
  ASSERT_EQ(a_.PostRecv(1, {local_.sge(0, 10), {0, 20, null->lkey}, local_.sge(10, 10)}), 0);
  FillPattern(remote_.bytes(), 7);
  ASSERT_EQ(b_.PostSend(SendWr(2), {remote_.sge(0, 40)}), 0);
  EXPECT_EQ(PollOne(a_.recv_cq()).byte_len, 40u);
  EXPECT_EQ(PatternMismatch(local_.bytes().subspan(0, 10), 7), std::nullopt);
  EXPECT_EQ(PatternMismatch(local_.bytes().subspan(10, 10), 7, 30), std::nullopt);
}

TEST_F(Regions, ANullRegionIsNotForPeers) {
  const Owned<ibv_mr> null(ibv_alloc_null_mr(b_.pd()));
  ASSERT_NE(null, nullptr);
  EXPECT_EQ(Write(0, null->lkey, local_.sge(0, 8)), IBV_WC_REM_ACCESS_ERR);
}

// --- On demand paging, ibv_advise_mr(3) ---

TEST_F(Regions, OnDemandPagesMayComeAfterTheRegistration) {
  constexpr size_t kBytes = 1 << 20;
  void* place = mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(place, MAP_FAILED);
  {
    const Owned<ibv_mr> mr(
        ibv_reg_mr(b_.pd(), place, kBytes, static_cast<int>(kAllAccess) | IBV_ACCESS_ON_DEMAND));
    ASSERT_NE(mr, nullptr) << strerror(errno);
    ASSERT_EQ(
        mmap(place, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
        place);
    FillPattern(local_.bytes(), 8);
    EXPECT_EQ(Write(reinterpret_cast<uint64_t>(place) + 5000, mr->rkey, local_.sge(0, 8000)),
              IBV_WC_SUCCESS);
    EXPECT_EQ(PatternMismatch({static_cast<uint8_t*>(place) + 5000, 8000}, 8), std::nullopt);
  }
  munmap(place, kBytes);
}

TEST_F(Regions, AnImplicitRegionIsTheWholeAddressSpace) {
  const Owned<ibv_mr> mr(
      ibv_reg_mr(b_.pd(), nullptr, SIZE_MAX, static_cast<int>(kAllAccess) | IBV_ACCESS_ON_DEMAND));
  ASSERT_NE(mr, nullptr) << strerror(errno);
  std::vector<uint8_t> one(3000), two(3000);
  FillPattern(local_.bytes(), 2);
  for (auto* bytes : {&one, &two}) {
    EXPECT_EQ(Write(reinterpret_cast<uint64_t>(bytes->data()), mr->rkey, local_.sge(0, 3000)),
              IBV_WC_SUCCESS);
    EXPECT_EQ(PatternMismatch(*bytes, 2), std::nullopt);
  }
}

TEST_F(Regions, AdviceIsTakenOrRefusedAsTheManPageSays) {
  std::vector<uint8_t> bytes(65536);
  const Owned<ibv_mr> mr(ibv_reg_mr(b_.pd(), bytes.data(), bytes.size(),
                                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND));
  const Owned<ibv_mr> readable(
      ibv_reg_mr(b_.pd(), bytes.data(), bytes.size(), IBV_ACCESS_ON_DEMAND));
  ASSERT_NE(mr, nullptr);
  ASSERT_NE(readable, nullptr);
  const auto advise = [&](ibv_advise_mr_advice advice, uint32_t flags, uint64_t offset,
                          uint32_t length, uint32_t lkey, uint32_t count = 1) {
    ibv_sge sge = {reinterpret_cast<uint64_t>(bytes.data()) + offset, length, lkey};
    return ibv_advise_mr(b_.pd(), advice, flags, &sge, count);
  };
  constexpr auto kRead = IBV_ADVISE_MR_ADVICE_PREFETCH;
  constexpr auto kWrite = IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE;
  constexpr uint32_t kFlush = IBV_ADVISE_MR_FLAG_FLUSH;
  EXPECT_EQ(advise(kRead, kFlush, 0, 65536, mr->lkey), 0);
  EXPECT_EQ(advise(kWrite, 0, 100, 65436, mr->lkey), 0);
  EXPECT_EQ(advise(IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, kFlush, 0, 10, mr->lkey), 0);
  EXPECT_EQ(advise(kRead, kFlush, 1, 65536, mr->lkey), EFAULT);
  EXPECT_EQ(advise(kRead, 2, 0, 10, mr->lkey), EINVAL);
  EXPECT_EQ(advise(kRead, 0, 0, 10, mr->lkey, 0), EINVAL);
  EXPECT_EQ(advise(kRead, 0, 0, 10, mr->lkey ^ 0x5500), ENOENT);
  EXPECT_EQ(advise(kRead, 0, 0, 10, readable->lkey), 0);
  EXPECT_EQ(advise(kWrite, 0, 0, 10, readable->lkey), EPERM);
  EXPECT_EQ(advise(static_cast<ibv_advise_mr_advice>(3), 0, 0, 10, mr->lkey), EOPNOTSUPP);
}

// --- ibv_alloc_dm(3) ---

TEST_F(Regions, MemoryOfTheDeviceIsReadAndWrittenFromBothSides) {
  ibv_alloc_dm_attr attr = {.length = 4096, .log_align_req = 6, .comp_mask = 0};
  Owned<ibv_dm> dm(ibv_alloc_dm(b_.context(), &attr));
  ASSERT_NE(dm, nullptr) << strerror(errno);
  Owned<ibv_mr> mr(
      ibv_reg_dm_mr(b_.pd(), dm.get(), 1024, 2048, kAllAccess | IBV_ACCESS_ZERO_BASED));
  ASSERT_NE(mr, nullptr) << strerror(errno);
  FillPattern(local_.bytes(), 11);
  EXPECT_EQ(Write(0, mr->rkey, local_.sge(0, 2048)), IBV_WC_SUCCESS);
  std::vector<uint8_t> bytes(4096);
  ASSERT_EQ(ibv_memcpy_from_dm(bytes.data(), dm.get(), 0, 4096), 0);
  EXPECT_EQ(PatternMismatch(std::span(bytes).subspan(1024, 2048), 11), std::nullopt);
  EXPECT_EQ(bytes[1023], 0);
  EXPECT_EQ(bytes[3072], 0);
  FillPattern(bytes, 12);
  ASSERT_EQ(ibv_memcpy_to_dm(dm.get(), 1024, bytes.data(), 2048), 0);
  EXPECT_EQ(Read(0, mr->rkey, local_.sge(4096, 2048)), IBV_WC_SUCCESS);
  EXPECT_EQ(PatternMismatch(local_.bytes().subspan(4096, 2048), 12), std::nullopt);
  EXPECT_EQ(Write(2048, mr->rkey, local_.sge(0, 4)), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Regions, MemoryOfTheDeviceHasLimits) {
  ibv_device_attr_ex device = {};
  ASSERT_EQ(ibv_query_device_ex(b_.context(), nullptr, &device), 0);
  const auto error_of = [&](ibv_alloc_dm_attr attr) {
    errno = 0;
    const Owned<ibv_dm> dm(ibv_alloc_dm(b_.context(), &attr));
    return dm != nullptr ? 0 : errno;
  };
  EXPECT_EQ(error_of({device.max_dm_size, 0, 0}), 0);
  EXPECT_EQ(error_of({device.max_dm_size + 1, 0, 0}), EINVAL);
  EXPECT_EQ(error_of({0, 0, 0}), EINVAL);
  EXPECT_EQ(error_of({64, 0, 1}), EINVAL);
  ibv_alloc_dm_attr attr = {device.max_dm_size - 64, 0, 0};
  Owned<ibv_dm> most(ibv_alloc_dm(b_.context(), &attr));
  ASSERT_NE(most, nullptr);
  EXPECT_EQ(error_of({64, 0, 0}), 0);
  EXPECT_EQ(error_of({128, 0, 0}), ENOMEM);
  most.reset();
  EXPECT_EQ(error_of({128, 0, 0}), 0);
  attr = {128, 0, 0};
  const Owned<ibv_dm> dm(ibv_alloc_dm(b_.context(), &attr));
  uint8_t bytes[256] = {};
  EXPECT_EQ(ibv_memcpy_to_dm(dm.get(), 0, bytes, 128), 0);
  EXPECT_NE(ibv_memcpy_to_dm(dm.get(), 4, bytes, 128), 0);
  EXPECT_NE(ibv_memcpy_to_dm(dm.get(), 3, bytes, 4), 0);
  EXPECT_NE(ibv_memcpy_from_dm(bytes, dm.get(), 0, 3), 0);
  EXPECT_NE(ibv_memcpy_from_dm(bytes, dm.get(), UINT64_MAX - 3, 8), 0);
  errno = 0;
  EXPECT_EQ(ibv_reg_dm_mr(b_.pd(), dm.get(), 0, 132, kAllAccess | IBV_ACCESS_ZERO_BASED), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

// --- ibv_import_device(3) ---

TEST_F(Regions, AnImportedContextWorksWithTheObjectsOfTheOther) {
  const Owned<ibv_context> imported(ibv_import_device(dup(b_.context()->cmd_fd)));
  ASSERT_NE(imported, nullptr) << strerror(errno);
  EXPECT_GE(imported->async_fd, 0);
  EXPECT_NE(imported->async_fd, b_.context()->async_fd);
  ibv_pd* pd = ibv_import_pd(imported.get(), b_.pd()->handle);
  ASSERT_NE(pd, nullptr);
  ibv_mr* mr = ibv_import_mr(pd, remote_.mr()->handle);
  ASSERT_NE(mr, nullptr);
  EXPECT_EQ(mr->lkey, remote_.lkey());
  EXPECT_EQ(mr->rkey, remote_.rkey());
  EXPECT_EQ(mr->length, remote_.size());
  {
    // A QP of the importer reaches memory of the exporter, as both are of one PD.
    const Owned<ibv_cq> cq(ibv_create_cq(imported.get(), 8, nullptr, nullptr, 0));
    ibv_qp_init_attr init = {};
    init.send_cq = init.recv_cq = cq.get();
    init.qp_type = IBV_QPT_RC;
    init.cap = {4, 4, 1, 1, 0};
    const Owned<ibv_qp> qp(ibv_create_qp(pd, &init));
    EXPECT_NE(qp, nullptr) << strerror(errno);
  }
  errno = 0;
  EXPECT_EQ(ibv_import_mr(pd, remote_.mr()->handle ^ 0x700), nullptr);
  EXPECT_EQ(errno, EINVAL);
  errno = 0;
  EXPECT_EQ(ibv_import_pd(imported.get(), 0x7fffffff), nullptr);
  EXPECT_EQ(errno, EINVAL);
  ibv_unimport_mr(mr);
  ibv_unimport_pd(pd);
  EXPECT_EQ(Write(remote_.address(), remote_.rkey(), local_.sge(0, 8)), IBV_WC_SUCCESS);
}

TEST_F(Regions, ImportedDeviceMemoryIsTheSameMemory) {
  ibv_alloc_dm_attr attr = {.length = 64, .log_align_req = 0, .comp_mask = 0};
  const Owned<ibv_dm> dm(ibv_alloc_dm(b_.context(), &attr));
  ASSERT_NE(dm, nullptr);
  const Owned<ibv_context> imported(ibv_import_device(dup(b_.context()->cmd_fd)));
  ASSERT_NE(imported, nullptr);
  ibv_dm* same = ibv_import_dm(imported.get(), dm->handle);
  ASSERT_NE(same, nullptr) << strerror(errno);
  const uint32_t word = 0x12345678;
  uint32_t seen = 0;
  ASSERT_EQ(ibv_memcpy_to_dm(dm.get(), 60, &word, 4), 0);
  ASSERT_EQ(ibv_memcpy_from_dm(&seen, same, 60, 4), 0);
  EXPECT_EQ(seen, word);
  ibv_unimport_dm(same);
}

// --- Parent and thread domains ---

struct AllocatorCalls {
  int allocated = 0;
  int freed = 0;
  bool use_default = false;
};

void* CountingAlloc(ibv_pd*, void* context, size_t size, size_t alignment, uint64_t) {
  auto* calls = static_cast<AllocatorCalls*>(context);
  if (calls->use_default) return IBV_ALLOCATOR_USE_DEFAULT;
  ++calls->allocated;
  void* memory = nullptr;
  return posix_memalign(&memory, std::max(alignment, sizeof(void*)), size) == 0 ? memory : nullptr;
}

void CountingFree(ibv_pd*, void* context, void* pointer, uint64_t) {
  ++static_cast<AllocatorCalls*>(context)->freed;
  free(pointer);
}

TEST(ParentDomain, StandsForItsProtectionDomainAndKeepsIt) {
  const auto context = OpenDevice();
  ibv_pd* pd = ibv_alloc_pd(context.get());
  ibv_td_init_attr td_attr = {};
  ibv_td* td = ibv_alloc_td(context.get(), &td_attr);
  ASSERT_NE(td, nullptr);
  ibv_parent_domain_init_attr attr = {};
  attr.pd = pd;
  attr.td = td;
  ibv_pd* parent = ibv_alloc_parent_domain(context.get(), &attr);
  ASSERT_NE(parent, nullptr);
  EXPECT_EQ(ibv_dealloc_pd(pd), EBUSY);
  EXPECT_EQ(ibv_dealloc_td(td), EBUSY);
  { const Memory memory(parent, 4096); }
  EXPECT_EQ(ibv_dealloc_pd(parent), 0);
  EXPECT_EQ(ibv_dealloc_td(td), 0);
  EXPECT_EQ(ibv_dealloc_pd(pd), 0);
}

TEST(ParentDomain, ItsAllocatorServesQps) {
  const auto context = OpenDevice();
  const Owned<ibv_pd> pd(ibv_alloc_pd(context.get()));
  const Owned<ibv_cq> cq(ibv_create_cq(context.get(), 8, nullptr, nullptr, 0));
  for (const bool use_default : {false, true}) {
    AllocatorCalls calls{.use_default = use_default};
    ibv_parent_domain_init_attr attr = {};
    attr.pd = pd.get();
    attr.comp_mask =
        IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    attr.alloc = CountingAlloc;
    attr.free = CountingFree;
    attr.pd_context = &calls;
    const Owned<ibv_pd> parent(ibv_alloc_parent_domain(context.get(), &attr));
    ASSERT_NE(parent, nullptr);
    ibv_qp_init_attr init = {};
    init.send_cq = init.recv_cq = cq.get();
    init.qp_type = IBV_QPT_RC;
    init.cap = {4, 4, 1, 1, 0};
    Owned<ibv_qp> qp(ibv_create_qp(parent.get(), &init));
    ASSERT_NE(qp, nullptr);
    EXPECT_EQ(qp->pd, parent.get());
    EXPECT_EQ(calls.allocated > 0, !use_default);
    qp.reset();
    EXPECT_EQ(calls.allocated, calls.freed);
  }
}

TEST(ParentDomain, WrongAttributesAreRefused) {
  const auto context = OpenDevice();
  const Owned<ibv_pd> pd(ibv_alloc_pd(context.get()));
  ibv_parent_domain_init_attr attr = {};
  errno = 0;
  EXPECT_EQ(ibv_alloc_parent_domain(context.get(), &attr), nullptr);
  EXPECT_EQ(errno, EINVAL);
  attr.pd = pd.get();
  attr.comp_mask = 1u << 7;
  errno = 0;
  EXPECT_EQ(ibv_alloc_parent_domain(context.get(), &attr), nullptr);
  EXPECT_EQ(errno, EINVAL);
}

}  // namespace
}  // namespace verbena::testing
