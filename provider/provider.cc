// SPDX-License-Identifier: Apache-2.0
//
// Registration with libibverbs and the life of a context.
#include "provider/provider.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "provider/run_folder.h"
#include "provider/valgrind.h"

namespace verbena::provider {

std::atomic<uint32_t> g_fork_generation{0};

namespace {

constexpr char kDeviceName[] = "verbena";
constexpr uint32_t kMaxDevices = 64;  // minors 192 … 255
constexpr uint32_t kMaxSegments = 65536;

void Say(const char* text) {
  const ssize_t written = write(STDERR_FILENO, text, strlen(text));
  static_cast<void>(written);
}

// N of "verbenaN", or kMaxDevices.
uint32_t DeviceIndex(const char* name) {
  const size_t length = sizeof(kDeviceName) - 1;
  if (strncmp(name, kDeviceName, length) != 0 || name[length] == '\0') return kMaxDevices;
  uint32_t index = 0;
  for (const char* digit = name + length; *digit != '\0'; ++digit) {
    if (*digit < '0' || *digit > '9') return kMaxDevices;
    index = index * 10 + static_cast<uint32_t>(*digit - '0');
    if (index >= kMaxDevices) return kMaxDevices;
  }
  return index;
}

bool MatchDevice(VerbsSysfsDev* sysfs_dev) {
  return DeviceIndex(sysfs_dev->ibdev_name) < kMaxDevices;
}

VerbsDevice* AllocDevice(VerbsSysfsDev* sysfs_dev) {
  Device* device = static_cast<Device*>(calloc(1, sizeof(Device)));
  if (device == nullptr) return nullptr;
  device->index = DeviceIndex(sysfs_dev->ibdev_name);
  device->base.core_support = kCoreSupportOptionalMrAccess;
  return &device->base;
}

void UninitDevice(VerbsDevice* device) { free(Downcast<Device>(device)); }

void* MapShared(int fd, size_t bytes, int protection) {
  struct stat status;
  if (fd < 0 || syscall(SYS_fstat, fd, &status) != 0 ||
      static_cast<uint64_t>(status.st_size) < bytes) {
    return nullptr;
  }
  void* base = mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  return base == MAP_FAILED ? nullptr : base;
}

// A page at an address that no later program in this process will have, with
// a content that it will not have either; see Hello.
int MapGuardPage(Context* context, abi::Hello* hello) {
  uint64_t random[2];
  if (getrandom(random, sizeof(random), 0) != sizeof(random)) return EIO;
  const size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const uint64_t hint = (1ull << 40) + random[0] % (1ull << 45) / page_bytes * page_bytes;
  void* page = mmap(reinterpret_cast<void*>(hint), page_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return errno;
  context->guard_page = page;
  context->guard_owner = getpid();
  if (madvise(page, page_bytes, MADV_DONTFORK) != 0) return errno;
  memcpy(page, &random[1], sizeof(random[1]));
  hello->guard_address = reinterpret_cast<uint64_t>(page);
  hello->guard_magic = random[1];
  return 0;
}

void SayMismatch(const Device* device, const abi::Hello& hello, const abi::HelloReply& reply) {
  const abi::AbiSizes& ours = hello.sizes;
  const abi::AbiSizes& theirs = reply.sizes;
  char text[512];
  snprintf(text, sizeof(text),
           "verbena%u: this provider and the running daemon do not fit (provider: version %u-%u, "
           "sizes %u/%u/%u/%u/%u/%u/%u/%u; daemon: version %u-%u, sizes %u/%u/%u/%u/%u/%u/%u/%u). "
           "Restart the daemon with the version that you use now.\n",
           device->index, hello.version_min, hello.version_max, ours.context_page_kib,
           ours.qp_record, ours.cq_record, ours.wake_page, ours.send_wqe, ours.recv_wqe, ours.cqe,
           ours.srq_record, reply.version_min, reply.version_max, theirs.context_page_kib,
           theirs.qp_record, theirs.cq_record, theirs.wake_page, theirs.send_wqe, theirs.recv_wqe,
           theirs.cqe, theirs.srq_record);
  Say(text);
}

enum class Opening {
  kOwn,
  kImport,
  kForChild,  // without libibverbs, see ContextOfThisProcess
};

// libibverbs asks the kernel for the async descriptor of an imported context. The
// preload, which answers that, is told here what to answer to this thread.
int PassAsyncFd(Context* context) {
  int* fd = &context->verbs.context.async_fd;
  if (ioctl(context->verbs.context.cmd_fd, abi::kIoctlPassAsyncFd, *fd) != 0) return EOPNOTSUPP;
  *fd = -1;
  return 0;
}

int SayHello(Context* context, const Device* device, int mem_fd, const abi::Hello& hello,
             Opening opening) {
  abi::HelloReply reply;
  ReplyFds fds;
  int error = context->channel.SayHello(hello, mem_fd, &reply, &fds);
  const bool fits = reply.magic == abi::kMagic && reply.sizes == hello.sizes &&
                    (reply.error != 0 ||
                     (reply.version >= hello.version_min && reply.version <= hello.version_max));
  if (error == EPROTO || (error == 0 && !fits)) {
    SayMismatch(device, hello, reply);
    return EPROTO;
  }
  if (error == EPERM) {
    char text[320];
    snprintf(text, sizeof(text),
             "verbena%u: the daemon may not access this program's memory (the program is not "
             "dumpable: prctl or file capabilities; or it is another user's; or Yama forbids it). "
             "`verbena doctor` tells more.\n",
             device->index);
    Say(text);
  }
  if (error != 0) return error;
  context->attributes = reply.attributes;
  context->page = static_cast<abi::ContextPage*>(
      MapShared(fds.fd[0], sizeof(abi::ContextPage), PROT_READ | PROT_WRITE));
  context->wake = static_cast<abi::WakePage*>(
      MapShared(fds.fd[1], sizeof(abi::WakePage), PROT_READ | PROT_WRITE));
  context->status =
      static_cast<abi::StatusPage*>(MapShared(fds.fd[2], sizeof(abi::StatusPage), PROT_READ));
  if (context->page == nullptr || context->wake == nullptr || context->status == nullptr) {
    return ENOMEM;
  }
  context->channel.SetStatusPage(context->status);
  context->channel.SetContextPage(context->page);
  // libibverbs owns the descriptor from here on.
  context->verbs.context.async_fd = fds.Take(3);
  if (context->verbs.context.async_fd < 0) return EPROTO;
  context->verbs.context.num_comp_vectors =
      reply.attributes.num_comp_vectors > 0 ? static_cast<int>(reply.attributes.num_comp_vectors)
                                            : 1;
  FillReserve(&context->reserve, context->verbs.context.cmd_fd);
  abi::CommandFdContent content;
  const int cmd_fd = context->verbs.context.cmd_fd;
  if (pread(cmd_fd, &content, sizeof(content), 0) != sizeof(content) ||
      content.magic != abi::kCommandFdMagic || content.device_index != device->index) {
    return ENODEV;
  }
  if (opening != Opening::kOwn) {
    context->cookie = content.cookie;
    return opening == Opening::kImport ? PassAsyncFd(context) : 0;
  }
  // Makes the command descriptor name this context, for good.
  content.cookie = context->cookie = reply.cookie;
  if (pwrite(cmd_fd, &content, sizeof(content), 0) != sizeof(content)) return errno;
  // A seal that is missing endangers nobody but this process.
  fcntl(cmd_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL);
  return 0;
}

int ConnectToDaemon() {
  SocketPath paths[kMaxSocketPaths];
  const int count = FindSocketPaths(paths);
  int fd = -ENODEV;
  for (int i = 0; i < count; ++i) {
    fd = ConnectTo(paths[i]);
    if (fd >= 0) break;
  }
  return fd;
}

int OpenContext(Context* context, const Device* device, Opening opening) {
  context->fork_generation = g_fork_generation.load(std::memory_order_relaxed);
  context->on_valgrind = RunningOnValgrind();
  const char* allow = getenv("RDMAV_ALLOW_DISASSOC_DESTROY");
  context->allow_disassociate_destroy = allow != nullptr;
  void* table = mmap(nullptr, sizeof(QpTableEntry) * abi::kMaxQpSlots, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (table == MAP_FAILED) return ENOMEM;
  context->qp_table = static_cast<QpTableEntry*>(table);
  table = mmap(nullptr, sizeof(SrqTableEntry) * abi::kMaxSrqSlots, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (table == MAP_FAILED) return ENOMEM;
  context->srq_table = static_cast<SrqTableEntry*>(table);

  const int socket_fd = ConnectToDaemon();
  if (socket_fd < 0) return -socket_fd;
  int error = context->channel.Init(socket_fd);
  if (error != 0) {
    close(socket_fd);
    return error;
  }
  context->channel_open = true;

  abi::Hello hello = {};
  hello.magic = abi::kMagic;
  hello.kind = abi::kClientDevice;
  hello.version_min = abi::kVersionMin;
  hello.version_max = abi::kVersionMax;
  hello.device_index = device->index;
  hello.sizes = abi::kAbiSizes;
  memcpy(hello.comm, program_invocation_short_name,
         strnlen(program_invocation_short_name, sizeof(hello.comm)));
  error = MapGuardPage(context, &hello);
  if (error != 0) return error;
  // Without it (no /proc, not dumpable) the device tries its other ways.
  const int opened =
      static_cast<int>(syscall(SYS_openat, AT_FDCWD, "/proc/self/mem", O_RDWR | O_CLOEXEC));
  const int mem_fd = KeepOffStandardFds(opened);
  error = SayHello(context, device, mem_fd, hello, opening);
  if (mem_fd >= 0) close(mem_fd);
  return error;
}

void ReleaseContext(Context* context) {
  if (context->channel_open) context->channel.Close();
  FreeReserve(&context->reserve, context->verbs.context.cmd_fd);
  // A forked child does not have the page, and may have something else there.
  if (context->guard_page != nullptr && context->guard_owner == getpid()) {
    munmap(context->guard_page, static_cast<size_t>(sysconf(_SC_PAGESIZE)));
  }
  for (uint32_t i = 0; i < context->segment_count; ++i) {
    if (context->segments[i].base != nullptr) {
      munmap(context->segments[i].base, context->segments[i].bytes);
    }
  }
  free(context->segments);
  if (context->qp_table != nullptr) {
    munmap(context->qp_table, sizeof(QpTableEntry) * abi::kMaxQpSlots);
  }
  if (context->srq_table != nullptr) {
    munmap(context->srq_table, sizeof(SrqTableEntry) * abi::kMaxSrqSlots);
  }
  if (context->page != nullptr) munmap(context->page, sizeof(abi::ContextPage));
  if (context->wake != nullptr) munmap(context->wake, sizeof(abi::WakePage));
  if (context->status != nullptr) {
    munmap(const_cast<abi::StatusPage*>(context->status), sizeof(abi::StatusPage));
  }
  verbs_uninit_context(&context->verbs);
  free(context);
}

void FreeContext(ibv_context* context) { ReleaseContext(ToContext(context)); }

verbs_context* OpenDevice(ibv_device* ibv, int cmd_fd, Opening opening) {
  const Device* device = Downcast<Device>(ibv);
  Context* context = static_cast<Context*>(_verbs_init_and_alloc_context(
      ibv, cmd_fd, sizeof(Context), reinterpret_cast<verbs_context*>(offsetof(Context, verbs)), 0));
  if (context == nullptr) return nullptr;
  const int error = OpenContext(context, device, opening);
  if (error != 0) {
    ReleaseContext(context);
    errno = error;
    return nullptr;
  }
  VerbsContextOps ops = {};
  ops.advise_mr = AdviseMr;
  ops.alloc_dm = AllocDm;
  ops.alloc_mw = AllocMw;
  ops.alloc_null_mr = AllocNullMr;
  ops.alloc_parent_domain = AllocParentDomain;
  ops.alloc_pd = AllocPd;
  ops.attach_counters_point_flow = AttachCountersPointFlow;
  ops.attach_mcast = AttachMcast;
  ops.close_xrcd = CloseXrcd;
  ops.alloc_td = AllocTd;
  ops.bind_mw = BindMw;
  ops.create_ah = CreateAh;
  ops.create_counters = CreateCounters;
  ops.create_cq = CreateCq;
  ops.create_cq_ex = CreateCqEx;
  ops.create_flow = CreateFlow;
  ops.create_qp = CreateQp;
  ops.create_qp_ex = CreateQpEx;
  ops.create_rwq_ind_table = CreateRwqIndTable;
  ops.create_srq = CreateSrq;
  ops.create_srq_ex = CreateSrqEx;
  ops.create_wq = CreateWq;
  ops.dealloc_mw = DeallocMw;
  ops.dealloc_pd = DeallocPd;
  ops.dealloc_td = DeallocTd;
  ops.dereg_mr = DeregMr;
  ops.destroy_ah = DestroyAh;
  ops.destroy_counters = DestroyCounters;
  ops.destroy_cq = DestroyCq;
  ops.destroy_flow = DestroyFlow;
  ops.destroy_qp = DestroyQp;
  ops.destroy_rwq_ind_table = DestroyRwqIndTable;
  ops.destroy_srq = DestroySrq;
  ops.destroy_wq = DestroyWq;
  ops.detach_mcast = DetachMcast;
  ops.free_context = FreeContext;
  ops.get_srq_num = GetSrqNum;
  ops.free_dm = FreeDm;
  ops.import_dm = ImportDm;
  ops.import_mr = ImportMr;
  ops.import_pd = ImportPd;
  ops.modify_cq = ModifyCq;
  ops.modify_qp = ModifyQp;
  ops.modify_qp_rate_limit = ModifyQpRateLimit;
  ops.modify_srq = ModifySrq;
  ops.modify_wq = ModifyWq;
  ops.open_qp = OpenQp;
  ops.open_xrcd = OpenXrcd;
  ops.poll_cq = PollCq;
  ops.post_recv = PostRecv;
  ops.post_send = PostSend;
  ops.post_srq_recv = PostSrqRecv;
  ops.query_device_ex = QueryDevice;
  ops.query_port = QueryPort;
  ops.query_qp = QueryQp;
  ops.query_srq = QuerySrq;
  ops.query_qp_data_in_order = QueryQpDataInOrder;
  ops.query_rt_values = QueryRtValues;
  ops.read_counters = ReadCounters;
  ops.reg_dm_mr = RegDmMr;
  ops.reg_dmabuf_mr = RegDmabufMr;
  ops.reg_mr = RegMr;
  ops.req_notify_cq = ReqNotifyCq;
  ops.rereg_mr = ReregMr;
  ops.resize_cq = ResizeCq;
  ops.unimport_dm = UnimportDm;
  ops.unimport_mr = UnimportMr;
  ops.unimport_pd = UnimportPd;
  verbs_set_ops(&context->verbs, &ops);
  return &context->verbs;
}

verbs_context* AllocContext(ibv_device* device, int cmd_fd, void*) {
  return OpenDevice(device, cmd_fd, Opening::kOwn);
}

verbs_context* ImportContext(ibv_device* device, int cmd_fd) {
  return OpenDevice(device, cmd_fd, Opening::kImport);
}

// By the file name (libibverbs.so.1.14.RELEASE.PATCH).
int ReadLibraryRelease() {
  Dl_info info;
  char path[4096];
  if (dladdr(reinterpret_cast<void*>(&verbs_register_driver_34), &info) == 0 ||
      realpath(info.dli_fname, path) == nullptr) {
    return 0;
  }
  const char* name = strrchr(path, '/');
  name = name == nullptr ? path : name + 1;
  int major = 0;
  int minor = 0;
  int release = 0;
  return sscanf(name, "libibverbs.so.%d.%d.%d", &major, &minor, &release) == 3 ? release : 0;
}

constexpr VerbsDeviceOps kDeviceOps = {
    .name = kDeviceName,
    .match_min_abi_version = 0,
    .match_max_abi_version = 0x7fffffff,
    .match_table = nullptr,
    .static_providers = nullptr,
    .match_device = MatchDevice,
    .alloc_context = AllocContext,
    .import_context = ImportContext,
    .alloc_device = AllocDevice,
    .uninit_device = UninitDevice,
};

int g_release = 0;

pthread_mutex_t g_children_mutex = PTHREAD_MUTEX_INITIALIZER;
Context* g_children = nullptr;  // contexts of this forked process, by next_child

void InForkedChild() {
  g_fork_generation.fetch_add(1, std::memory_order_relaxed);
  // Another thread of the parent may have held it.
  g_children_mutex = PTHREAD_MUTEX_INITIALIZER;
  g_children = nullptr;
}

__attribute__((constructor)) void Register() {
  const int release = g_release = ReadLibraryRelease();
  if (release != 0 && release < kFirstRelease) {
    char text[160];
    snprintf(text, sizeof(text),
             "verbena: libibverbs of rdma-core %d is too old, %d or newer is needed\n", release,
             kFirstRelease);
    Say(text);
    return;
  }
  pthread_atfork(nullptr, nullptr, InForkedChild);
  verbs_register_driver_34(&kDeviceOps);
}

}  // namespace

int LibraryRelease() { return g_release; }

Context* ContextOfThisProcess(Context* context) {
  const uint32_t generation = g_fork_generation.load(std::memory_order_relaxed);
  if (context->fork_generation == generation) return context;
  pthread_mutex_lock(&g_children_mutex);
  Context* own = g_children;
  while (own != nullptr && own->parent != context) own = own->next_child;
  int error = 0;
  if (own == nullptr) {
    own = static_cast<Context*>(calloc(1, sizeof(Context)));
    if (own == nullptr) {
      error = ENOMEM;
    } else {
      own->verbs.context.cmd_fd = context->verbs.context.cmd_fd;
      error = OpenContext(own, Downcast<Device>(context->verbs.context.device), Opening::kForChild);
      if (error == 0) {
        own->parent = context;
        own->next_child = g_children;
        g_children = own;
      } else {
        // What it has opened goes with the process; that happens once at most, as
        // applications do not go on like this.
        own = nullptr;
      }
    }
  }
  pthread_mutex_unlock(&g_children_mutex);
  if (error != 0) errno = error;
  return own;
}

// The connection breaks a moment before the death of the device is announced; without that moment
// the object would be left for good.
int DestroyResult(const Context* context, int error) {
  if (error != EIO || !context->allow_disassociate_destroy ||
      context->fork_generation != g_fork_generation.load(std::memory_order_relaxed)) {
    return error;
  }
  constexpr int kLongestWaitMs = 2000;
  for (int waited_ms = 0; !context->channel.LookForHangUp() && waited_ms < kLongestWaitMs;
       ++waited_ms) {
    usleep(1000);
  }
  return context->DeviceDead() ? 0 : error;
}

namespace {

// Descriptor of a segment that is not mapped yet, or -errno: the one of the
// reply or, where that or the mapping of it was not possible, another one.
int OpenSegment(Context* context, const abi::RingLocation& location, ReplyFds* fds, int* fd_index) {
  if (location.new_segment != 0) {
    const int fd = fds->Take((*fd_index)++);
    if (fd >= 0) return fd;
  }
  abi::HandleRequest request = {};
  abi::HandleReply reply = {};
  request.header.op = abi::kCmdGetSegment;
  request.handle = location.segment;
  ReplyFds again;
  const int error = context->channel.Execute(&request, &reply, -1, &again);
  if (error != 0) return -error;
  const int fd = again.Take(0);
  return fd >= 0 ? fd : again.lost ? -EMFILE : -EIO;
}

}  // namespace

int MapRing(Context* context, const abi::RingLocation& location, ReplyFds* fds, int* fd_index,
            uint32_t min_stride, Ring* ring) {
  *ring = {};
  if (location.slots == 0) return 0;
  const uint64_t ring_bytes = static_cast<uint64_t>(location.slots) * location.stride;
  if ((location.slots & (location.slots - 1)) != 0 || location.stride < min_stride ||
      location.offset % abi::kBlockBytes != 0 || location.stride % 8 != 0 ||
      location.offset > location.segment_bytes ||
      ring_bytes > location.segment_bytes - location.offset || location.segment >= kMaxSegments) {
    return EIO;
  }
  if (location.segment >= context->segment_count) {
    const uint32_t count = location.segment + 1;
    void* grown = realloc(context->segments, count * sizeof(Segment));
    if (grown == nullptr) return ENOMEM;
    context->segments = static_cast<Segment*>(grown);
    memset(context->segments + context->segment_count, 0,
           (count - context->segment_count) * sizeof(Segment));
    context->segment_count = count;
  }
  Segment& segment = context->segments[location.segment];
  if (segment.base != nullptr && location.new_segment != 0) return EIO;
  if (segment.base == nullptr) {
    const int fd = OpenSegment(context, location, fds, fd_index);
    if (fd < 0) return -fd;
    void* mapped = MapShared(fd, location.segment_bytes, PROT_READ | PROT_WRITE);
    close(fd);
    if (mapped == nullptr) return ENOMEM;
    segment = {static_cast<uint8_t*>(mapped), location.segment_bytes};
  }
  if (segment.bytes != location.segment_bytes) return EIO;
  *ring = {segment.base + location.offset, location.slots, location.stride};
  return 0;
}

}  // namespace verbena::provider
