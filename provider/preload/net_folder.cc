// SPDX-License-Identifier: Apache-2.0
#include "provider/preload/net_folder.h"

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "provider/preload/interpose.h"
#include "provider/preload/netdevs.h"

namespace verbena::provider {
namespace {

static_assert(sizeof(dirent) == sizeof(dirent64) &&
              offsetof(dirent, d_name) == offsetof(dirent64, d_name));

// A folder that is being read. Programs have few at a time; of one more only
// the kernel's part is shown.
struct OpenFolder {
  std::atomic<DIR*> folder{nullptr};
  int next = 0;  // of our interfaces
  dirent64 entry;
};
constexpr int kOpenFolders = 16;
OpenFolder g_open[kOpenFolders];
std::atomic<int> g_count{0};  // in use: nearly always none

OpenFolder* Find(const DIR* folder) {
  if (g_count.load(std::memory_order_relaxed) == 0) return nullptr;
  for (OpenFolder& each : g_open) {
    if (each.folder.load(std::memory_order_acquire) == folder) return &each;
  }
  return nullptr;
}

void Fill(const NetdevAddress& netdev, dirent64* entry) {
  memset(entry, 0, sizeof(*entry));
  entry->d_ino = netdev.index;
  entry->d_off = 0x7fffffff;
  entry->d_reclen = sizeof(*entry);
  entry->d_type = DT_LNK;
  memcpy(entry->d_name, netdev.name, strnlen(netdev.name, sizeof(netdev.name) - 1));
}

// The interface with this number; false: there are less.
bool FillNumber(int number, dirent64* entry) {
  const Netdevs netdevs;
  for (const NetdevAddress* each = netdevs.begin(); each != netdevs.end(); ++each) {
    if (each != netdevs.begin() && each[-1].index == each->index) continue;
    if (number-- == 0) {
      Fill(*each, entry);
      return true;
    }
  }
  return false;
}

// What follows when the kernel's part is at its end.
dirent64* NextOf(DIR* folder) {
  OpenFolder* const found = Find(folder);
  if (found == nullptr || !FillNumber(found->next, &found->entry)) return nullptr;
  ++found->next;
  return &found->entry;
}

}  // namespace

bool IsNetFolder(const char* path) {
  constexpr char kFolder[] = "/sys/class/net";
  constexpr size_t kLength = sizeof(kFolder) - 1;
  if (path == nullptr || strncmp(path, kFolder, kLength) != 0) return false;
  path += kLength;
  while (*path == '/') ++path;
  return *path == '\0' || strcmp(path, ".") == 0;
}

void NoteNetFolder(DIR* folder) {
  for (OpenFolder& each : g_open) {
    DIR* none = nullptr;
    if (!each.folder.compare_exchange_strong(none, folder)) continue;
    each.next = 0;
    g_count.fetch_add(1);
    return;
  }
}

int AppendToScan(dirent64*** names, int count, int (*filter)(const dirent64*),
                 int (*compare)(const dirent64**, const dirent64**)) {
  dirent64 entry;
  for (int number = 0; FillNumber(number, &entry); ++number) {
    if (filter != nullptr && filter(&entry) == 0) continue;
    auto** const longer = static_cast<dirent64**>(
        realloc(*names, (static_cast<size_t>(count) + 1) * sizeof(dirent64*)));
    if (longer == nullptr) return count;
    *names = longer;
    auto* const copy = static_cast<dirent64*>(malloc(sizeof(entry)));
    if (copy == nullptr) return count;
    memcpy(copy, &entry, sizeof(entry));
    longer[count++] = copy;
  }
  if (compare != nullptr && count > 1) {
    qsort(*names, static_cast<size_t>(count), sizeof(dirent64*),
          reinterpret_cast<int (*)(const void*, const void*)>(compare));
  }
  return count;
}

}  // namespace verbena::provider

VERBENA_INTERPOSE dirent64* readdir64(DIR* folder) {
  dirent64* const entry = VERBENA_NEXT(readdir64)(folder);
  return entry != nullptr ? entry : verbena::provider::NextOf(folder);
}

VERBENA_INTERPOSE dirent* readdir(DIR* folder) {
  dirent* const entry = VERBENA_NEXT(readdir)(folder);
  return entry != nullptr ? entry : reinterpret_cast<dirent*>(verbena::provider::NextOf(folder));
}

VERBENA_INTERPOSE void rewinddir(DIR* folder) noexcept {
  if (auto* const found = verbena::provider::Find(folder)) found->next = 0;
  VERBENA_NEXT(rewinddir)(folder);
}

VERBENA_INTERPOSE int closedir(DIR* folder) {
  if (auto* const found = folder == nullptr ? nullptr : verbena::provider::Find(folder)) {
    found->folder.store(nullptr);
    verbena::provider::g_count.fetch_sub(1);
  }
  return VERBENA_NEXT(closedir)(folder);
}
