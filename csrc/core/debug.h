/* debug.h — what tests may switch off, to see that it matters. Nothing of it is on for a user.
 *
 *   skip    bit mask of edges between queues that are left out (docs/design.md)
 *   poison  a slot is filled with 0xFF before its copy
 *   sync    overlap off: nothing is fetched ahead, and every call returns when its work is over
 */
#ifndef MT_DEBUG_H
#define MT_DEBUG_H

enum {
    MT_EDGE_READY = 1, MT_EDGE_FREED = 2, MT_EDGE_GRAD = 4, MT_EDGE_LANDED = 8,
    MT_EDGE_UPDATED = 16, MT_EDGE_STEPPED = 32, MT_EDGE_ASKED = 64, MT_EDGE_SPENT = 128,
    MT_EDGE_VACANT = 256, MT_EDGE_LIFTED = 512, MT_EDGE_MADE = 1024, MT_EDGE_STORED = 2048,
    MT_EDGE_FETCHED = 4096,
    MT_EDGE_MOVED = 1 << 13, MT_EDGE_LOWERED = 1 << 14, MT_EDGE_RAISED = 1 << 15,    /* ferry.h */
    MT_EDGE_COMPUTED = 1 << 16, MT_EDGE_LEFT = 1 << 17, MT_EDGE_ROOM = 1 << 18,     /* swap.h */
    MT_EDGE_KEPT = 1 << 19, MT_EDGE_BACK = 1 << 20, MT_EDGE_EMPTIED = 1 << 21,
    MT_EDGE_FULL = 1 << 22, MT_EDGE_WRITTEN = 1 << 23, MT_EDGE_READ = 1 << 24,      /* swap.h */
    MT_EDGE_DRAINED = 1 << 25, MT_EDGE_GONE = 1 << 26
};
typedef struct mt_debug { unsigned skip; int poison, sync; } mt_debug;

#endif
