// SPDX-License-Identifier: Apache-2.0
//
// Interposed functions that take a path. Functions that libc calls inside
// itself are not caught, hence fopen, scandir, realpath, glob and so on each
// have their own here.
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "provider/preload/daemon_tree.h"
#include "provider/preload/device_node.h"
#include "provider/preload/interpose.h"
#include "provider/preload/net_folder.h"

namespace {

using verbena::provider::AppendToScan;
using verbena::provider::IsNetFolder;
using verbena::provider::NoteNetFolder;
using verbena::provider::OpenNode;
using verbena::provider::RewrittenPath;
using verbena::provider::StripTree;

mode_t ModeArgument(int flags, va_list arguments) {
  const bool has_mode = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  return has_mode ? va_arg(arguments, mode_t) : 0;
}

// Who may open a device was decided when the daemon let us see the tree.
int AccessNode(const RewrittenPath& path) {
  return static_cast<int>(syscall(SYS_faccessat, AT_FDCWD, path.path(), F_OK));
}

// Copies a link's content as readlink() does, cut to `size`.
ssize_t CopyLink(char* link, ssize_t length, char* buffer, size_t size) {
  const size_t left = StripTree(link, static_cast<size_t>(length));
  const size_t copied = left < size ? left : size;
  memcpy(buffer, link, copied);
  return static_cast<ssize_t>(copied);
}

}  // namespace

// Fortified programs call these; libc's headers declare them only for such.
extern "C" {
int __open_2(const char* path, int flags);
int __open64_2(const char* path, int flags);
int __openat_2(int folder, const char* path, int flags);
int __openat64_2(int folder, const char* path, int flags);
char* __realpath_chk(const char* path, char* resolved, size_t size) noexcept;
ssize_t __readlink_chk(const char* path, char* buffer, size_t size, size_t room) noexcept;
ssize_t __readlinkat_chk(int folder, const char* path, char* buffer, size_t size,
                         size_t room) noexcept;
}

// ---- open ----

#define VERBENA_OPEN(name)                                       \
  VERBENA_INTERPOSE int name(const char* path, int flags, ...) { \
    va_list arguments;                                           \
    va_start(arguments, flags);                                  \
    const mode_t mode = ModeArgument(flags, arguments);          \
    va_end(arguments);                                           \
    const RewrittenPath use(path);                               \
    if (use.is_node()) return OpenNode(use, flags);              \
    return VERBENA_NEXT(name)(use.path(), flags, mode);          \
  }
VERBENA_OPEN(open)
VERBENA_OPEN(open64)

#define VERBENA_OPENAT(name)                                                 \
  VERBENA_INTERPOSE int name(int folder, const char* path, int flags, ...) { \
    va_list arguments;                                                       \
    va_start(arguments, flags);                                              \
    const mode_t mode = ModeArgument(flags, arguments);                      \
    va_end(arguments);                                                       \
    const RewrittenPath use(path);                                           \
    if (use.is_node()) return OpenNode(use, flags);                          \
    return VERBENA_NEXT(name)(folder, use.path(), flags, mode);              \
  }
VERBENA_OPENAT(openat)
VERBENA_OPENAT(openat64)

#define VERBENA_OPEN_2(name)                                \
  VERBENA_INTERPOSE int name(const char* path, int flags) { \
    const RewrittenPath use(path);                          \
    if (use.is_node()) return OpenNode(use, flags);         \
    return VERBENA_NEXT(name)(use.path(), flags);           \
  }
VERBENA_OPEN_2(__open_2)
VERBENA_OPEN_2(__open64_2)

#define VERBENA_OPENAT_2(name)                                          \
  VERBENA_INTERPOSE int name(int folder, const char* path, int flags) { \
    const RewrittenPath use(path);                                      \
    if (use.is_node()) return OpenNode(use, flags);                     \
    return VERBENA_NEXT(name)(folder, use.path(), flags);               \
  }
VERBENA_OPENAT_2(__openat_2)
VERBENA_OPENAT_2(__openat64_2)

#define VERBENA_CREAT(name)                                   \
  VERBENA_INTERPOSE int name(const char* path, mode_t mode) { \
    const RewrittenPath use(path);                            \
    if (use.is_node()) return OpenNode(use, O_WRONLY);        \
    return VERBENA_NEXT(name)(use.path(), mode);              \
  }
