/* shards.h — files that are written once, or read, as a whole, by several threads, in blocks.
 *
 * Nouns, in the order they appear below:
 *   extent   a stretch of a file that is somewhere in memory, perhaps in planes of a unit
 *   shard    a file, and its extents. Of one that is written they cover all of it
 *   block    MT_BLOCK_BYTES of a shard; has a sum (sum.h)
 *   share    what one unit has in a block. A block is written when all its shares are copied
 *   spare    memory for blocks that are being copied, or are and are not yet written. What is
 *            copied may change again
 *
 *     mt_shards_write(shards, n, how, &w);    // files are made, room is reserved, threads begin
 *     while (st == MT_OK && !over)
 *         st = mt_shards_wait(w, 0.5, &bytes, &over);
 *     mt_shards_close(w);                     // sums[] of the shards are whole if it was over
 *
 *     mt_shards_read(&shard, 8, NULL);        // fills the extents' memory, and compares sums
 *
 * Several processes that have the same memory write the same shards together: each in turn takes a
 * block, of all shards' in order. The first of them makes the files before the others begin. Of
 * sums each has those of its blocks, and zeros. So a file has the bytes, and all together have the
 * sums, of one process.
 *
 * Order: shares are copied unit by unit, so that what a unit needs for it (`brings`) is needed
 *        once, and of one unit at a time; those of a unit that is wanted come next. A block that
 *        waits for its next unit keeps its memory: a few do, where the shards have their units in
 *        order. Should they all, one is finished first, whatever it brings. A shard is synced
 *        behind its last block, and its name is not: that is the folder's.
 * Threads: those that copy, and those that write. begin, end and wanted are called by the former;
 *          end once for every unit, also after a failure or a close before the end. wait: any.
 *          The rest: one.
 * Errors:  MT_EDISK with the path, what was asked and what the system said. Files of a failed write
 *          stay. MT_EINTR of a read whose caller asks (watch.h).
 */
#ifndef MT_SHARDS_H
#define MT_SHARDS_H

#include "../core/watch.h"
#include "file.h"

#define MT_TURN_DIMS 64      /* as torch's */

/* A tensor whose elements lie in memory in another order than in the file, which is row-major. */
typedef struct mt_turn {
    int    dims;                     /* 1 to MT_TURN_DIMS */
    size_t item;                     /* bytes of an element */
    size_t shape[MT_TURN_DIMS], stride[MT_TURN_DIMS];        /* elements; bytes */
} mt_turn;

typedef struct mt_extent {
    uint64_t at;                     /* in the file */
    void    *mem;
    size_t   bytes;                  /* > 0 */
    int      unit;                   /* of mt_shards_how's n_units; -1: the memory is nobody's */
    const mt_turn *turn;             /* NULL: the bytes lie as in the file */
} mt_extent;

typedef struct mt_shard {
    const char      *path;
    uint64_t         bytes;
    const mt_extent *extents;        /* [n_extents] in order of at, side by side or apart */
    size_t           n_extents;
    uint64_t        *sums;           /* [mt_block_count(bytes)] out of write, zeros before; into
                                      * read; read, NULL: not compared */
} mt_shard;

typedef struct mt_shards_how {
    size_t spare_bytes;              /* at least a block for every thread is taken */
    int    n_copiers, n_writers;     /* >= 1 */
    int    n_units;
    int    part, parts;              /* process `part` of `parts` writes its blocks alone; parts 0:
                                      * there is one */
    const size_t *brings;            /* [n_units] bytes that begin takes and end gives back; NULL:
                                      * none. Of those that take some there is one between the two,
                                      * or as many as take a block together */
    mt_status (*begin)(void *arg, int unit);  /* before the unit's first byte is read; may be NULL,
                                               * as all three */
    void      (*end)  (void *arg, int unit);  /* its last byte has been read, or never will be */
    int       (*wanted)(void *arg);           /* a unit somebody waits for, or -1 */
    void  *arg;
    const mt_file_calls *calls;      /* NULL: the system's */
    mt_watch *watch;                 /* every block that is being written is in its list; NULL:
                                      * nobody watches */
} mt_shards_how;

typedef struct mt_shards mt_shards;

/* The shards' arrays are the caller's, and outlive it. MT_EDISK when a file is there already. On
 * failure every unit was ended. */
mt_status mt_shards_write(const mt_shard *shards, int n, mt_shards_how how, mt_shards **out);
/* *bytes written so far; *over: all is synced. Returns what went wrong,
 * once no thread of ours uses memory. */
mt_status mt_shards_wait (mt_shards *w, double seconds, uint64_t *bytes, int *over);
void      mt_shards_close(mt_shards *w);             /* gives up what is not over; NULL is fine */

/* Reads the blocks that extents lie in; without extents all, for their sums' sake.
 * MT_EDISK also for a file of another size, and for blocks whose sums are others;
 * extents are then partly filled. */
mt_status mt_shards_read(const mt_shard *shard, int n_threads, const mt_file_calls *calls);

#endif
