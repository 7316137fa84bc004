/* file.h — a scratch file as a device of blocks: many reads and writes under way at once,
 * each with its sum.
 *
 * Nouns, in the order they appear below:
 *   calls    the system calls a file is made of; tests bring their own
 *   file     in a directory the user named. It has no name, and goes with its descriptor: when it
 *            is closed, or its process ends, in whatever way
 *   room     of the disk, which is the file's from `reserve` and `take` on. File systems that write
 *            what is new beside what is old (btrfs, ZFS, bcachefs, XFS and overlays where blocks
 *            are shared) promise it for the first write of a place at most: there a disk that
 *            others fill can be full in the middle of a step. Then the write fails, and says so;
 *            nothing that was written before is lost
 *   direct   transfers go past the kernel's page cache (O_DIRECT). Where a file system refuses that
 *            (tmpfs before Linux 6.6, some overlays and network file systems) they go through it
 *   thread   ours, several. Each moves one block at a time with pread or pwrite: what io_uring does
 *            with fewer threads, and without its being forbidden, as it is in many containers
 *
 *     mt_file_open(dir, limit, 16, NULL, &f);
 *     mt_file_reserve(f, bytes);                      // the disk has them, or this fails
 *     blocks = mt_file_blocks(f);                     // core/blocks.h: take, put
 *     mt_file_close(f);                               // waits for requests; the file is gone
 *
 * Children of the process that opened a file do not have its descriptor (forks.h);
 * close does nothing there.
 *
 * Threads: open, reserve, close: one. The rest: any. done of a request runs on a thread of the
 *          file's and may put requests.
 * Errors:  MT_EDISK with path, what was asked and what the system said. A read that finds other
 *          bytes than were written, or the end of the file, is one too.
 */
#ifndef MT_FILE_H
#define MT_FILE_H

#include "../core/blocks.h"
#include <sys/types.h>

typedef struct mt_file_calls {
    ssize_t (*read)    (int fd, void *p, size_t bytes, off_t at);        /* pread */
    ssize_t (*write)   (int fd, const void *p, size_t bytes, off_t at);  /* pwrite */
    int     (*allocate)(int fd, off_t at, off_t bytes);                  /* posix_fallocate: an
                                                                          * errno */
    int     (*direct)  (int fd, int on);                                 /* O_DIRECT: an errno */
} mt_file_calls;

extern const mt_file_calls mt_file_system;

/* Asks again where a signal came in between. 0, or an errno. */
int mt_file_allocate(const mt_file_calls *calls, int fd, uint64_t at, uint64_t bytes);

/* Bytes one way or the other, in whole pages, so that direct transfers will do: of the memory, and
 * of a file that is written; one that is read need not have more than the bytes. path: for
 * messages. */
mt_status mt_file_move(const mt_file_calls *calls, int fd, const char *path, int write, char *mem,
                       size_t bytes, uint64_t at);

static inline size_t mt_file_pages(size_t bytes)
{
    return mt_round_up(bytes, MT_BLOCK_ALIGN);
}

typedef struct mt_file mt_file;

/* limit: bytes the file may come to have; 0: none. calls NULL: the system's. */
mt_status mt_file_open (const char *dir, uint64_t limit, int n_threads, const mt_file_calls *calls,
                        mt_file **out);
void      mt_file_close(mt_file *f);                     /* NULL is fine */
MT_CLOSER(mt_file_close, mt_file)
/* Room on the disk for so many bytes in all;
 * what `take` hands out beyond them is asked for then. */
mt_status mt_file_reserve(mt_file *f, uint64_t bytes);
mt_blocks *mt_file_blocks(mt_file *f);

typedef struct mt_file_stats {
    uint64_t read_bytes, written_bytes;      /* since open */
    uint64_t bytes;                          /* of the file */
    int      direct;
} mt_file_stats;
mt_file_stats mt_file_stats_get(mt_file *f);

/* What a disk does with requests of `each` bytes, `depth` of them under way, as the engine puts
 * them and without sums: bytes/s written and read alone, and of both together while as much is read
 * as is written; fresh: written where nothing was, which costs the file system more. Makes, and
 * removes, a file of `bytes` in dir. */
typedef struct mt_disk_rates {
    double fresh, write, read, both;
    int    direct;
} mt_disk_rates;
mt_status mt_disk_measure(const char *dir, uint64_t bytes, size_t each, int depth, int n_threads,
                          mt_disk_rates *out);

#endif
