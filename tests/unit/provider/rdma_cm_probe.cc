// SPDX-License-Identifier: Apache-2.0
//
// A program that knows nothing of Verbena, run with LD_PRELOAD by
// rdma_cm_file_test: uses /dev/infiniband/rdma_cm as librdmacm does, and every
// way to wait for it. The connection manager behind it queues as many events as
// a LISTEN's backlog says. Prints one line per fact. Arguments: scenario.
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_user_cm.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

// close_in_recv.cc
extern "C" void ActInNextRecv(int descriptor, int replacement, bool before);

namespace {

constexpr char kDevice[] = "/dev/infiniband/rdma_cm";

void Say(const char* what, bool good) { printf("%s %s\n", good ? "good" : "BAD", what); }

template <typename Payload>
struct Message {
  rdma_ucm_cmd_hdr header;
  Payload payload;
};

// write() of a command: what it returned, or -errno.
template <typename Payload>
ssize_t Command(int fd, uint32_t command, const Payload& payload, uint16_t out = 0,
                size_t extra = 0) {
  char bytes[sizeof(rdma_ucm_cmd_hdr) + sizeof(Payload) + 64] = {};
  const rdma_ucm_cmd_hdr header = {command, sizeof(payload), out};
  memcpy(bytes, &header, sizeof(header));
  memcpy(bytes + sizeof(header), &payload, sizeof(payload));
  const ssize_t result = write(fd, bytes, sizeof(header) + sizeof(payload) + extra);
  return result < 0 ? -errno : result;
}

template <typename T>
bool Full(ssize_t result) {
  return result == static_cast<ssize_t>(sizeof(rdma_ucm_cmd_hdr) + sizeof(T));
}

uint32_t CreateId(int fd, uint64_t uid = 0x1234567890) {
  rdma_ucm_create_id_resp response = {};
  rdma_ucm_create_id create = {};
  create.uid = uid;
  create.response = reinterpret_cast<uintptr_t>(&response);
  create.ps = 0x106;
  const ssize_t result = Command(fd, RDMA_USER_CM_CMD_CREATE_ID, create, sizeof(response));
  return Full<rdma_ucm_create_id>(result) ? response.id : 0;
}

// Makes `count` events.
bool Events(int fd, uint32_t id, int count) {
  const rdma_ucm_listen listen = {id, static_cast<uint32_t>(count)};
  return Full<rdma_ucm_listen>(Command(fd, RDMA_USER_CM_CMD_LISTEN, listen));
}

rdma_ucm_event_resp g_event;

// 0 or errno; the event is in g_event.
int GetEvent(int fd, uint16_t out = sizeof(g_event)) {
  rdma_ucm_get_event get = {};
  get.response = reinterpret_cast<uintptr_t>(&g_event);
  const ssize_t result = Command(fd, RDMA_USER_CM_CMD_GET_EVENT, get, out);
  return Full<rdma_ucm_get_event>(result) ? 0 : result < 0 ? static_cast<int>(-result) : -1;
}

// events_reported, or -errno.
int DestroyId(int fd, uint32_t id) {
  rdma_ucm_destroy_id_resp response = {};
  rdma_ucm_destroy_id destroy = {};
  destroy.response = reinterpret_cast<uintptr_t>(&response);
  destroy.id = id;
  const ssize_t result = Command(fd, RDMA_USER_CM_CMD_DESTROY_ID, destroy, sizeof(response));
  return Full<rdma_ucm_destroy_id>(result) ? static_cast<int>(response.events_reported)
                                           : static_cast<int>(result);
}

// How many files the connection manager has open; the fake's answer to QUERY.
uint32_t OpenFiles(int fd) {
  rdma_ucm_query_path_resp response = {};
  rdma_ucm_query query = {};
  query.response = reinterpret_cast<uintptr_t>(&response);
  Command(fd, RDMA_USER_CM_CMD_QUERY, query, sizeof(response));
  return response.num_paths;
}

bool OpenFilesBecome(int fd, uint32_t count) {
  for (int i = 0; i < 5000 && OpenFiles(fd) != count; ++i) usleep(1000);
  return OpenFiles(fd) == count;
}

bool Readable(int fd) {
  pollfd descriptor = {fd, POLLIN, 0};
  return poll(&descriptor, 1, 0) == 1 && descriptor.revents == POLLIN;
}

int Open(int flags = O_RDWR | O_CLOEXEC) { return open(kDevice, flags); }

void Opening() {
  const int fd = Open();
  Say("open", fd > 2);
  Say("close on exec", (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
  Say("blocking", (fcntl(fd, F_GETFL) & (O_ACCMODE | O_NONBLOCK)) == O_RDWR);
  const int other = open(kDevice, O_RDWR | O_NONBLOCK);
  Say("inheritable", fcntl(other, F_GETFD) == 0);
  Say("non-blocking", (fcntl(other, F_GETFL) & O_NONBLOCK) != 0);
  struct stat status = {};
  Say("fstat",
      fstat(fd, &status) == 0 && S_ISCHR(status.st_mode) && status.st_rdev == makedev(10, 122));
  struct stat by_path = {};
  Say("stat", stat(kDevice, &by_path) == 0 && S_ISCHR(by_path.st_mode) &&
                  by_path.st_rdev == status.st_rdev);
  struct statx extended = {};
  Say("statx", statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &extended) == 0 &&
                   S_ISCHR(extended.stx_mode) && extended.stx_rdev_minor == 122);
  Say("access", access(kDevice, R_OK | W_OK) == 0);
  Say("no folder", open(kDevice, O_RDONLY | O_DIRECTORY) == -1 && errno == ENOTDIR);
  char version[8] = {};
  const int file = open("/sys/class/misc/rdma_cm/abi_version", O_RDONLY);
  Say("abi version", read(file, version, sizeof(version)) == 2 && strcmp(version, "4\n") == 0);
  int pair[2];
  Say("other sockets stay sockets", pipe(pair) == 0 && fstat(pair[0], &status) == 0 &&
                                        S_ISFIFO(status.st_mode) && write(pair[1], "x", 1) == 1);
}

void Commands() {
  const int fd = Open();
  const uint32_t id = CreateId(fd);
  Say("create", id != 0);
  char nothing[4] = {};
  Say("shorter than a header", write(fd, nothing, 4) == -1 && errno == EINVAL);
  const rdma_ucm_cmd_hdr lying = {RDMA_USER_CM_CMD_LISTEN, 100, 0};
  Say("shorter than it says", write(fd, &lying, sizeof(lying)) == -1 && errno == EINVAL);
  Say("unknown command", Command(fd, 99, rdma_ucm_listen{}) == -EINVAL);
  Say("unknown id", Command(fd, RDMA_USER_CM_CMD_LISTEN, rdma_ucm_listen{id + 1, 0}) == -ENOENT);
  Say("more bytes than it says",
      Command(fd, RDMA_USER_CM_CMD_LISTEN, rdma_ucm_listen{id, 0}, 0, 5) ==
          sizeof(rdma_ucm_cmd_hdr) + sizeof(rdma_ucm_listen) + 5);
  rdma_ucm_create_id bad = {};
  bad.response = 1;
  Say("response nowhere", Command(fd, RDMA_USER_CM_CMD_CREATE_ID, bad, 4) == -EFAULT);
  const char* volatile nowhere = nullptr;
  Say("command nowhere", write(fd, nowhere, 32) == -1 && errno == EFAULT);
  rdma_ucm_set_option option = {};
  const char value[] = "v";
  option.optval = reinterpret_cast<uintptr_t>(value);
  option.optlen = sizeof(value);
  option.id = id;
  Say("option", Full<rdma_ucm_set_option>(Command(fd, RDMA_USER_CM_CMD_SET_OPTION, option)));
  option.optval = 1;
  Say("option nowhere", Command(fd, RDMA_USER_CM_CMD_SET_OPTION, option) == -EFAULT);
  option.optlen = 1 << 30;
  Say("huge option", Command(fd, RDMA_USER_CM_CMD_SET_OPTION, option) == -EINVAL);
  const int other = Open();
  Say("ids belong to their file", DestroyId(other, id) == -ENOENT);
  Say("destroy", DestroyId(fd, id) == 0);
  Say("destroyed", DestroyId(fd, id) == -ENOENT);
}

void Polling() {
  const int fd = Open();
  const uint32_t id = CreateId(fd);
  const int level = epoll_create1(0);
  epoll_event interest = {EPOLLIN, {.u64 = 7}};
  epoll_event got = {};
  Say("epoll_ctl", epoll_ctl(level, EPOLL_CTL_ADD, fd, &interest) == 0);
  Say("nothing yet", !Readable(fd) && epoll_wait(level, &got, 1, 0) == 0);
  Say("two events", Events(fd, id, 2));
  for (int left = 2; left > 0; --left) {
    Say("poll", Readable(fd));
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    timeval no_time = {};
    Say("select", select(fd + 1, &set, nullptr, nullptr, &no_time) == 1 && FD_ISSET(fd, &set));
    pollfd descriptor = {fd, POLLIN, 0};
    const timespec none = {};
    Say("ppoll", ppoll(&descriptor, 1, &none, nullptr) == 1);
    Say("epoll level", epoll_wait(level, &got, 1, 0) == 1 && got.data.u64 == 7);
    Say("get", GetEvent(fd) == 0 && g_event.id == id && g_event.uid == 0x1234567890);
  }
  Say("none is left", !Readable(fd) && epoll_wait(level, &got, 1, 0) == 0);
  std::thread later([fd, id] {
    usleep(50000);
    Events(fd, id, 1);
  });
  pollfd descriptor = {fd, POLLIN, 0};
  Say("poll waits", poll(&descriptor, 1, 10000) == 1 && descriptor.revents == POLLIN);
  later.join();
  Say("commands do not make it readable", GetEvent(fd) == 0 && CreateId(fd) != 0 && !Readable(fd));
}

void Edge() {
  const int fd = Open(O_RDWR | O_NONBLOCK);
  const uint32_t id = CreateId(fd);
  const int edge = epoll_create1(0);
  epoll_event interest = {EPOLLIN | EPOLLET, {.u64 = 7}};
  epoll_event got = {};
  epoll_ctl(edge, EPOLL_CTL_ADD, fd, &interest);
  Say("no edge", epoll_wait(edge, &got, 1, 0) == 0);
  Events(fd, id, 1);
  Say("an edge", epoll_wait(edge, &got, 1, 1000) == 1);
  Say("once", epoll_wait(edge, &got, 1, 0) == 0);
  Events(fd, id, 1);
  Say("an edge of the second event although the first is unread",
      epoll_wait(edge, &got, 1, 1000) == 1);
  Say("drained", GetEvent(fd) == 0 && GetEvent(fd) == 0 && GetEvent(fd) == EAGAIN);
  Say("no edge of commands", CreateId(fd) != 0 && epoll_wait(edge, &got, 1, 0) == 0);
  Events(fd, id, 1);
  Say("an edge again", epoll_wait(edge, &got, 1, 1000) == 1);
}

void NonBlocking() {
  const int fd = Open();
  const uint32_t id = CreateId(fd);
  Say("set", fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0);
  Say("EAGAIN", GetEvent(fd) == EAGAIN);
  Events(fd, id, 1);
  Say("an event", GetEvent(fd) == 0);
  Say("EAGAIN again", GetEvent(fd) == EAGAIN);
  Say("cleared", fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK) == 0);
  std::thread later([fd, id] {
    usleep(50000);
    Events(fd, id, 1);
  });
  Say("waits", GetEvent(fd) == 0);
  later.join();
  Say("too little room", Events(fd, id, 1) && GetEvent(fd, 100) == ENOSPC && Readable(fd));
  memset(&g_event, 0xee, sizeof(g_event));
  Say("an old library's room", GetEvent(fd, 324) == 0 && g_event.id == id &&
                                   reinterpret_cast<char*>(&g_event)[324] == '\xee');
}

void Duplicates() {
  const int fd = Open();
  const int witness = Open();
  const uint32_t id = CreateId(fd);
  Say("two files", OpenFiles(witness) == 2);
  const int one = dup(fd);
  const int two = dup2(fd, 50);
  const int three = dup3(fd, 51, O_CLOEXEC);
  const int four = fcntl(fd, F_DUPFD_CLOEXEC, 60);
  Say("all made", one > 2 && two == 50 && three == 51 && four >= 60);
  Say("events through one", Events(one, id, 1) && Readable(two));
  Say("events through another", GetEvent(three) == 0 && !Readable(fd));
  struct stat status = {};
  Say("a device", fstat(two, &status) == 0 && S_ISCHR(status.st_mode));
  close(fd);
  close(one);
  close(two);
  close(three);
  Say("still open", DestroyId(four, id) == 1 && OpenFiles(witness) == 2);
  close(four);
  Say("closed with the last", OpenFilesBecome(witness, 1));
  const int replaced = Open();
  Say("opened", OpenFiles(witness) == 2);
  Say("dup2 over it closes it", dup2(STDOUT_FILENO, replaced) == replaced &&
                                    OpenFilesBecome(witness, 1) && write(replaced, "", 0) == 0);
}

void Forking() {
  const int fd = Open();
  const int witness = Open();
  const uint32_t id = CreateId(fd);
  int hold[2];
  if (pipe(hold) != 0) return;
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    close(hold[1]);
    char byte;
    // Until the parent has closed its copy.
    const bool good = read(hold[0], &byte, 1) == 0 && Events(fd, id, 1) && GetEvent(fd) == 0 &&
                      g_event.id == id && CreateId(fd) != 0;
    _exit(good ? 0 : 1);
  }
  close(fd);
  Say("the child keeps it open", OpenFiles(witness) == 2);
  close(hold[1]);
  int status = -1;
  Say("the child uses it", waitpid(child, &status, 0) == child && status == 0);
  Say("gone with the child", OpenFilesBecome(witness, 1));
}

