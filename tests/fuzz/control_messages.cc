// SPDX-License-Identifier: Apache-2.0
//
// Messages to the daemon's socket: the real control server over the real device
// (no engine threads), with clients that say Hello well or badly, send commands,
// netlink and JSON requests, valid ones with patches or plain bytes, cut or too
// long, with descriptors of the right and of the wrong kind. Each whole command
// or JSON request has an answer of the right form in bounded time or ends the
// connection; at the end nothing of the clients is left.
#include <fcntl.h>
#include <linux/netlink.h>
#include <rdma/rdma_netlink.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <thread>
#include <vector>

#include "nic_sim/ctrl/device_hardware.h"
#include "nic_sim/ctrl/server.h"
#include "nic_sim/device/device.h"
#include "nic_sim/supervisor/seqpacket.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/unit/nic_sim/ctrl/test_client.h"

namespace verbena::fuzz {
namespace {

using nic::UniqueFd;
using Bytes = std::vector<std::byte>;

constexpr int kMaxSteps = 40;
constexpr int kAnswerMs = 10000;  // far beyond what any request takes

alignas(4096) std::byte g_guard[4096];

// The server with its device, for the life of the process.
class Daemon {
 public:
  static Daemon& Get() {
    static Daemon* const daemon = new Daemon;
    return *daemon;
  }

  const std::string& path() const { return path_; }

  // A request may have ended it.
  void EnsureRunning() {
    if (running_ && !ended_) return;
    if (running_) thread_.join();
    server_ = std::make_unique<nic::Server>(hardware_.get(), nullptr, Options());
    const std::string error = server_->Listen(path_, -1);
    if (!error.empty()) std::fprintf(stderr, "%s\n", error.c_str());
    FUZZ_CHECK(error.empty());
    ended_ = false;
    running_ = true;
    thread_ = std::thread([this] {
      server_->Run();
      ended_ = true;
    });
  }

  // All connections are closed by the caller.
  void CheckNothingStays() {
    const bool gone = nic::Eventually([this] { return device_->context_count() == 0; });
    FUZZ_CHECK(gone);
    hardware_->ClearRules(0);
    for (const char* what : {"pd", "mr", "cq", "qp"}) {
      FUZZ_CHECK(device_->List(what)["items"].empty());
    }
  }

 private:
  Daemon() {
    spdlog::set_level(spdlog::level::off);
    signal(SIGPIPE, SIG_IGN);  // as verbenad's main does
    char folder[] = "/tmp/verbena-fuzz-XXXXXX";
    FUZZ_CHECK(mkdtemp(folder) != nullptr);
    path_ = std::string(folder) + "/d.sock";
    nic::DeviceOptions options;
    options.instance = "fuzz-" + std::to_string(getpid());
    options.run_folder = folder;
    options.nics = 2;
    options.mode = nic::DeviceOptions::Mode::kManual;
    std::string error;
    device_ = nic::Device::Start(options, &error);
    if (device_ == nullptr) std::fprintf(stderr, "%s\n", error.c_str());
    FUZZ_CHECK(device_ != nullptr);
    hardware_ = nic::MakeDeviceHardware(device_.get());
    static std::string cleanup;
    cleanup = folder;
    std::atexit([] {
      unlink((cleanup + "/d.sock").c_str());
      rmdir(cleanup.c_str());
    });
  }

  static nic::ServerOptions Options() {
    nic::ServerOptions options;
    options.daemon = {.name = "fuzz", .socket = "d.sock", .system = false, .pid = getpid()};
    return options;
  }

  std::string path_;
  std::unique_ptr<nic::Device> device_;
  std::unique_ptr<nic::Hardware> hardware_;
  std::unique_ptr<nic::Server> server_;
  std::thread thread_;
  bool running_ = false;
  std::atomic<bool> ended_{false};
};

template <typename T>
Bytes BytesOf(const T& message) {
  const auto* begin = reinterpret_cast<const std::byte*>(&message);
  return {begin, begin + sizeof(message)};
}

struct Connection {
  std::unique_ptr<nic::Client> client;
  enum class Kind { kNew, kDevice, kControl, kNetlink } kind = Kind::kNew;
  std::map<uint16_t, uint32_t> handles;  // of the newest object, by the command that made it
  bool unasked = false;                  // a capture may say a last word at any time
};

class Conversation {
 public:
  explicit Conversation(Input input) : input_(input) {}

