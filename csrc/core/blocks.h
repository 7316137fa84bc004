/* blocks.h — the disk's door: what the core needs of a file that holds planes.
 *
 * Nouns, in the order they appear below:
 *   request  memory that goes to a place in the file, or comes from there
 *   block    MT_BLOCK_BYTES of a request (the last one may be shorter): moved by one call,
 *            and has a sum
 *   sum      of a block's bytes as they were written; 0: it never was, and reads as zeros
 *   blocks   the file. One implementation: io/file.c
 *
 *     mt_request r = { .write = 0, .at = at, .mem = mem, .bytes = bytes, .sums = sums,
 *                      .done = over };
 *     b->ops->put(b, &r);                // returns at once; over(&r) comes from another thread
 *
 * Threads: any. Requests begin in the order they were put, and may end in any other: who writes a
 *          place and then reads it puts the second when the first is over.
 * Errors:  what goes wrong with a request is in it when done is called;
 *          the first block's that failed.
 */
#ifndef MT_BLOCKS_H
#define MT_BLOCKS_H

#include "worker.h"

#define MT_BLOCK_BYTES ((size_t)4 << 20)     /* deep enough for a disk with a few of them under
                                              * way */
#define MT_BLOCK_ALIGN ((size_t)4096)        /* of places, memory and bytes: what direct transfers
                                              * ask for */

typedef struct mt_blocks mt_blocks;

typedef struct mt_request {
    mt_job    job;           /* these three are the file's while the request is under way */
    size_t    begun, left;   /* blocks */
    int       write;
    uint64_t  at;            /* in the file */
    void     *mem;
    size_t    bytes;         /* > 0 */
    uint64_t *sums;          /* [mt_block_count(bytes)] written by a write, compared by a read;
                              * NULL: neither */
    void    (*done)(struct mt_request *r);       /* once; r is the caller's again */
    void     *arg;           /* the caller's */

    mt_status st;            /* these four are written before done. MT_EDISK: see text */
    size_t    moved;         /* bytes that went to the disk or came from it; blocks that never were
                              * do not */
    uint64_t  bad_at;        /* where the block that failed is in the file */
    char      text[320];
} mt_request;

static inline size_t mt_block_count(size_t bytes)
{
    return (bytes + MT_BLOCK_BYTES - 1) / MT_BLOCK_BYTES;
}

typedef struct mt_blocks_ops {
    /* Room for so many bytes, which is nobody else's from now on. MT_EDISK: the disk,
     * or the limit, has no more. */
    mt_status   (*take)(mt_blocks *b, size_t bytes, uint64_t *at);
    void        (*put) (mt_blocks *b, mt_request *r);
    const char *(*name)(const mt_blocks *b);                     /* the file's path */
} mt_blocks_ops;

/* Every implementation begins with this. */
struct mt_blocks {
    const mt_blocks_ops *ops;
};

#endif
