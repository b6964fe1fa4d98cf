// SPDX-License-Identifier: Apache-2.0
//
// What a daemon sends to an application: stock libibverbs with our provider and
// preload in this process, over a daemon that lies: replies with patched fields,
// cut or too long, with missing, surplus or wrong descriptors, and rings, records
// and pages that it fills with anything. The application goes on using its
// objects. The first half of the input says what it does, the second how the
// replies are spoiled.
//
// Not spoiled is what the verbs ABI makes the application trust its device with:
// pointers in event records, and the number of events that destroying waits for.
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "nic_sim/abi/commands.h"
#include "tests/fuzz/fuzz_target.h"

// When destroying an object fails the application keeps it, for ever.
extern "C" int __lsan_is_turned_off() { return 1; }

namespace verbena::fuzz {
namespace {

constexpr int kMaxSteps = 60;
constexpr uint64_t kSegmentBytes = 1 << 18;

struct Memory {
  int fd = -1;
  uint8_t* data = nullptr;
  size_t bytes = 0;

  Memory(const char* name, size_t size) : bytes(size) {
    fd = memfd_create(name, MFD_CLOEXEC);
    FUZZ_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0);
    void* map = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    FUZZ_CHECK(map != MAP_FAILED);
    data = static_cast<uint8_t*>(map);
  }
  ~Memory() {
    munmap(data, bytes);
    close(fd);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

void WriteFile(const std::filesystem::path& path, const char* text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

// Serves one connection after the other; its script is set while there is none.
class Liar {
 public:
  static Liar& Get() {
    static Liar* const liar = new Liar;
    return *liar;
  }

  void Begin(Input script) {
    WaitUntilIdle();
    const std::lock_guard lock(mutex_);
    script_ = script;
    context_ = std::make_unique<Memory>("context", sizeof(abi::ContextPage));
    segment_ = std::make_unique<Memory>("segment", kSegmentBytes);
    used_ = 0;
    sent_ = false;
    handle_ = 0;
    std::memset(wake_.data, 0, wake_.bytes);
    auto* status = new (status_.data) abi::StatusPage{};
    status->thread_count = 1;
  }
  void WaitUntilIdle() {
    while (busy_.load()) std::this_thread::yield();
  }

  abi::ContextPage* page() { return reinterpret_cast<abi::ContextPage*>(context_->data); }
  uint8_t* segment() { return segment_->data; }
  uint8_t* status() { return status_.data; }
  uint8_t* wake() { return wake_.data; }
  void Die() { reinterpret_cast<abi::StatusPage*>(status_.data)->device_dead.store(1); }

 private:
  Liar() : wake_("wake", sizeof(abi::WakePage)), status_("status", sizeof(abi::StatusPage)) {
    char folder[] = "/tmp/verbena-liar-XXXXXX";
    FUZZ_CHECK(mkdtemp(folder) != nullptr);
    static std::string cleanup;
    cleanup = folder;
    std::atexit([] {
      std::error_code ignored;
      std::filesystem::remove_all(cleanup, ignored);
    });
    const std::string path = std::string(folder) + "/liar.sock";
    const std::filesystem::path root = std::string(folder) + "/liar.tree";
    const std::filesystem::path sys = root / "sys/class";
    WriteFile(sys / "infiniband/verbena0/node_type", "1: CA\n");
    WriteFile(sys / "infiniband/verbena0/node_guid", "0200:00ff:fe00:0001\n");
    WriteFile(sys / "infiniband_verbs/abi_version", "6\n");
    WriteFile(sys / "infiniband_verbs/uverbs0/ibdev", "verbena0\n");
    WriteFile(sys / "infiniband_verbs/uverbs0/dev", "231:192\n");
    WriteFile(sys / "infiniband_verbs/uverbs0/abi_version", "1\n");
    WriteFile(root / "dev/infiniband/uverbs0", "");
    setenv("VERBENA_SOCKET", path.c_str(), 1);
    // Once the device is dead everything can be destroyed.
    setenv("RDMAV_ALLOW_DISASSOC_DESTROY", "1", 1);

    listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof(address.sun_path), "%s", path.c_str());
    FUZZ_CHECK(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    FUZZ_CHECK(listen(listener_, 16) == 0);
    std::thread([this] { Serve(); }).detach();
  }

  void Serve() {
    for (;;) {
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) return;
      busy_.store(true);
      bool greeted = false;
      while (Handle(fd, &greeted)) {
      }
      close(fd);
      busy_.store(false);
    }
  }

  template <typename T>
  static std::vector<uint8_t> BytesOf(const T& value) {
    const auto* begin = reinterpret_cast<const uint8_t*>(&value);
    return {begin, begin + sizeof(value)};
  }

  bool Handle(int fd, bool* greeted) {
    alignas(8) uint8_t bytes[abi::kMaxMessageBytes];
    iovec part = {bytes, sizeof bytes};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    if (got <= 0) return false;
    if (const cmsghdr* item = CMSG_FIRSTHDR(&message); item != nullptr) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(item), sizeof(received));
      close(received);
    }
    const std::lock_guard lock(mutex_);
    std::vector<uint8_t> reply;
    std::vector<int> fds;
    std::vector<int> to_close;
    size_t keep_from = SIZE_MAX;  // bytes of the reply that stay as they are
    if (!*greeted) {
      *greeted = true;
      reply = Hello(&fds, &to_close);
    } else {
      abi::CommandHeader header;
      std::memcpy(&header, bytes, sizeof header);
      if (header.op == abi::kCmdDestroyCq || header.op == abi::kCmdDestroyQp) keep_from = 8;
      reply = Answer(header, bytes, &fds);
    }
    const bool open = Spoil(&reply, &fds, keep_from);
    if (open) Send(fd, reply, fds);
    for (const int done : to_close) close(done);
    return open;
  }