  void Run() {
    for (int step = 0; step < kMaxSteps && !input_.empty(); ++step) {
      Daemon::Get().EnsureRunning();
      const uint8_t op = input_.U8();
      Connection& c = connections_[op >> 6 & 1];
      if (c.client == nullptr) {
        c = Connection();
        c.client = std::make_unique<nic::Client>(Daemon::Get().path());
        if (!c.client->connected()) {  // ended between the look and the connect
          c.client.reset();
          continue;
        }
      }
      if (c.kind == Connection::Kind::kNew) {
        SendHello(c, op);
      } else if ((op & 0x3f) == 0x3f) {
        c.client.reset();
      } else if (c.kind == Connection::Kind::kDevice) {
        SendCommand(c);
      } else if (c.kind == Connection::Kind::kNetlink) {
        SendNetlink(c);
      } else {
        SendRequest(c);
      }
    }
  }

 private:
  // Changes the bytes of a valid message: numbers at places, then the length.
  void Patch(Bytes* message) {
    const uint8_t bits = input_.U8();
    for (int i = 0; i < (bits & 3) && !message->empty(); ++i) {
      const size_t at = input_.U8() % message->size();
      const uint64_t value = (bits & 4) != 0 ? input_.U64() : input_.U8();
      const size_t width = std::min<size_t>((bits & 4) != 0   ? 8
                                            : (bits & 8) != 0 ? 4
                                                              : 1,
                                            message->size() - at);
      std::memcpy(message->data() + at, &value, width);
    }
    if ((bits & 0xe0) == 0xe0) message->resize(input_.U16() % 5000);
  }

  std::vector<UniqueFd> SomeFds() {
    std::vector<UniqueFd> fds;
    const uint8_t bits = input_.U8();
    for (int i = 0; i < (bits & 3); ++i) {
      const uint8_t kind = i == 0 ? bits >> 2 & 7 : input_.U8() & 7;
      switch (kind) {
        case 0:
          fds.emplace_back(open("/proc/self/mem", O_RDWR | O_CLOEXEC));
          break;
        case 1:
        case 2: {
          int ends[2];
          FUZZ_CHECK(pipe2(ends, O_CLOEXEC) == 0);
          fds.emplace_back(ends[kind == 1 ? 1 : 0]);
          other_ends_.emplace_back(ends[kind == 1 ? 0 : 1]);
          break;
        }
        case 3:
          fds.emplace_back(open("/dev/null", O_WRONLY | O_CLOEXEC));
          break;
        case 4:
          fds.emplace_back(memfd_create("fuzz", MFD_CLOEXEC));
          break;
        case 5:
          fds.emplace_back(open("/proc/self/maps", O_RDONLY | O_CLOEXEC));
          break;
        case 6:
          fds.emplace_back(open("/dev/full", O_WRONLY | O_CLOEXEC));
          break;
        default:
          fds.emplace_back(open("/", O_PATH | O_CLOEXEC));
          break;
      }
    }
    return fds;
  }

  bool Send(Connection& c, const Bytes& message, const std::vector<UniqueFd>& fds) {
    std::vector<int> numbers;
    for (const UniqueFd& fd : fds) numbers.push_back(fd.get());
    if (nic::SendMessage(c.client->fd(), message, numbers) == 0) return true;
    c.client.reset();
    return false;
  }

  // The next message; empty when the connection ended. Never nothing.
  Bytes Receive(Connection& c) {
    if (!nic::Readable(c.client->fd(), kAnswerMs)) {
      // The last word of a capture takes as long as its output.
      FUZZ_CHECK(c.unasked);
      c.client.reset();
      return {};
    }
    static Bytes buffer(abi::kMaxControlRequestBytes);
    const nic::ReceivedMessage got = nic::ReceiveMessage(c.client->fd(), buffer);
    if (got.kind != nic::ReceivedMessage::Kind::kMessage) {
      c.client.reset();
      return {};
    }
    FUZZ_CHECK(!got.truncated);
    return {buffer.begin(), buffer.begin() + static_cast<ptrdiff_t>(got.bytes)};
  }

