// SPDX-License-Identifier: Apache-2.0
//
// recv() behind the preload's, in which a descriptor can be closed or replaced: what another thread
// does at the worst moment.
#include <dlfcn.h>
#include <sys/socket.h>
#include <unistd.h>

namespace {

int g_descriptor = -1;
int g_replacement = -1;
bool g_before = true;

void Act() {
  if (g_descriptor < 0) return;
  if (g_replacement < 0) {
    close(g_descriptor);
  } else {
    dup2(g_replacement, g_descriptor);
  }
  g_descriptor = -1;
}

}  // namespace

// In the next recv() `descriptor` is closed, or becomes what `replacement` is, before or after the
// kernel's part.
extern "C" __attribute__((visibility("default"))) void ActInNextRecv(int descriptor,
                                                                     int replacement, bool before) {
  g_descriptor = descriptor;
  g_replacement = replacement;
  g_before = before;
}

extern "C" __attribute__((visibility("default"))) ssize_t recv(int fd, void* buffer, size_t bytes,
                                                               int flags) {
  if (g_before) Act();
  // libc's, a cancellation point.
  static const auto next = reinterpret_cast<decltype(&::recv)>(dlsym(RTLD_NEXT, "recv"));
  const ssize_t result = next(fd, buffer, bytes, flags);
  Act();
  return result;
}