  std::vector<uint8_t> Hello(std::vector<int>* fds, std::vector<int>* to_close) {
    abi::HelloReply reply = {};
    reply.magic = abi::kMagic;
    reply.version = reply.version_min = reply.version_max = abi::kVersionMax;
    reply.sizes = abi::kAbiSizes;
    reply.attributes.max_qp = 16384;
    reply.attributes.max_sge = 32;
    reply.attributes.phys_port_count = 1;
    reply.attributes.num_comp_vectors = 4;
    int async[2];
    FUZZ_CHECK(pipe2(async, O_CLOEXEC) == 0);
    *fds = {context_->fd, wake_.fd, status_.fd, async[0]};
    *to_close = {async[0], async[1]};
    return BytesOf(reply);
  }

  abi::RingLocation MakeRing(uint32_t slots, uint32_t stride, std::vector<int>* fds) {
    abi::RingLocation location = {};
    location.segment_bytes = kSegmentBytes;
    location.slots = std::bit_ceil(std::clamp(slots, 1u, 64u));
    location.stride = stride;
    const uint64_t bytes = abi::RoundUp(location.slots * stride, 64);
    if (used_ + bytes > kSegmentBytes) used_ = 0;
    location.offset = used_;
    used_ += bytes;
    if (!sent_) {
      location.new_segment = 1;
      fds->push_back(segment_->fd);
      sent_ = true;
    }
    return location;
  }

