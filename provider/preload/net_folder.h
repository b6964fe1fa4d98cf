// SPDX-License-Identifier: Apache-2.0
//
// /sys/class/net as a folder: the kernel's interfaces, then those of the NICs.
// readdir(), closedir() and rewinddir() are interposed for it. Not for signal
// handlers.
#pragma once

#include <dirent.h>

namespace verbena::provider {

// True for /sys/class/net itself.
bool IsNetFolder(const char* path);
// `folder` was opened as such.
void NoteNetFolder(DIR* folder);
// scandir() of such a folder gave `count` names, sorted or not: adds ours. The
// new count. (struct dirent and dirent64 are the same.)
int AppendToScan(dirent64*** names, int count, int (*filter)(const dirent64*),
                 int (*compare)(const dirent64**, const dirent64**));

}  // namespace verbena::provider