VERBENA_CREAT(creat)
VERBENA_CREAT(creat64)

// The working folder is then one of the daemon's; names below it need nothing
// more. getcwd() tells its place.
VERBENA_INTERPOSE int chdir(const char* path) noexcept {
  const RewrittenPath use(path);
  return VERBENA_NEXT(chdir)(use.path());
}

#define VERBENA_FOPEN(name)                                          \
  VERBENA_INTERPOSE FILE* name(const char* path, const char* mode) { \
    const RewrittenPath use(path);                                   \
    return VERBENA_NEXT(name)(use.path(), mode);                     \
  }
VERBENA_FOPEN(fopen)
VERBENA_FOPEN(fopen64)

#define VERBENA_FREOPEN(name)                                                      \
  VERBENA_INTERPOSE FILE* name(const char* path, const char* mode, FILE* stream) { \
    const RewrittenPath use(path);                                                 \
    return VERBENA_NEXT(name)(use.path(), mode, stream);                           \
  }
VERBENA_FREOPEN(freopen)
VERBENA_FREOPEN(freopen64)

// ---- folders ----

VERBENA_INTERPOSE DIR* opendir(const char* path) {
  const RewrittenPath use(path);
  DIR* const folder = VERBENA_NEXT(opendir)(use.path());
  if (folder != nullptr && IsNetFolder(path)) NoteNetFolder(folder);
  return folder;
}

VERBENA_INTERPOSE int scandir(const char* path, dirent*** names, int (*filter)(const dirent*),
                              int (*compare)(const dirent**, const dirent**)) {
  const RewrittenPath use(path);
  const int count = VERBENA_NEXT(scandir)(use.path(), names, filter, compare);
  if (count < 0 || !IsNetFolder(path)) return count;
  return AppendToScan(reinterpret_cast<dirent64***>(names), count,
                      reinterpret_cast<int (*)(const dirent64*)>(filter),
                      reinterpret_cast<int (*)(const dirent64**, const dirent64**)>(compare));
}

VERBENA_INTERPOSE int scandir64(const char* path, dirent64*** names, int (*filter)(const dirent64*),
                                int (*compare)(const dirent64**, const dirent64**)) {
  const RewrittenPath use(path);
  const int count = VERBENA_NEXT(scandir64)(use.path(), names, filter, compare);
  return count < 0 || !IsNetFolder(path) ? count : AppendToScan(names, count, filter, compare);
}

VERBENA_INTERPOSE int scandirat(int folder, const char* path, dirent*** names,
                                int (*filter)(const dirent*),
                                int (*compare)(const dirent**, const dirent**)) {
  const RewrittenPath use(path);
  return VERBENA_NEXT(scandirat)(folder, use.path(), names, filter, compare);
}

VERBENA_INTERPOSE int scandirat64(int folder, const char* path, dirent64*** names,
                                  int (*filter)(const dirent64*),
                                  int (*compare)(const dirent64**, const dirent64**)) {
  const RewrittenPath use(path);
  return VERBENA_NEXT(scandirat64)(folder, use.path(), names, filter, compare);
}

#define VERBENA_GLOB(name, type)                                                                \
  VERBENA_INTERPOSE int name(const char* pattern, int flags, int (*on_error)(const char*, int), \
                             type* found) noexcept {                                            \
    const RewrittenPath use(pattern);                                                           \
    const int result = VERBENA_NEXT(name)(use.path(), flags, on_error, found);                  \
    if (use.ours() && result == 0) {                                                            \
      for (size_t i = 0; i < found->gl_pathc; ++i) {                                            \
        StripTree(found->gl_pathv[found->gl_offs * ((flags & GLOB_DOOFFS) != 0) + i]);          \
      }                                                                                         \
    }                                                                                           \
    return result;                                                                              \
  }
VERBENA_GLOB(glob, glob_t)
VERBENA_GLOB(glob64, glob64_t)

// The callbacks get paths of the tree, which work as well.
VERBENA_INTERPOSE int ftw(const char* path, __ftw_func_t visit, int descriptors) {
  const RewrittenPath use(path);
  return VERBENA_NEXT(ftw)(use.path(), visit, descriptors);
}