  void SendHello(Connection& c, uint8_t op) {
    const uint64_t magic = 0x1234567890abcdef;
    std::memcpy(g_guard, &magic, sizeof magic);
    abi::Hello hello = nic::GoodHello((op & 0x20) != 0 ? 1 : 0);
    hello.guard_address = reinterpret_cast<uint64_t>(g_guard);
    hello.guard_magic = magic;
    if ((op & 0x10) != 0) {
      hello.kind = (op & 7) == 7 ? abi::kClientNetlink : abi::kClientControl;
    }
    Bytes message = BytesOf(hello);
    if ((op & 0x10) != 0) message.resize(8);
    std::vector<UniqueFd> fds;
    if ((op & 0x08) != 0) {
      Patch(&message);
      fds = SomeFds();
      // A page of the target itself is no guard: the device writes the magic to it.
      if (message.size() >= sizeof hello) {
        std::memcpy(&hello, message.data(), sizeof hello);
        if (hello.guard_magic == 0 || hello.guard_address % 4096 != 0) return;
      }
    }
    if (!Send(c, message, fds)) return;
    struct {
      uint32_t magic = 0, kind = 0;
    } head;
    if (message.size() >= sizeof head) std::memcpy(&head, message.data(), sizeof head);
    if (head.magic != abi::kMagic) head.kind = 0;
    if (head.kind == abi::kClientControl || head.kind == abi::kClientNetlink) {
      c.kind = head.kind == abi::kClientControl ? Connection::Kind::kControl
                                                : Connection::Kind::kNetlink;
      return;  // no answer
    }
    const Bytes answer = Receive(c);
    if (answer.empty()) return;
    if (head.kind == abi::kClientRefresh) {
      FUZZ_CHECK(answer.size() == 1 && Receive(c).empty());
      return;
    }
    FUZZ_CHECK(answer.size() == sizeof(abi::HelloReply));
    abi::HelloReply reply;
    std::memcpy(&reply, answer.data(), sizeof reply);
    FUZZ_CHECK(reply.magic == abi::kMagic && reply.error >= 0);
    if (reply.error != 0) {
      FUZZ_CHECK(Receive(c).empty());
      return;
    }
    c.kind = Connection::Kind::kDevice;
  }