  std::vector<uint8_t> Answer(const abi::CommandHeader& header, const uint8_t* request,
                              std::vector<int>* fds) {
    const abi::ReplyHeader ok = {header.sequence, 0};
    switch (header.op) {
      case abi::kCmdRegMr:
        return BytesOf(abi::RegMrReply{ok, 1, 0x101, 0x102, 0});
      case abi::kCmdCreateCq: {
        abi::CreateCqRequest wanted;
        std::memcpy(&wanted, request, sizeof wanted);
        abi::CreateCqReply reply = {};
        reply.header = ok;
        reply.handle = ++handle_;
        reply.ring = MakeRing(wanted.cqe, sizeof(abi::Cqe), fds);
        reply.cqe = reply.ring.slots;
        return BytesOf(reply);
      }
      case abi::kCmdCreateQp: {
        abi::CreateQpRequest wanted;
        std::memcpy(&wanted, request, sizeof wanted);
        abi::CreateQpReply reply = {};
        reply.header = ok;
        reply.handle = ++handle_;
        reply.qpn = 0x4321;
        reply.generation = 7;
        reply.caps = wanted.caps;
        reply.sq = MakeRing(wanted.caps.max_send_wr,
                            abi::SendStride(wanted.caps.max_send_sge, wanted.caps.max_inline), fds);
        reply.rq =
            MakeRing(wanted.caps.max_recv_wr, abi::RecvStride(wanted.caps.max_recv_sge), fds);
        return BytesOf(reply);
      }
      case abi::kCmdModifyQp: {
        abi::ModifyQpRequest wanted;
        std::memcpy(&wanted, request, sizeof wanted);
        return BytesOf(abi::ModifyQpReply{ok, wanted.attr.state, 7});
      }
      case abi::kCmdDestroyCq:
      case abi::kCmdDestroyQp:
        return BytesOf(abi::DestroyReply{ok, 0, 0});
      case abi::kCmdQueryQp: {
        abi::QueryQpReply reply = {};
        reply.header = ok;
        return BytesOf(reply);
      }
      case abi::kCmdQueryPort: {
        abi::QueryPortReply reply = {};
        reply.header = ok;
        return BytesOf(reply);
      }
      case abi::kCmdGetSegment:
        fds->push_back(segment_->fd);
        return BytesOf(abi::HandleReply{ok, 0, 0});
      default:
        return BytesOf(abi::HandleReply{ok, ++handle_, 0});
    }
  }

  // False: the connection ends instead.
  bool Spoil(std::vector<uint8_t>* reply, std::vector<int>* fds, size_t keep_from) {
    const uint8_t bits = script_.U8();
    for (int i = 0; i < (bits & 3); ++i) {
      const size_t at = script_.U8() % std::min(reply->size(), keep_from);
      const uint64_t value = (bits & 4) != 0 ? script_.U64() : script_.U8();
      const size_t width = std::min<size_t>((bits & 4) != 0   ? 8
                                            : (bits & 8) != 0 ? 4
                                                              : 1,
                                            std::min(reply->size(), keep_from) - at);
      std::memcpy(reply->data() + at, &value, width);
    }
    switch (bits >> 4) {
      case 15:
        return false;
      case 14:
        reply->resize(script_.U8());
        return !reply->empty();
      case 13:
        if (!fds->empty()) fds->pop_back();
        return true;
      case 12:
        fds->insert(fds->begin(), wake_.fd);
        return true;
      case 11:
        for (int& fd : *fds) fd = script_.U8() % 2 == 0 ? wake_.fd : context_->fd;
        return true;
      default:
        return true;
    }
  }

  static void Send(int fd, const std::vector<uint8_t>& bytes, const std::vector<int>& fds) {
    iovec part = {const_cast<uint8_t*>(bytes.data()), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (!fds.empty()) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
      cmsghdr* item = CMSG_FIRSTHDR(&message);
      item->cmsg_level = SOL_SOCKET;
      item->cmsg_type = SCM_RIGHTS;
      item->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(item), fds.data(), fds.size() * sizeof(int));
    }
    sendmsg(fd, &message, MSG_NOSIGNAL);
  }

  Input script_{nullptr, 0};
  Memory wake_;
  Memory status_;
  std::unique_ptr<Memory> context_;
  std::unique_ptr<Memory> segment_;
  uint64_t used_ = 0;
  bool sent_ = false;
  uint32_t handle_ = 0;
  int listener_ = -1;
  // What Begin() sets. The sockets order that as well, which the thread
  // sanitizer does not see.
  std::mutex mutex_;
  std::atomic<bool> busy_{false};
};

