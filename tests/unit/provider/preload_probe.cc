// SPDX-License-Identifier: Apache-2.0
//
// A program that knows nothing of Verbena, run with LD_PRELOAD by the preload
// test: looks at RDMA's files with every function that takes a path and prints
// what it found, one line each. Arguments: scenario.
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

extern "C" {
int __open_2(const char*, int);
int __open64_2(const char*, int);
int __openat_2(int, const char*, int);
int __openat64_2(int, const char*, int);
char* __realpath_chk(const char*, char*, size_t);
ssize_t __readlink_chk(const char*, char*, size_t, size_t);
ssize_t __readlinkat_chk(int, const char*, char*, size_t, size_t);
}

namespace {

constexpr char kFile[] = "/sys/class/infiniband/verbena0/node_type";
constexpr char kDevice[] = "/dev/infiniband/uverbs0";
constexpr char kFolder[] = "/sys/class/infiniband";

void Say(const char* what, bool good) { printf("%s %s\n", good ? "good" : "BAD", what); }

void SayText(const char* what, const char* found, const char* expected) {
  const bool good = found != nullptr && strcmp(found, expected) == 0;
  printf("%s %s %s\n", good ? "good" : "BAD", what, found == nullptr ? strerror(errno) : found);
}

// True if the descriptor reads the content of kFile; closes it.
bool IsFile(int fd) {
  char text[16] = {};
  const bool good = fd >= 0 && read(fd, text, sizeof(text) - 1) == 6 && !strcmp(text, "1: CA\n");
  close(fd);
  return good;
}

bool IsFile(FILE* file) {
  char text[16] = {};
  const bool good = file != nullptr && fgets(text, sizeof(text), file) && !strcmp(text, "1: CA\n");
  if (file != nullptr) fclose(file);
  return good;
}

void Opens() {
  Say("open", IsFile(open(kFile, O_RDONLY)));
  Say("open64", IsFile(open64(kFile, O_RDONLY)));
  Say("openat", IsFile(openat(AT_FDCWD, kFile, O_RDONLY)));
  Say("openat64", IsFile(openat64(AT_FDCWD, kFile, O_RDONLY)));
  Say("__open_2", IsFile(__open_2(kFile, O_RDONLY)));
  Say("__open64_2", IsFile(__open64_2(kFile, O_RDONLY)));
  Say("__openat_2", IsFile(__openat_2(AT_FDCWD, kFile, O_RDONLY)));
  Say("__openat64_2", IsFile(__openat64_2(AT_FDCWD, kFile, O_RDONLY)));
  Say("fopen", IsFile(fopen(kFile, "r")));
  Say("fopen64", IsFile(fopen64(kFile, "r")));
  Say("freopen", IsFile(freopen(kFile, "r", fopen("/dev/null", "r"))));
  Say("freopen64", IsFile(freopen64(kFile, "r", fopen("/dev/null", "r"))));
  Say("slashes", IsFile(open("//sys/class//infiniband/./verbena0///node_type", O_RDONLY)));
  Say("dots", IsFile(open("/sys/class/net/../infiniband/x/../verbena0/node_type", O_RDONLY)));
  Say("relative",
      IsFile(openat(open(kFolder, O_RDONLY | O_DIRECTORY), "verbena0/node_type", O_RDONLY)));
  Say("prefix only", open("/sys/class/infiniband_other/verbena0", O_RDONLY) == -1);
  Say("missing", open("/sys/class/infiniband/qib0", O_RDONLY) == -1 && errno == ENOENT);
  const char* volatile nothing = nullptr;
  Say("null", open(nothing, O_RDONLY) == -1 && errno == EFAULT);
  Say("umask", open("/sys/class/infiniband/verbena0/new", O_CREAT | O_WRONLY, 0600) >= 0);
  struct stat status;
  Say("mode",
      stat("/sys/class/infiniband/verbena0/new", &status) == 0 && (status.st_mode & 0777) == 0600);
  Say("creat", creat("/sys/class/infiniband/verbena0/new2", 0640) >= 0 &&
                   stat("/sys/class/infiniband/verbena0/new2", &status) == 0 &&
                   (status.st_mode & 0777) == 0640);
}

int g_visited;
int Visit(const char*, const struct stat*, int) { return ++g_visited, 0; }
int Visit64(const char*, const struct stat64*, int) { return ++g_visited, 0; }
int Visitn(const char*, const struct stat*, int, FTW*) { return ++g_visited, 0; }
int Visitn64(const char*, const struct stat64*, int, FTW*) { return ++g_visited, 0; }

void Folders() {
  constexpr char kPorts[] = "/sys/class/infiniband/verbena0/ports";
  DIR* folder = opendir(kPorts);
  bool found = false;
  while (const dirent* entry = folder == nullptr ? nullptr : readdir(folder)) {
    found |= strcmp(entry->d_name, "1") == 0;
  }
  Say("opendir", found);
  dirent** names;
  dirent64** names64;
  Say("scandir", scandir(kPorts, &names, nullptr, alphasort) == 3);
  Say("scandir64", scandir64(kPorts, &names64, nullptr, alphasort64) == 3);
  Say("scandirat", scandirat(AT_FDCWD, kPorts, &names, nullptr, alphasort) == 3);
  Say("scandirat64", scandirat64(AT_FDCWD, kPorts, &names64, nullptr, alphasort64) == 3);
  glob_t matches = {};
  constexpr char kPattern[] = "/sys/class/infiniband/v*/ports/1/gids/*";
  constexpr char kMatch[] = "/sys/class/infiniband/verbena0/ports/1/gids/0";
  if (glob(kPattern, 0, nullptr, &matches) == 0) SayText("glob", matches.gl_pathv[0], kMatch);
  glob64_t matches64 = {};
  matches64.gl_offs = 2;
  if (glob64(kPattern, GLOB_DOOFFS, nullptr, &matches64) == 0) {
    SayText("glob64", matches64.gl_pathv[2], kMatch);
  }
  Say("ftw", ftw(kPorts, Visit, 4) == 0 && g_visited > 3);
  g_visited = 0;
  Say("ftw64", ftw64(kPorts, Visit64, 4) == 0 && g_visited > 3);
  g_visited = 0;
  Say("nftw", nftw(kPorts, Visitn, 4, 0) == 0 && g_visited > 3);
  g_visited = 0;
  Say("nftw64", nftw64(kPorts, Visitn64, 4, 0) == 0 && g_visited > 3);
}

template <typename Stat>
bool IsDevice(int result, const Stat& status) {
  return result == 0 && S_ISCHR(status.st_mode) && status.st_rdev == makedev(231, 192);
}

bool IsDevice(int result, const struct statx& status) {
  return result == 0 && S_ISCHR(status.stx_mode) && status.stx_rdev_major == 231 &&
         status.stx_rdev_minor == 192;
}

extern "C" {
int __xstat(int, const char*, struct stat*);
int __xstat64(int, const char*, struct stat64*);
int __lxstat(int, const char*, struct stat*);
int __lxstat64(int, const char*, struct stat64*);
int __fxstat(int, int, struct stat*);
int __fxstat64(int, int, struct stat64*);
int __fxstatat(int, int, const char*, struct stat*, int);
int __fxstatat64(int, int, const char*, struct stat64*, int);
}

void Stats() {
  struct stat s = {};
  struct stat64 t = {};
  struct statx x = {};
  const int fd = open(kDevice, O_RDWR | O_CLOEXEC);
  Say("open device", fd >= 0 && (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
  Say("stat", IsDevice(stat(kDevice, &s), s));
  Say("stat64", IsDevice(stat64(kDevice, &t), t));
  Say("lstat", IsDevice(lstat(kDevice, &s), s));
  Say("lstat64", IsDevice(lstat64(kDevice, &t), t));
  Say("fstatat", IsDevice(fstatat(AT_FDCWD, kDevice, &s, 0), s));
  Say("fstatat64", IsDevice(fstatat64(AT_FDCWD, kDevice, &t, 0), t));
  Say("statx", IsDevice(statx(AT_FDCWD, kDevice, 0, STATX_BASIC_STATS, &x), x));
  Say("__xstat", IsDevice(__xstat(1, kDevice, &s), s));
  Say("__xstat64", IsDevice(__xstat64(1, kDevice, &t), t));
  Say("__lxstat", IsDevice(__lxstat(1, kDevice, &s), s));
  Say("__lxstat64", IsDevice(__lxstat64(1, kDevice, &t), t));
  Say("__fxstatat", IsDevice(__fxstatat(1, AT_FDCWD, kDevice, &s, 0), s));
  Say("__fxstatat64", IsDevice(__fxstatat64(1, AT_FDCWD, kDevice, &t, 0), t));
  for (const int each : {fd, dup(fd)}) {
    s = {};
    t = {};
    x = {};
    Say("fstat", IsDevice(fstat(each, &s), s));
    Say("fstat64", IsDevice(fstat64(each, &t), t));
    Say("__fxstat", IsDevice(__fxstat(1, each, &s), s));
    Say("__fxstat64", IsDevice(__fxstat64(1, each, &t), t));
    Say("fstatat fd", IsDevice(fstatat(each, "", &s, AT_EMPTY_PATH), s));
    Say("statx fd", IsDevice(statx(each, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &x), x));
  }
  const int other = memfd_create("other", 0);
  char zeros[64] = {};
  Say("other memfd", write(other, zeros, 64) == 64 && fstat(other, &s) == 0 && S_ISREG(s.st_mode) &&
                         s.st_size == 64);
  Say("regular", stat(kFile, &s) == 0 && S_ISREG(s.st_mode));
  Say("no device", open("/dev/infiniband/uverbs1", O_RDWR) == -1 && errno == ENOENT);
  Say("no rdma_cm", open("/dev/infiniband/rdma_cm", O_RDWR) == -1 && errno == ENOENT);
}

void Links() {
  constexpr char kReal[] = "/sys/devices/virtual/verbena/infiniband/verbena0";
  constexpr char kLink[] = "/sys/class/infiniband/verbena0";
  constexpr char kContent[] = "../../devices/virtual/verbena/infiniband/verbena0";
  char text[PATH_MAX] = {};
  Say("access", access(kDevice, R_OK | W_OK) == 0 && access(kFile, R_OK) == 0);
  Say("access missing", access("/dev/infiniband/uverbs7", F_OK) == -1 && errno == ENOENT);
  Say("faccessat", faccessat(AT_FDCWD, kFile, R_OK, 0) == 0);
  Say("euidaccess", euidaccess(kFile, R_OK) == 0);
  Say("eaccess", eaccess(kFile, R_OK) == 0);
  SayText("realpath", realpath(kLink, text), kReal);
  SayText("realpath null", realpath(kLink, nullptr), kReal);
  SayText("__realpath_chk", __realpath_chk(kLink, text, sizeof(text)), kReal);
  SayText("canonicalize_file_name", canonicalize_file_name(kLink), kReal);
  const auto terminated = [&](ssize_t length) {
    if (length < 0) return static_cast<char*>(nullptr);
    text[length] = '\0';
    return text;
  };
  SayText("readlink", terminated(readlink(kLink, text, 100)), kContent);
  SayText("readlinkat", terminated(readlinkat(AT_FDCWD, kLink, text, 100)), kContent);
  SayText("__readlink_chk", terminated(__readlink_chk(kLink, text, 100, sizeof(text))), kContent);
  SayText("__readlinkat_chk",
          terminated(__readlinkat_chk(AT_FDCWD, kLink, text, 100, sizeof(text))), kContent);
  SayText("readlink cut", terminated(readlink(kLink, text, 5)), "../..");
  SayText("absolute link", terminated(readlink("/sys/class/infiniband/absolute", text, 100)),
          "/sys/class/infiniband/verbena0");
}

struct Ioctl {
  uint16_t length, object, method, count;
  uint64_t reserved1;
  uint32_t driver, reserved2;
  struct Attr {
    uint16_t id, len, flags, extra;
    uint64_t data;
  } attrs[3];
};
constexpr unsigned long kRequest = 0xc0181b01;

void Ioctls() {
  const int fd = open(kDevice, O_RDWR);
  Ioctl probe = {24 + 16, 0, 0, 1, 0, 0, 0, {{2, 8, 1, 0, 1}}};
  Say("probe", ioctl(fd, kRequest, &probe) == -1 && errno == ENOSPC);
  Ioctl gid = {24, 0, 6, 0, 0, 0, 0, {}};
  Say("other method", ioctl(fd, kRequest, &gid) == -1 && errno == EPROTONOSUPPORT);
  Ioctl bad = {99, 0, 0, 1, 0, 0, 0, {}};
  Say("bad length", ioctl(fd, kRequest, &bad) == -1 && errno == EINVAL);
  uint32_t channel = 0;
  uint64_t response = 0;
  Ioctl create = {24 + 48,
                  0,
                  0,
                  3,
                  0,
                  0,
                  0,
                  {{2, 8, 1, 0, 17},
                   {0, 8, 1, 0, reinterpret_cast<uint64_t>(&response)},
                   {1, 4, 1, 0, reinterpret_cast<uint64_t>(&channel)}}};
  Say("create channel", ioctl(fd, kRequest, &create) == 0 && channel > 2);
  uint64_t event = 0;
  Say("both ends", write(static_cast<int>(channel), "eventful", 8) == 8 &&
                       read(static_cast<int>(channel), &event, 8) == 8);
  int pipes[2];
  Say("foreign descriptor",
      pipe(pipes) == 0 && ioctl(pipes[0], kRequest, &probe) == -1 && errno == ENOTTY);
  int readable = -1;
  Say("other ioctl", ioctl(pipes[0], FIONREAD, &readable) == 0 && readable == 0);
  Say("netlink route", socket(AF_NETLINK, SOCK_RAW, 0) >= 0);
}

void WithoutDaemon() {
  DIR* folder = opendir("/sys/class/infiniband_verbs");
  Say("empty folder", folder != nullptr);
  int entries = 0;
  while (folder != nullptr && readdir(folder) != nullptr) ++entries;
  Say("no entry", entries == 2);
  Say("no device", open(kDevice, O_RDWR) == -1 && errno == ENOENT);
  Say("no folder", access(kFolder, F_OK) == -1);
}

void ClosedStdin() {
  close(STDIN_FILENO);
  struct stat status;
  Say("stat leaves 0 free", stat(kFile, &status) == 0 && fcntl(0, F_GETFD) == -1);
  const int fd = open(kDevice, O_RDWR);
  Say("device is 0", fd == 0 && fstat(0, &status) == 0 && S_ISCHR(status.st_mode));
}

}  // namespace

int main(int argc, char** argv) {
  alarm(30);
  const char* scenario = argc > 1 ? argv[1] : "";
  struct {
    const char* name;
    void (*run)();
  } const scenarios[] = {
      {"opens", Opens},   {"folders", Folders},       {"stats", Stats},       {"links", Links},
      {"ioctls", Ioctls}, {"without", WithoutDaemon}, {"stdin", ClosedStdin},
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
