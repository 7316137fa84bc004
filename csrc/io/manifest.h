/* manifest.h — whose a scratch file is, so that the next run finds what a crashed one left.
 *
 * A scratch file is `megatrain-<pid>-<number>.states`; beside it lies
 * `megatrain-<pid>-<number>.json`:
 *
 *     {"pid": 4711, "started": 8812345, "boot": "0c0f...", "host": "node7",
 *      "file": "megatrain-4711-0.states", "bytes": 1048576}
 *
 * pid and started (clock ticks since boot, as /proc/<pid>/stat has it) name a process that no other
 * can be taken for while the machine is up, boot tells when it was up, and host which machine it
 * is. The process also holds a lock on the scratch file, which the kernel lets go of when it ends,
 * however it ends; across containers that share a directory, whose pids mean nothing to each other,
 * that lock alone tells.
 *
 * Order: the scratch file is made and locked, then the manifest is written, then room is reserved.
 *        It goes the other way round: scratch file, then manifest.
 *        So a file that takes room always has a manifest.
 */
#ifndef MT_MANIFEST_H
#define MT_MANIFEST_H

#include "../core/status.h"
#include <stdint.h>

#define MT_MANIFEST_PREFIX "megatrain-"
#define MT_MANIFEST_STATES ".states"
#define MT_MANIFEST_SUFFIX ".json"

/* The manifest of the scratch file `name` (without directory) in `dir`: written beside,
 * synced, renamed. */
mt_status mt_manifest_write(const char *dir, const char *name, uint64_t bytes);
void      mt_manifest_remove(const char *dir, const char *name);

/* Removes scratch files of processes that are no more, and their manifests; those of living ones
 * are left alone, and so is what may not be opened.
 * *bytes: that the removed files took on the disk. */
mt_status mt_manifest_sweep(const char *dir, uint64_t *bytes);

#endif