  Bytes MakeCommand(Connection& c, uint16_t op) {
    const auto handle = [&c](uint16_t maker) { return c.handles[maker]; };
    const auto simple = [op](uint32_t number) {
      abi::HandleRequest request{};
      request.header = {op, sizeof request, 1};
      request.handle = number;
      return BytesOf(request);
    };
    switch (op) {
      case abi::kCmdDeallocPd:
        return simple(handle(abi::kCmdAllocPd));
      case abi::kCmdRegMr: {
        abi::RegMrRequest request{};
        request.header = {op, sizeof request, 2};
        request.pd = handle(abi::kCmdAllocPd);
        request.access = 15;
        request.address = request.iova = reinterpret_cast<uint64_t>(g_guard);
        request.length = 100;
        return BytesOf(request);
      }
      case abi::kCmdDeregMr:
        return simple(handle(abi::kCmdRegMr));
      case abi::kCmdCreateCq: {
        abi::CreateCqRequest request{};
        request.header = {op, sizeof request, 3};
        request.cqe = 16;
        request.user_handle = 5;
        return BytesOf(request);
      }
      case abi::kCmdDestroyCq:
        return simple(handle(abi::kCmdCreateCq));
      case abi::kCmdCreateQp: {
        abi::CreateQpRequest request{};
        request.srq = request.xrcd = abi::kNoHandle;
        request.header = {op, sizeof request, 4};
        request.pd = handle(abi::kCmdAllocPd);
        request.send_cq = request.recv_cq = handle(abi::kCmdCreateCq);
        request.type = 2;
        request.caps = {4, 4, 2, 2, 16};
        const uint8_t kind = input_.U8();
        if ((kind & 7) == 5) request.type = 8;  // raw packet
        if ((kind & 7) == 6) request.srq = handle(abi::kCmdCreateSrq);
        if ((kind & 7) == 7) {  // XRC_RECV, XRC_SEND
          request.type = (kind & 8) != 0 ? 10 : 9;
          request.recv_cq = abi::kNoHandle;
          if ((kind & 8) != 0) request.xrcd = handle(abi::kCmdOpenXrcd);
        }
        if ((kind & 7) == 5) request.type = (kind & 8) != 0 ? 3 : 4;  // UC, UD
        return BytesOf(request);
      }
      case abi::kCmdModifyQp: {
        abi::ModifyQpRequest request{};
        request.header = {op, sizeof request, 5};
        request.handle = handle(abi::kCmdCreateQp);
        const uint8_t state = input_.U8() & 7;
        // What each step of a connection needs; the patches make it wrong.
        static constexpr uint32_t kMasks[] = {0x1, 0x39, 0x121181, 0x12e01, 0x1, 0x1, 0x1, 0x1};
        request.mask = kMasks[state];
        request.attr.state = state;
        request.attr.port_num = 1;
        request.attr.path_mtu = 1;
        request.attr.access_flags = 15;
        request.attr.ah.is_global = request.attr.ah.port_num = request.attr.ah.sgid_index = 1;
        const uint8_t gid[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 88, 0, 1};
        std::memcpy(request.attr.ah.dgid, gid, sizeof gid);
        return BytesOf(request);
      }
      case abi::kCmdQueryQp:
      case abi::kCmdDestroyQp:
        return simple(handle(abi::kCmdCreateQp));
      case abi::kCmdCreateAh: {
        abi::CreateAhRequest request{};
        request.header = {op, sizeof request, 6};
        request.pd = handle(abi::kCmdAllocPd);
        request.attr.is_global = request.attr.port_num = request.attr.dgid[0] = 1;
        return BytesOf(request);
      }
      case abi::kCmdCreateSrq: {
        abi::CreateSrqRequest request{};
        request.header = {op, sizeof request, 7};
        request.pd = handle(abi::kCmdAllocPd);
        request.max_wr = 4;
        request.xrcd = request.cq = abi::kNoHandle;
        return BytesOf(request);
      }
      case abi::kCmdModifySrq: {
        abi::ModifySrqRequest request{};
        request.header = {op, sizeof request, 8};
        request.handle = handle(abi::kCmdCreateSrq);
        request.mask = input_.U8() & 3;
        request.max_wr = request.srq_limit = 7;
        return BytesOf(request);
      }
      case abi::kCmdFinishSrqResize: {
        abi::FinishSrqResizeRequest request{};
        request.header = {op, sizeof request, 9};
        request.handle = handle(abi::kCmdCreateSrq);
        request.commit = input_.U8() & 1;
        return BytesOf(request);
      }
      case abi::kCmdQuerySrq:
      case abi::kCmdDestroySrq:
        return simple(handle(abi::kCmdCreateSrq));
      case abi::kCmdOpenXrcd: {
        abi::OpenXrcdRequest request{};
        request.header = {op, sizeof request, 10};
        request.flags = O_CREAT;
        return BytesOf(request);
      }
      case abi::kCmdCloseXrcd:
        return simple(handle(abi::kCmdOpenXrcd));
      case abi::kCmdOpenQp: {
        abi::OpenQpRequest request{};
        request.header = {op, sizeof request, 11};
        request.xrcd = handle(abi::kCmdOpenXrcd);
        request.qpn = handle(abi::kCmdCreateQp);
        return BytesOf(request);
      }
      case abi::kCmdReregMr: {
        abi::ReregMrRequest request{};
        request.header = {op, sizeof request, 12};
        request.handle = handle(abi::kCmdRegMr);
        request.flags = input_.U8() & 7;
        request.pd = handle(abi::kCmdAllocPd);
        request.access = 17;
        request.address = request.iova = reinterpret_cast<uint64_t>(g_guard);
        request.length = 50;
        return BytesOf(request);
      }
      case abi::kCmdAllocNullMr:
        return simple(handle(abi::kCmdAllocPd));
      case abi::kCmdQueryMr:
        return simple(handle((input_.U8() & 1) != 0 ? abi::kCmdRegMr : abi::kCmdAllocNullMr));
      case abi::kCmdAllocMw: {
        abi::AllocMwRequest request{};
        request.header = {op, sizeof request, 13};
        request.pd = handle(abi::kCmdAllocPd);
        request.type = 1 + (input_.U8() & 1);
        return BytesOf(request);
      }
      case abi::kCmdDeallocMw:
        return simple(handle(abi::kCmdAllocMw));
      case abi::kCmdAllocDm: {
        abi::AllocDmRequest request{};
        request.header = {op, sizeof request, 14};
        request.length = input_.U8();
        return BytesOf(request);
      }
      case abi::kCmdFreeDm:
        return simple(handle(abi::kCmdAllocDm));
      case abi::kCmdImportPd:
      case abi::kCmdImportMr:
      case abi::kCmdImportDm: {
        // The cookie is a secret of the device: only Patch could find it.
        abi::ImportRequest request{};
        request.header = {op, sizeof request, 15};
        request.handle = handle(op == abi::kCmdImportPd   ? abi::kCmdAllocPd
                                : op == abi::kCmdImportMr ? abi::kCmdRegMr
                                                          : abi::kCmdAllocDm);
        request.pd = handle(abi::kCmdAllocPd);
        return BytesOf(request);
      }
      case abi::kCmdResizeCq: {
        abi::ResizeCqRequest request{};
        request.header = {op, sizeof request, 16};
        request.handle = handle(abi::kCmdCreateCq);
        request.cqe = input_.U8();
        return BytesOf(request);
      }
      case abi::kCmdFinishCqResize:
        return simple(handle(abi::kCmdCreateCq));
      case abi::kCmdModifyCq: {
        abi::ModifyCqRequest request{};
        request.header = {op, sizeof request, 17};
        request.handle = handle(abi::kCmdCreateCq);
        request.count = request.period_us = input_.U8();
        return BytesOf(request);
      }
      case abi::kCmdAttachMcast:
      case abi::kCmdDetachMcast: {
        abi::McastRequest request{};
        request.header = {op, sizeof request, 18};
        request.handle = handle(abi::kCmdCreateQp);
        // ::ffff:239.1.1.N and ff0e::N: groups that exist on RoCEv2.
        const uint8_t bits = input_.U8();
        if ((bits & 1) != 0) {
          request.gid[10] = request.gid[11] = 0xff;
          request.gid[12] = 239;
          request.gid[13] = request.gid[14] = 1;
        } else {
          request.gid[0] = 0xff;
          request.gid[1] = 0x0e;
        }
        request.gid[15] = bits >> 1 & 3;
        return BytesOf(request);
      }
      case abi::kCmdCreateFlow: {
        abi::CreateFlowRequest request{};
        request.header = {op, sizeof request, 18};
        const uint8_t kind = input_.U8();
        request.qp = handle((kind & 1) != 0 ? abi::kCmdCreateRss : abi::kCmdCreateQp);
        request.type = kind >> 1 & 3;
        request.port = 1;
        request.spec_count = kind >> 3 & 3;
        request.counters = (kind & 0x20) != 0 ? handle(abi::kCmdCreateCounters) : abi::kNoHandle;
        static constexpr uint32_t kTypes[] = {0x20, 0x30, 0x31, 0x32, 0x40, 0x41};
        for (abi::FlowSpec& spec : request.specs) {
          spec.type = kTypes[input_.U8() % std::size(kTypes)];
          spec.mask[input_.U8() % std::size(spec.mask)] = 0xff;
        }
        return BytesOf(request);
      }
      case abi::kCmdDestroyFlow:
        return simple(handle(abi::kCmdCreateFlow));
      case abi::kCmdDestroyCounters:
      case abi::kCmdReadCounters:
        return simple(handle(abi::kCmdCreateCounters));
      case abi::kCmdLimitQpRate: {
        abi::LimitQpRateRequest request{};
        request.header = {op, sizeof request, 19};
        request.qp = handle(abi::kCmdCreateQp);
        request.kbps = input_.U8();
        return BytesOf(request);
      }
      case abi::kCmdCreateRss: {
        abi::CreateRssRequest request{};
        request.header = {op, sizeof request, 20};
        request.fields = input_.U8();
        request.log_size = input_.U8() & 3;
        for (uint32_t& qp : request.qps) qp = handle(abi::kCmdCreateQp);
        return BytesOf(request);
      }
      case abi::kCmdDestroyRss:
        return simple(handle(abi::kCmdCreateRss));
      case abi::kCmdDestroyAh:
        return simple(handle(abi::kCmdCreateAh));
      case abi::kCmdQueryPort:
        return simple(1);
      default:
        return simple(0);
    }
  }

