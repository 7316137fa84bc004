/* place.h — stretches of a file, taken and given back: the smallest free one that holds what is
 * asked for, cut where it is larger; neighbours that are free are one.
 * So steps that are alike make the file no longer.
 *
 * Threads: one at a time.
 */
#ifndef MT_PLACE_H
#define MT_PLACE_H

#include "blocks.h"

typedef struct mt_place {
    uint64_t at, bytes;
    int      used;
    struct mt_place *next, *before;      /* by where they are; nothing lies between two */
} mt_place;

typedef struct mt_places {
    mt_place  *first, *last;
    uint64_t   bytes, used_bytes;        /* of all, of those in use */
} mt_places;

/* bytes: whole MT_BLOCK_ALIGN. So many more of the file would do; 0: there is room. What the file
 * gives follows on what it gave: nobody else takes any. */
uint64_t  mt_places_lack (const mt_places *l, uint64_t bytes);
mt_status mt_places_add  (mt_places *l, uint64_t bytes);
mt_place *mt_places_take (mt_places *l, uint64_t bytes);     /* NULL: they lack some */
void      mt_places_give (mt_places *l, mt_place *p);        /* NULL is fine */
void      mt_places_close(mt_places *l);

#endif
