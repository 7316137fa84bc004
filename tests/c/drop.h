/* drop.h — a plane's memory is given back, as the store itself never does before it is closed: so
 * that tests may make a plane anew, or have one that is missing.
 * Nobody else uses the store meanwhile. */
#ifndef MT_TEST_DROP_H
#define MT_TEST_DROP_H

#include "../../csrc/core/store_impl.h"

#include <stdlib.h>

static inline size_t drop_arena(mt_arena *a)
{
    size_t bytes = a->reserved ? 0 : a->kept;

    mt_arena_close(a);
    return bytes;
}

static inline void drop_plane(mt_store *s, int unit, mt_plane p)
{
    mt__unit *u = mt__unit_at(s, unit);

    for (int side = 0; side < MT__SIDES; side++) {
        mt__plane *pl = &u->plane[side][p];
        size_t     bytes = drop_arena(&pl->arena);

        for (int i = 0; pl->own != NULL && i < u->shape.n; i++)
            bytes += drop_arena(&pl->own[i]);
        free(pl->own);
        free(pl->at);
        pl->own = NULL;
        pl->at = NULL;
        atomic_fetch_sub(side == MT__DEVICE ? &s->on_device : &s->mapped[p], bytes);
    }
}

#endif