  void SendCommand(Connection& c) {
    const uint8_t bits = input_.U8();
    static constexpr uint16_t kOthers[] = {
        abi::kCmdCreateSrq,       abi::kCmdModifySrq,      abi::kCmdFinishSrqResize,
        abi::kCmdQuerySrq,        abi::kCmdDestroySrq,     abi::kCmdOpenXrcd,
        abi::kCmdCloseXrcd,       abi::kCmdOpenQp,         abi::kCmdReregMr,
        abi::kCmdAllocNullMr,     abi::kCmdQueryMr,        abi::kCmdAllocMw,
        abi::kCmdDeallocMw,       abi::kCmdAllocDm,        abi::kCmdFreeDm,
        abi::kCmdImportPd,        abi::kCmdImportMr,       abi::kCmdImportDm,
        abi::kCmdResizeCq,        abi::kCmdFinishCqResize, abi::kCmdModifyCq,
        abi::kCmdCreateFlow,      abi::kCmdDestroyFlow,    abi::kCmdCreateCounters,
        abi::kCmdDestroyCounters, abi::kCmdReadCounters,   abi::kCmdLimitQpRate,
        abi::kCmdCreateRss,       abi::kCmdDestroyRss,     abi::kCmdAttachMcast,
        abi::kCmdDetachMcast};
    const uint32_t number = bits % (abi::kCmdGetSegment + 2 + std::size(kOthers));
    const uint16_t op = number < abi::kCmdGetSegment + 2
                            ? static_cast<uint16_t>(number)
                            : kOthers[number - (abi::kCmdGetSegment + 2)];
    Bytes message = MakeCommand(c, op);
    std::vector<UniqueFd> fds;
    if ((bits & 0x40) != 0) Patch(&message);
    if ((bits & 0x80) != 0) {
      fds = SomeFds();
      if (op == abi::kCmdCreateCq && message.size() == sizeof(abi::CreateCqRequest)) {
        message[offsetof(abi::CreateCqRequest, has_channel)] = std::byte{1};
      }
    }
    if (message.empty()) return;  // means the end of a connection
    if (!Send(c, message, fds)) return;
    const Bytes answer = Receive(c);
    if (answer.empty()) return;
    FUZZ_CHECK(answer.size() >= sizeof(abi::ReplyHeader));
    abi::HandleReply reply{};
    std::memcpy(&reply, answer.data(), std::min(answer.size(), sizeof reply));
    FUZZ_CHECK(reply.header.error >= 0 && reply.header.error < 4096);
    if (reply.header.error == 0) c.handles[op] = reply.handle;
  }