void Killed() {
  const int witness = Open();
  const pid_t child = fork();
  if (child == 0) {
    const int fd = Open();
    CreateId(fd);
    GetEvent(fd);
    _exit(1);
  }
  Say("opened", OpenFilesBecome(witness, 2));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  Say("closed by its death", OpenFilesBecome(witness, 1));
}

void Executing() {
  const int fd = Open(O_RDWR);
  const uint32_t id = CreateId(fd);
  char number[16];
  char id_text[16];
  snprintf(number, sizeof(number), "%d", fd);
  snprintf(id_text, sizeof(id_text), "%u", id);
  fflush(stdout);
  execl("/proc/self/exe", "probe", "inherited", number, id_text, static_cast<char*>(nullptr));
}

void Inherited(int fd, uint32_t id) {
  struct stat status = {};
  Say("inherited device", fstat(fd, &status) == 0 && S_ISCHR(status.st_mode));
  Say("inherited id", Events(fd, id, 1) && GetEvent(fd) == 0 && DestroyId(fd, id) == 1);
}

int g_alarms;
void OnAlarm(int) { ++g_alarms; }

void Signals() {
  const int fd = Open();
  const uint32_t id = CreateId(fd);
  struct sigaction action = {};
  action.sa_handler = OnAlarm;
  sigaction(SIGUSR1, &action, nullptr);
  const pthread_t self = pthread_self();
  std::thread first([self] {
    usleep(50000);
    pthread_kill(self, SIGUSR1);
  });
  Say("EINTR", GetEvent(fd) == EINTR && g_alarms == 1);
  first.join();
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
  std::thread second([self, fd, id] {
    usleep(50000);
    pthread_kill(self, SIGUSR1);
    usleep(50000);
    Events(fd, id, 1);
  });
  Say("restarted", GetEvent(fd) == 0 && g_alarms == 2);
  second.join();
  action.sa_flags = 0;
  sigaction(SIGUSR1, &action, nullptr);
  bool stop = false;
  std::thread shower([&] {
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
      pthread_kill(self, SIGUSR1);
      usleep(200);
    }
  });
  bool good = true;
  for (int i = 0; i < 300; ++i) good &= DestroyId(fd, CreateId(fd)) == 0;
  __atomic_store_n(&stop, true, __ATOMIC_RELAXED);
  shower.join();
  Say("commands are not interrupted", good);
}

