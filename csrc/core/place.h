/* place.h — stretches of a file, taken and given back: the smallest free one that holds what is
 * asked for; free is what lies between two that are used, and behind the last.
 * So steps that are alike make the file no longer.
 *
 * Threads: one at a time.
 */
#ifndef MT_PLACE_H
#define MT_PLACE_H

#include <stddef.h>
#include <stdint.h>

typedef struct mt_place {                /* in a struct of who has it */
    uint64_t at, bytes;                  /* bytes 0: it is nowhere */
    struct mt_place *next, *before;      /* by where they are */
} mt_place;

typedef struct mt_places {
    mt_place *first;
    uint64_t  bytes, used_bytes;         /* of the file, which the caller makes longer; in use */
} mt_places;

/* 0: p has a place of so many bytes. Else the file would have to be so many longer. */
static inline uint64_t mt_places_take(mt_places *l, mt_place *p, uint64_t bytes)
{
    mt_place *before = NULL, *behind = NULL;         /* behind: NULL while none was found, too */
    uint64_t  at = 0, free_from = 0, least = UINT64_MAX, room = 0;

    for (mt_place *next = l->first, *last = NULL;; last = next, next = next->next) {
        room = (next != NULL ? next->at : l->bytes) - free_from;
        if (room >= bytes && room < least) {
            least = room;
            at = free_from;
            before = last;
            behind = next;
        }
        if (next == NULL)
            break;
        free_from = next->at + next->bytes;
    }
    if (least == UINT64_MAX)
        return bytes - room;
    *p = (mt_place){ .at = at, .bytes = bytes, .next = behind, .before = before };
    *(before != NULL ? &before->next : &l->first) = p;
    if (behind != NULL)
        behind->before = p;
    l->used_bytes += bytes;
    return 0;
}

/* Of one that is nowhere there is nothing to do. */
static inline void mt_places_give(mt_places *l, mt_place *p)
{
    if (p->bytes == 0)
        return;
    *(p->before != NULL ? &p->before->next : &l->first) = p->next;
    if (p->next != NULL)
        p->next->before = p->before;
    l->used_bytes -= p->bytes;
    *p = (mt_place){ 0 };
}

#endif