class Application {
 public:
  explicit Application(Input input) : input_(input) {}

  void Run(ibv_device* device) {
    context_ = ibv_open_device(device);
    if (context_ == nullptr) return;
    for (int step = 0; step < kMaxSteps && !input_.empty(); ++step) Step();
    Liar::Get().Die();
    ibv_wc wc[8];
    for (ibv_cq* cq : cqs_) ibv_poll_cq(cq, 8, wc);
    for (ibv_qp* qp : qps_) ibv_destroy_qp(qp);
    for (ibv_cq* cq : cqs_) ibv_destroy_cq(cq);
    for (ibv_mr* mr : mrs_) ibv_dereg_mr(mr);
    if (pd_ != nullptr) ibv_dealloc_pd(pd_);
    ibv_close_device(context_);
  }

 private:
  template <typename T>
  T* Any(const std::vector<T*>& of) {
    return of.empty() ? nullptr : of[input_.U8() % of.size()];
  }

  void Step() {
    switch (input_.U8() & 15) {
      case 0:
        if (pd_ == nullptr) pd_ = ibv_alloc_pd(context_);
        return;
      case 1:
        if (cqs_.size() < 4) {
          if (ibv_cq* cq = ibv_create_cq(context_, 1 + input_.U8() % 16, nullptr, nullptr, 0)) {
            cqs_.push_back(cq);
          }
        }
        return;
      case 2:
        CreateQp();
        return;
      case 3:
        Modify();
        return;
      case 4:
      case 5:
        PostSend();
        return;
      case 6:
        PostReceive();
        return;
      case 7:
      case 8:
        if (ibv_cq* cq = Any(cqs_)) {
          ibv_wc wc[4];
          FUZZ_CHECK(ibv_poll_cq(cq, 4, wc) <= 4);
        }
        return;
      case 9:
        Query();
        return;
      case 10:
      case 11:
        WriteCqe();
        return;
      case 12: {
        uint8_t* const memory[] = {Liar::Get().segment(),
                                   reinterpret_cast<uint8_t*>(Liar::Get().page()),
                                   Liar::Get().wake(), Liar::Get().status() + 4};
        const size_t sizes[] = {kSegmentBytes, sizeof(abi::ContextPage), sizeof(abi::WakePage),
                                sizeof(abi::StatusPage) - 4};
        const uint32_t which = input_.Below(4);
        const size_t at = (size_t{input_.U16()} * (which == 1 ? 64 : 8)) % sizes[which];
        const auto bytes = input_.Bytes(std::min<size_t>(input_.Below(48), sizes[which] - at));
        if (!bytes.empty()) std::memcpy(memory[which] + at, bytes.data(), bytes.size());
        return;
      }
      case 13:
        if (pd_ != nullptr && mrs_.size() < 4) {
          if (ibv_mr* mr = ibv_reg_mr(pd_, buffer_, sizeof buffer_, 15)) mrs_.push_back(mr);
        }
        return;
      case 14:
        if (!qps_.empty() && ibv_destroy_qp(qps_.back()) == 0) qps_.pop_back();
        return;
      default:
        if (ibv_cq* cq = Any(cqs_)) ibv_req_notify_cq(cq, input_.U8() & 1);
        return;
    }
  }

  void CreateQp() {
    if (pd_ == nullptr || cqs_.empty() || qps_.size() >= 4) return;
    ibv_qp_init_attr attr = {};
    attr.send_cq = Any(cqs_);
    attr.recv_cq = Any(cqs_);
    const uint8_t bits = input_.U8();
    attr.cap.max_send_wr = 1u + (bits & 7);
    attr.cap.max_recv_wr = 1u + (bits >> 3 & 7);
    attr.cap.max_send_sge = 2;
    attr.cap.max_recv_sge = 2;
    attr.cap.max_inline_data = bits >> 6 << 4;
    attr.qp_type = IBV_QPT_RC;
    if (ibv_qp* qp = ibv_create_qp(pd_, &attr)) qps_.push_back(qp);
  }

