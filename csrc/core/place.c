/* place.c — a list in the file's order. */
#include "place.h"

#include <stdlib.h>

static mt_place *smallest_free(const mt_places *l, uint64_t bytes)
{
    mt_place *best = NULL;

    for (mt_place *p = l->first; p != NULL; p = p->next)
        if (!p->used && p->bytes >= bytes && (best == NULL || p->bytes < best->bytes))
            best = p;
    return best;
}

static void put_behind(mt_places *l, mt_place *before, mt_place *p)
{
    p->before = before;
    p->next = before != NULL ? before->next : l->first;
    *(before != NULL ? &before->next : &l->first) = p;
    *(p->next != NULL ? &p->next->before : &l->last) = p;
}

static void take_out(mt_places *l, mt_place *p)
{
    *(p->before != NULL ? &p->before->next : &l->first) = p->next;
    *(p->next != NULL ? &p->next->before : &l->last) = p->before;
    free(p);
}

/* The last one, which grows; NULL: it is used, or there is none. */
static mt_place *free_end(const mt_places *l)
{
    return l->last != NULL && !l->last->used ? l->last : NULL;
}

uint64_t mt_places_lack(const mt_places *l, uint64_t bytes)
{
    const mt_place *end = free_end(l);

    return smallest_free(l, bytes) != NULL ? 0 : bytes - (end != NULL ? end->bytes : 0);
}

mt_status mt_places_add(mt_places *l, uint64_t bytes)
{
    mt_place *p = free_end(l);

    if (p == NULL) {
        MT_DO(MT_MAKE(p, 1, "spill"));
        p->at = l->bytes;
        put_behind(l, l->last, p);
    }
    p->bytes += bytes;
    l->bytes += bytes;
    return MT_OK;
}

mt_place *mt_places_take(mt_places *l, uint64_t bytes)
{
    mt_place *p = smallest_free(l, bytes), *rest;

    if (p == NULL)
        return NULL;
    /* What is behind its first bytes becomes one of its own; where there is no memory to note that,
     * it stays. */
    if (p->bytes > bytes && (rest = calloc(1, sizeof *rest)) != NULL) {
        *rest = (mt_place){ .at = p->at + bytes, .bytes = p->bytes - bytes };
        p->bytes = bytes;
        put_behind(l, p, rest);
    }
    p->used = 1;
    l->used_bytes += p->bytes;
    return p;
}

/* The first takes what the second has. */
static void join(mt_places *l, mt_place *a, mt_place *b)
{
    if (a == NULL || b == NULL || a->used || b->used)
        return;
    a->bytes += b->bytes;
    take_out(l, b);
}

void mt_places_give(mt_places *l, mt_place *p)
{
    if (p == NULL)
        return;
    p->used = 0;
    l->used_bytes -= p->bytes;
    join(l, p, p->next);
    join(l, p->before, p);
}

void mt_places_close(mt_places *l)
{
    while (l->first != NULL)
        take_out(l, l->first);
}