  void SendRequest(Connection& c) {
    static constexpr std::string_view kRequests[] = {
        R"({"op":"version"})",
        R"({"op":"status"})",
        R"({"op":"list","what":"context"})",
        R"({"op":"list","what":"qp"})",
        R"({"op":"counters","dev":"verbena1"})",
        R"({"op":"fault_add","rule":"drop nth=3"})",
        R"({"op":"fault_list"})",
        R"({"op":"fault_clear","id":1})",
        R"({"op":"dump"})",
        R"({"op":"capture","stage":"after","dev":"verbena0"})",
        R"({"op":"capture","stage":"before","count":1})",
        R"({"op":"capture_stop"})",
        R"({"op":"shutdown"})",
        R"({"op":"fault_add","rule":)",
        R"({"op":"list","what":)",
        "",
        R"({"op":"list","what":"srq"})",
        R"({"op":"list","what":"cm_id"})",
        R"({"op":"trace"})",
        R"({"op":"trace","qpn":17,"after_ns":1,"limit":5})",
        R"({"op":"trace","limit":)",
        R"({"op":"fault_add","rule":"set bth.psn=+1 prob=0.5 seed=3"})",
        R"({"op":"fault_add","rule":"rate mbps=1"})",
        R"({"op":"counters"})",
    };
    const uint8_t bits = input_.U8();
    const uint32_t number = input_.Below(std::size(kRequests));
    std::string text(kRequests[number]);
    // Stopping the server costs as much as a thousand requests.
    if (text.find("shutdown") != std::string::npos && input_.Below(64) != 63) return;
    if ((bits & 0x40) != 0 || text.empty() || text.back() == ':') {
      const auto more = input_.Bytes(input_.Below(64));
      text.append(reinterpret_cast<const char*>(more.data()), more.size());
    }
    Bytes message(text.size());
    if (!text.empty()) std::memcpy(message.data(), text.data(), text.size());
    if ((bits & 0x20) != 0) Patch(&message);
    std::vector<UniqueFd> fds;
    if ((bits & 0x80) != 0 || text.find("capture\"") != std::string::npos) fds = SomeFds();
    if (message.empty() || !Send(c, message, fds)) return;
    c.unasked |= text.find("capture") != std::string::npos;
    std::string whole;
    for (;;) {
      const Bytes piece = Receive(c);
      if (piece.empty()) return;
      const char first = static_cast<char>(piece[0]);
      FUZZ_CHECK(first == 'M' || first == 'L');
      whole.append(reinterpret_cast<const char*>(piece.data()) + 1, piece.size() - 1);
      if (first == 'L') break;
    }
    const auto answer = nlohmann::json::parse(whole, nullptr, /*allow_exceptions=*/false);
    FUZZ_CHECK(answer.is_object());
  }

