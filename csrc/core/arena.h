/* arena.h — one region of memory, as large as asked for, all bytes zero, or a range of a share.
 *
 *     mt_arena a = {0};
 *     mt_arena_open(&a, bytes, pool, dev, "unit layers.0, plane HI", mapped);
 *     a.base ...                                  // on the host, in memory, known to the device
 *     mt_arena_close(&a);
 *
 * A reserved arena is host addresses alone: a page costs memory from its first write on. What is to
 * be written as a whole is committed before, which is open's second half.
 * A child of fork() has none of it (forks.h).
 *
 * Threads: an arena belongs to one thread at a time; the store's lock sees to it.
 */
#ifndef MT_ARENA_H
#define MT_ARENA_H

#include "dev.h"
#include "pool.h"
#include "share.h"

typedef struct mt_arena {
    void   *base;            /* NULL: not open. Aligned to a page; to 2 MiB from 4 MiB on */
    size_t  bytes;           /* mapped: what was asked for, in whole pages; 0 when that was 0 */
    size_t  from, kept;      /* so many bytes from there on are committed and registered, in whole
                              * pages: all, unless mt_arena_keep said less */
    mt_dev *dev;             /* with which it is registered, or whose memory it is; NULL: neither */
    int     on_device;       /* it is memory of dev: base is no host address */
    int     reserved;        /* it is addresses alone, not committed */
    int     part;            /* it lies in another arena, whose addresses they are */
    int     shared;          /* it is in a share: others have it too */
    size_t  alone, n_alone;  /* shared: so many bytes of what is kept, from there on, are in pages
                              * that have nothing else */
} mt_arena;

/* Maps anonymous memory, spreads it over the nodes, asks for huge pages where they pay,
 * touches every page on the pool (pool NULL: on this thread), and registers it with dev unless that
 * is NULL. what and mapped (bytes the caller has mapped already) are for the message of MT_ENOMEM.
 * bytes 0: nothing is mapped; base is an address that may be compared but not read. */
mt_status mt_arena_open  (mt_arena *a, size_t bytes, mt_pool *pool, mt_dev *dev,
                          const char *what, size_t mapped);
/* r NULL: anonymous memory; else a range of a share, of so many bytes. own: what is written there
 * is this process's (mt_share_map). */
mt_status mt_arena_reserve(mt_arena *a, size_t bytes, const mt_range *r, int own, const char *what,
                           size_t mapped);
/* Of one that is mapped: so many bytes from there on, in whole pages, as a reserved arena. It is
 * closed before that one. */
void      mt_arena_part  (mt_arena *a, const mt_arena *whole, size_t from, size_t bytes);
/* Of a reserved arena these bytes, and those in pages with them, are all that is ever committed. */
void      mt_arena_keep  (mt_arena *a, size_t from, size_t bytes);
/* Touches and registers a reserved arena; what was written into it stays. */
mt_status mt_arena_commit(mt_arena *a, mt_pool *pool, mt_dev *dev);
/* Registers a committed arena; nothing to do when that is done, or nothing is mapped. */
mt_status mt_arena_register(mt_arena *a, mt_dev *dev);
void      mt_arena_unregister(mt_arena *a);
/* Its pages are given back, registered or not, and it is reserved: what it held is gone. Of a
 * shared one pages stay that have something else than what was kept. */
void      mt_arena_decommit(mt_arena *a);
/* Memory of dev for bytes from `from` on of what would begin at base. */
mt_status mt_arena_device(mt_arena *a, size_t from, size_t bytes, mt_dev *dev, const char *what);
void      mt_arena_close (mt_arena *a);            /* closed or zeroed: nothing to do */

/* ---- nodes of memory, where a machine has several -------------------------------------------
 * An update reads and writes 26 bytes per parameter by all cores, chunks taken as they come; a bus
 * copies from wherever a page is. So no page has a right node, and what counts is that all nodes'
 * memory works at once: pages of an arena take turns among the nodes. What one process of several
 * alone updates is local: on the node of the thread that touches a page first, which is one of its
 * own. Nodes without processors are left out: they are the memory of a GPU (GH200) or of an
 * expander. Where the user has chosen a policy (numactl) it stays. Any thread.
 */

#define MT_NODES     1024
#define MT_NODE_BITS (8 * sizeof(unsigned long))

typedef struct mt_nodes {
    unsigned long bits[MT_NODES / MT_NODE_BITS];
    int           n;                 /* of bits that are set */
} mt_nodes;

/* The nodes with processors whose memory this process may use. n is at least 1. */
const mt_nodes *mt_nodes_here(void);
/* sys is where sysfs is mounted, status the file that says which memory we may use:
 * tests bring their own. */
void            mt__nodes_read(const char *sys, const char *status, mt_nodes *out);

/* Before the first touch of [p, p + bytes), whole pages: spread over the nodes, or (NULL) local. 0,
 * or why it was not done, as errno: then the kernel chooses, as it does on one node. */
int             mt__numa_place(const mt_nodes *nodes, void *p, size_t bytes);

#endif