VERBENA_INTERPOSE int ftw64(const char* path, __ftw64_func_t visit, int descriptors) {
  const RewrittenPath use(path);
  return VERBENA_NEXT(ftw64)(use.path(), visit, descriptors);
}

VERBENA_INTERPOSE int nftw(const char* path, __nftw_func_t visit, int descriptors, int flags) {
  const RewrittenPath use(path);
  return VERBENA_NEXT(nftw)(use.path(), visit, descriptors, flags);
}

VERBENA_INTERPOSE int nftw64(const char* path, __nftw64_func_t visit, int descriptors, int flags) {
  const RewrittenPath use(path);
  return VERBENA_NEXT(nftw64)(use.path(), visit, descriptors, flags);
}

// ---- access ----

VERBENA_INTERPOSE int access(const char* path, int mode) noexcept {
  const RewrittenPath use(path);
  if (use.is_node()) return AccessNode(use);
  return VERBENA_NEXT(access)(use.path(), mode);
}

VERBENA_INTERPOSE int euidaccess(const char* path, int mode) noexcept {
  const RewrittenPath use(path);
  if (use.is_node()) return AccessNode(use);
  return VERBENA_NEXT(euidaccess)(use.path(), mode);
}

VERBENA_INTERPOSE int eaccess(const char* path, int mode) noexcept {
  const RewrittenPath use(path);
  if (use.is_node()) return AccessNode(use);
  return VERBENA_NEXT(eaccess)(use.path(), mode);
}

VERBENA_INTERPOSE int faccessat(int folder, const char* path, int mode, int flags) noexcept {
  const RewrittenPath use(path);
  if (use.is_node()) return AccessNode(use);
  return VERBENA_NEXT(faccessat)(folder, use.path(), mode, flags);
}

// ---- links ----

VERBENA_INTERPOSE ssize_t readlink(const char* path, char* buffer, size_t size) noexcept {
  const RewrittenPath use(path);
  if (!use.ours()) return VERBENA_NEXT(readlink)(path, buffer, size);
  char link[4096];
  const ssize_t length = VERBENA_NEXT(readlink)(use.path(), link, sizeof(link));
  return length < 0 ? length : CopyLink(link, length, buffer, size);
}

VERBENA_INTERPOSE ssize_t readlinkat(int folder, const char* path, char* buffer,
                                     size_t size) noexcept {
  const RewrittenPath use(path);
  if (!use.ours()) return VERBENA_NEXT(readlinkat)(folder, path, buffer, size);
  char link[4096];
  const ssize_t length = VERBENA_NEXT(readlinkat)(folder, use.path(), link, sizeof(link));
  return length < 0 ? length : CopyLink(link, length, buffer, size);
}

VERBENA_INTERPOSE ssize_t __readlink_chk(const char* path, char* buffer, size_t size,
                                         size_t room) noexcept {
  const RewrittenPath use(path);
  if (!use.ours() || size > room) return VERBENA_NEXT(__readlink_chk)(path, buffer, size, room);
  return readlink(path, buffer, size);
}

VERBENA_INTERPOSE ssize_t __readlinkat_chk(int folder, const char* path, char* buffer, size_t size,
                                           size_t room) noexcept {
  const RewrittenPath use(path);
  if (!use.ours() || size > room) {
    return VERBENA_NEXT(__readlinkat_chk)(folder, path, buffer, size, room);
  }
  return readlinkat(folder, path, buffer, size);
}

VERBENA_INTERPOSE char* realpath(const char* path, char* resolved) noexcept {
  const RewrittenPath use(path);
  char* result = VERBENA_NEXT(realpath)(use.path(), resolved);
  if (use.ours() && result != nullptr) StripTree(result);
  return result;
}

VERBENA_INTERPOSE char* __realpath_chk(const char* path, char* resolved, size_t size) noexcept {
  const RewrittenPath use(path);
  char* result = VERBENA_NEXT(__realpath_chk)(use.path(), resolved, size);
  if (use.ours() && result != nullptr) StripTree(result);
  return result;
}

VERBENA_INTERPOSE char* canonicalize_file_name(const char* path) noexcept {
  const RewrittenPath use(path);
  char* result = VERBENA_NEXT(canonicalize_file_name)(use.path());
  if (use.ours() && result != nullptr) StripTree(result);
  return result;
}