void* WaitForEvent(void* fd) {
  GetEvent(*static_cast<int*>(fd));
  return nullptr;
}

int Descriptors() {
  int count = 0;
  for (int fd = 0; fd < 200; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

void Cancelling() {
  int fd = Open();
  const int before = Descriptors();
  const uint32_t id = CreateId(fd);
  for (int i = 0; i < 20; ++i) {
    pthread_t waiter;
    pthread_create(&waiter, nullptr, WaitForEvent, &fd);
    if (i % 2 == 0) usleep(5000);
    pthread_cancel(waiter);
    void* result = nullptr;
    pthread_join(waiter, &result);
    if (result != PTHREAD_CANCELED) Say("cancelled", false);
  }
  Say("usable afterwards", Events(fd, id, 1) && Readable(fd) && GetEvent(fd) == 0);
  Say("no descriptor is left over", Descriptors() == before);
}

// Another thread closes the file, or gives its number to another one, while write() is on its way.
void Closing() {
  int other[2];
  socketpair(AF_UNIX, SOCK_STREAM, 0, other);
  for (const bool before : {true, false}) {
    for (const int replacement : {-1, other[0]}) {
      int fd = Open();
      // There is an event, or recv() would wait, as it should.
      Events(fd, CreateId(fd), 1);
      ActInNextRecv(fd, replacement, before);
      if (before && replacement >= 0) send(other[1], "x", 1, 0);
      pthread_t waiter;
      pthread_create(&waiter, nullptr, WaitForEvent, &fd);
      timespec end;
      clock_gettime(CLOCK_REALTIME, &end);
      end.tv_nsec += 300 * 1000 * 1000;
      end.tv_sec += end.tv_nsec / 1000000000;
      end.tv_nsec %= 1000000000;
      void* result = nullptr;
      Say("waits on", pthread_timedjoin_np(waiter, &result, &end) == ETIMEDOUT);
      pthread_cancel(waiter);
      pthread_join(waiter, &result);
      Say("cancelled", result == PTHREAD_CANCELED);
      char byte;
      Say("nothing goes to another file", recv(other[1], &byte, 1, MSG_DONTWAIT) < 0);
      if (replacement >= 0) close(fd);
    }
  }
}

void Threads() {
  const int fd = Open();
  const uint32_t id = CreateId(fd);
  int received = 0;
  std::thread waiters[4];
  for (std::thread& waiter : waiters) {
    waiter = std::thread([fd, &received] {
      for (int i = 0; i < 50; ++i) {
        rdma_ucm_event_resp event;
        rdma_ucm_get_event get = {};
        get.response = reinterpret_cast<uintptr_t>(&event);
        if (Command(fd, RDMA_USER_CM_CMD_GET_EVENT, get, sizeof(event)) > 0) {
          __atomic_fetch_add(&received, 1, __ATOMIC_RELAXED);
        }
      }
    });
  }
  usleep(20000);
  bool good = true;
  for (int i = 0; i < 100; ++i) {
    good &= Events(fd, id, 2);
    good &= DestroyId(fd, CreateId(fd)) == 0;
  }
  Say("commands while others wait", good);
  for (std::thread& waiter : waiters) waiter.join();
  Say("each event once", received == 200 && !Readable(fd));
}

void Destroying() {
  const int fd = Open(O_RDWR | O_NONBLOCK);
  const uint32_t keep = CreateId(fd);
  const uint32_t gone = CreateId(fd);
  Events(fd, gone, 3);
  Events(fd, keep, 1);
  Say("one is read", GetEvent(fd) == 0 && g_event.id == gone);
  Say("reported", DestroyId(fd, gone) == 1);
  Say("the other's event stays", Readable(fd) && GetEvent(fd) == 0 && g_event.id == keep);
  Say("not readable", !Readable(fd) && GetEvent(fd) == EAGAIN);
  const uint32_t third = CreateId(fd);
  Events(fd, third, 5);
  Say("all dropped", DestroyId(fd, third) == 0 && !Readable(fd) && GetEvent(fd) == EAGAIN);
  Say("and one more", Events(fd, keep, 1) && Readable(fd) && GetEvent(fd) == 0 && !Readable(fd));
  Say("reported of the other", DestroyId(fd, keep) == 2);
}

// A thread waits while others destroy what it was woken for.
void DestroyingWhileWaiting() {
  const int fd = Open();
  const uint32_t keep = CreateId(fd);
  int received = 0;
  std::thread waiter([&] {
    for (int i = 0; i < 100; ++i) {
      if (GetEvent(fd) == 0 && g_event.id == keep) ++received;
      if (g_event.id != keep) --i;
    }
  });
  int reported = 0;
  for (int i = 0; i < 100; ++i) {
    const uint32_t id = CreateId(fd);
    Events(fd, id, 2);
    reported += DestroyId(fd, id);
    Events(fd, keep, 1);
  }
  waiter.join();
  Say("every event that stayed", received == 100 && reported >= 0);
  Say("no more", !Readable(fd));
}

void Migrating() {
  const int old_file = Open();
  const int new_file = Open();
  const uint32_t id = CreateId(old_file);
  const uint32_t other = CreateId(old_file);
  Events(old_file, id, 3);
  Events(old_file, other, 1);
  GetEvent(old_file);
  rdma_ucm_migrate_resp response = {};
  rdma_ucm_migrate_id migrate = {};
  migrate.response = reinterpret_cast<uintptr_t>(&response);
  migrate.id = id;
  migrate.fd = static_cast<uint32_t>(old_file);
  Say("migrate", Full<rdma_ucm_migrate_id>(
                     Command(new_file, RDMA_USER_CM_CMD_MIGRATE_ID, migrate, sizeof(response))) &&
                     response.events_reported == 1);
  Say("the events went along", Readable(new_file) && GetEvent(new_file) == 0 && g_event.id == id &&
                                   GetEvent(new_file) == 0 && !Readable(new_file));
  Say("the other's stayed",
      Readable(old_file) && GetEvent(old_file) == 0 && g_event.id == other && !Readable(old_file));
  Say("the id is the new file's",
      DestroyId(old_file, id) == -ENOENT && DestroyId(new_file, id) == 3);
  migrate.fd = STDOUT_FILENO;
  Say("not from another kind of file",
      Command(new_file, RDMA_USER_CM_CMD_MIGRATE_ID, migrate, sizeof(response)) == -EINVAL);
  migrate.fd = 999;
  Say("not from a closed one",
      Command(new_file, RDMA_USER_CM_CMD_MIGRATE_ID, migrate, sizeof(response)) == -ENOENT);
}

// More than a socket holds.
void Many() {
  const int fd = Open(O_RDWR | O_NONBLOCK);
  const uint32_t id = CreateId(fd);
  const uint32_t gone = CreateId(fd);
  Say("3000 events", Events(fd, id, 2000) && Events(fd, gone, 1000));
  bool good = true;
  for (int i = 0; i < 1000; ++i) {
    pollfd descriptor = {fd, POLLIN, 0};
    good &= poll(&descriptor, 1, 5000) == 1 && GetEvent(fd) == 0;
  }
  Say("a thousand", good);
  Say("dropped", DestroyId(fd, gone) == 0);
  int got = 0;
  pollfd descriptor = {fd, POLLIN, 0};
  while (poll(&descriptor, 1, 200) == 1 && GetEvent(fd) == 0) ++got;
  Say("the rest", got == 1000);
  Say("no more", !Readable(fd) && GetEvent(fd) == EAGAIN);
}

// What a full socket did not take comes when it has room, without being asked for.
void Room() {
  const int fd = Open();
  const uint32_t id = CreateId(fd);
  Say("5000 events", Events(fd, id, 5000));
  int got = 0;
  char token;
  pollfd descriptor = {fd, POLLIN, 0};
  while (poll(&descriptor, 1, 500) == 1 && recv(fd, &token, 1, MSG_DONTWAIT) == 1) ++got;
  Say("a token for each", got == 5000);
}

// The test ends the daemon when it reads "waiting".
void Orphaned() {
  const int fd = Open();
  const uint32_t id = CreateId(fd);
  std::thread waiter([fd] { Say("waiter", GetEvent(fd) == EIO); });
  puts("waiting");
  fflush(stdout);
  waiter.join();
  pollfd descriptor = {fd, POLLIN, 0};
  Say("poll", poll(&descriptor, 1, 10000) == 1);
  Say("get", GetEvent(fd) == EIO);
  Say("command", DestroyId(fd, id) == -EIO);
  Say("open", Open() == -1 && (errno == ENODEV || errno == ENOENT));
}

// Without an interface of its own.
void Refused() {
  Say("open", Open() == -1);
  printf("errno %d\n", errno);
}

}  // namespace

int main(int argc, char** argv) {
  alarm(60);
  const char* scenario = argc > 1 ? argv[1] : "";
  if (strcmp(scenario, "inherited") == 0 && argc == 4) {
    Inherited(atoi(argv[2]), static_cast<uint32_t>(strtoul(argv[3], nullptr, 10)));
    puts("end");
    return 0;
  }
  struct {
    const char* name;
    void (*run)();
  } const scenarios[] = {
      {"opening", Opening},
      {"commands", Commands},
      {"polling", Polling},
      {"edge", Edge},
      {"non_blocking", NonBlocking},
      {"duplicates", Duplicates},
      {"forking", Forking},
      {"killed", Killed},
      {"executing", Executing},
      {"signals", Signals},
      {"cancelling", Cancelling},
      {"closing", Closing},
      {"threads", Threads},
      {"destroying", Destroying},
      {"destroying_while_waiting", DestroyingWhileWaiting},
      {"migrating", Migrating},
      {"many", Many},
      {"room", Room},
      {"orphaned", Orphaned},
      {"refused", Refused},
  };
  for (const auto& each : scenarios) {
    if (strcmp(each.name, scenario) == 0) {
      each.run();
      puts("end");
      return 0;
    }
  }
  return 2;
}
