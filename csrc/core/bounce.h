/* bounce.h — the host's copies of what is in a file, by way of buffers: a section of a piece is
 * read, and copied to the host; or copied there, and written.
 *
 * Who is behind a unit's door (mirror.h) has a buffer of its own, made where there is none to be
 * had: it waits for requests for the same piece, and for nobody's else. What a buffer has at the
 * end stays there, since parameters that are pushed one after the other often share a piece; an
 * update of the unit drops it.
 *
 *     mt_bounce_open(cx, rings, bytes, &b);
 *     mt_bounce_load (b, layout, 1u << MT_PLANE_M);             // host: what is LOADING is there
 *     mt_bounce_store(b, layout, param, 1u << MT_PLANE_M);      // the file has what the host has
 *
 * Threads: open, close: one. load, store: any, behind the unit's door.
 */
#ifndef MT_BOUNCE_H
#define MT_BOUNCE_H

#include "mirror.h"
#include "ring.h"

typedef struct mt_bounce mt_bounce;

/* bytes: of a piece, at most. */
mt_status mt_bounce_open (const mt_context *cx, mt_rings *all, size_t bytes, mt_bounce **out);
void      mt_bounce_close(mt_bounce *b);                 /* NULL is fine */
mt_status mt_bounce_load (mt_bounce *b, const mt_layout *l, unsigned planes);
/* param -1: all of the unit's. Nobody reads ahead of the unit meanwhile. */
mt_status mt_bounce_store(mt_bounce *b, const mt_layout *l, int param, unsigned planes);

#endif