  // Requests of NETLINK_RDMA. Some have no answer; what comes is whole netlink messages.
  void SendNetlink(Connection& c) {
    nlmsghdr header = {};
    const uint8_t bits = input_.U8();
    header.nlmsg_type = static_cast<uint16_t>(RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, input_.U8() % 40));
    header.nlmsg_flags = static_cast<uint16_t>(NLM_F_REQUEST | ((bits & 1) != 0 ? NLM_F_DUMP : 0));
    header.nlmsg_seq = 7;
    Bytes message = BytesOf(header);
    for (int i = 0; i < (bits >> 1 & 3); ++i) {
      // An attribute of one number, or of some bytes.
      nlattr attribute = {};
      attribute.nla_type = input_.U8() % 100;
      const std::span<const uint8_t> value = input_.Bytes(input_.U8() % 9);
      attribute.nla_len = static_cast<uint16_t>(sizeof attribute + value.size());
      const size_t at = message.size();
      message.resize(at + NLA_ALIGN(attribute.nla_len));
      std::memcpy(message.data() + at, &attribute, sizeof attribute);
      if (!value.empty()) {
        std::memcpy(message.data() + at + sizeof attribute, value.data(), value.size());
      }
    }
    header.nlmsg_len = static_cast<uint32_t>(message.size());
    std::memcpy(message.data(), &header, sizeof header);
    if ((bits & 0x20) != 0) Patch(&message);
    if (message.empty() || !Send(c, message, {})) return;
    while (c.client != nullptr && nic::Readable(c.client->fd(), (bits & 0x40) != 0 ? 2 : 0)) {
      Bytes answer = Receive(c);
      FUZZ_CHECK(answer.size() <= abi::kMaxNetlinkReply);
      while (!answer.empty()) {
        FUZZ_CHECK(answer.size() >= sizeof header);
        std::memcpy(&header, answer.data(), sizeof header);
        FUZZ_CHECK(header.nlmsg_len >= sizeof header && header.nlmsg_len <= answer.size());
        const size_t bytes = std::min<size_t>(NLMSG_ALIGN(header.nlmsg_len), answer.size());
        answer.erase(answer.begin(), answer.begin() + static_cast<ptrdiff_t>(bytes));
      }
    }
  }

  Input input_;
  Connection connections_[2];
  std::vector<UniqueFd> other_ends_;
};

}  // namespace
}  // namespace verbena::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace verbena::fuzz;
  Daemon::Get().EnsureRunning();
  { Conversation(Input(data, size)).Run(); }
  Daemon::Get().CheckNothingStays();
  return 0;
}
