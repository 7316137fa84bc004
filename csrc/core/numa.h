/* numa.h — nodes of memory, where a machine has several, and regions spread over them.
 *
 * An update reads and writes 26 bytes per parameter by all cores, chunks taken as they come; a bus
 * copies from wherever a page is. So no page has a right node, and what counts is that all nodes'
 * memory works at once: pages of an arena take turns among the nodes. What one process of several
 * alone updates is local: on the node of the thread that touches a page first, which is one of its
 * own. Nodes without processors are left out: they are the memory of a GPU (GH200) or of an
 * expander. Where the user has chosen a policy (numactl) it stays.
 *
 * Threads: any.
 */
#ifndef MT_NUMA_H
#define MT_NUMA_H

#include <stddef.h>

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

/* Before the first touch of [p, p + bytes), whole pages: spread over the nodes, or local. 0, or why
 * it was not done, as errno: then the kernel chooses, as it does on one node. nodes NULL: local. */
int mt_numa_place (void *p, size_t bytes, int local);
int mt__numa_place(const mt_nodes *nodes, void *p, size_t bytes);

#endif