  void Modify() {
    ibv_qp* qp = Any(qps_);
    if (qp == nullptr) return;
    ibv_qp_attr attr = {};
    attr.qp_state = static_cast<ibv_qp_state>(input_.U8() % 7);
    attr.ah_attr.is_global = 1;
    ibv_modify_qp(
        qp, &attr,
        input_.U8() % 2 == 0 ? int{IBV_QP_STATE} : static_cast<int>(input_.U32() & 0x1fffff));
  }

  void PostSend() {
    ibv_qp* qp = Any(qps_);
    if (qp == nullptr) return;
    const uint8_t bits = input_.U8();
    ibv_sge sges[3] = {};
    for (ibv_sge& sge : sges) {
      sge = {reinterpret_cast<uint64_t>(buffer_), bits & 127u, 1};
    }
    ibv_send_wr wr = {};
    wr.opcode = static_cast<ibv_wr_opcode>(input_.U8() % 12);
    wr.send_flags = bits >> 4 & 15;
    wr.sg_list = sges;
    wr.num_sge = bits % 4;
    ibv_send_wr* bad = nullptr;
    ibv_post_send(qp, &wr, &bad);
  }

  void PostReceive() {
    ibv_qp* qp = Any(qps_);
    if (qp == nullptr) return;
    ibv_sge sges[3] = {};
    ibv_recv_wr wr = {};
    wr.sg_list = sges;
    wr.num_sge = input_.U8() % 4;
    ibv_recv_wr* bad = nullptr;
    ibv_post_recv(qp, &wr, &bad);
  }

  void Query() {
    switch (input_.Below(3)) {
      case 0: {
        ibv_port_attr attr;
        ibv_query_port(context_, 1, &attr);
        return;
      }
      case 1: {
        ibv_device_attr attr;
        ibv_query_device(context_, &attr);
        return;
      }
      default: {
        ibv_qp_attr attr;
        ibv_qp_init_attr init;
        if (ibv_qp* qp = Any(qps_)) ibv_query_qp(qp, &attr, IBV_QP_STATE, &init);
        return;
      }
    }
  }

  // One that may pass for real.
  void WriteCqe() {
    const uint32_t slot = input_.U8();
    auto* cqe = reinterpret_cast<abi::Cqe*>(Liar::Get().segment()) + slot;
    cqe->wr_id = input_.U8();
    cqe->status = input_.U8();
    cqe->opcode = input_.U8();
    cqe->flags = input_.U8();
    cqe->byte_len = input_.U16();
    const uint8_t index = input_.U8();
    cqe->wqe_index = (index & 0x80) != 0 ? input_.U32() : index;
    cqe->qp_slot = input_.U8() % 8;
    cqe->qp_generation = 7;
    cqe->phase.store(input_.U8() & 1, std::memory_order_release);
  }

  Input input_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  std::vector<ibv_cq*> cqs_;
  std::vector<ibv_qp*> qps_;
  std::vector<ibv_mr*> mrs_;
  uint8_t buffer_[256] = {};
};

ibv_device* TheDevice() {
  static ibv_device** const list = [] {
    Liar::Get();
    int count = 0;
    ibv_device** found = ibv_get_device_list(&count);
    FUZZ_CHECK(found != nullptr && count == 1);
    return found;
  }();
  return list[0];
}

}  // namespace
}  // namespace verbena::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace verbena::fuzz;
  ibv_device* device = TheDevice();
  const size_t half = size / 2;
  Liar::Get().Begin(Input(data + half, size - half));
  Application(Input(data, half)).Run(device);
  Liar::Get().WaitUntilIdle();
  return 0;
}
