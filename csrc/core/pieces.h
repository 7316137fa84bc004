/* pieces.h — a unit's planes, cut into pieces of a size.
 *
 * Nouns, in the order they appear below:
 *   part    a stretch of one parameter: the same elements of all its planes that are cut
 *   piece   parts that a buffer of so many bytes holds together, or a stretch of a file
 *   cut     how: which planes of each parameter, how large a piece may be, where parts begin
 *   pieces  what came of it: every element of those planes that is this process's own is in one
 *           part, in order
 *
 *     mt_pieces_cut(s, unit, &(mt_cut){ planes, bytes, MT_PART_ALIGN, 128, 0, MT_PART_ALIGN }, &p);
 *     for (int i = 0; i < p->n; i++) {
 *         mt_pieces_at(p, i, buffer, parts);              // of p->piece[i].n parts
 *         mt_part_host(s, unit, &parts[0], MT_PLANE_M, &host, &bytes);
 *     }
 *
 * In a piece weights come first, each part's behind the one before it: as in plane HI, where all
 * parameters between have theirs cut. Then come the other planes, part by part. All of a part
 * begins at multiples of MT_PART_ALIGN in the piece, and at a multiple of the grain in its
 * parameter, itself one of MT_STATES_GROUP: no two parts share a scale. Parts with states and parts
 * without are in pieces of their own, so who updates a piece changes all of it.
 *
 * Threads: any; what was cut does not change.
 */
#ifndef MT_PIECES_H
#define MT_PIECES_H

#include "store.h"

#define MT_PART_ABSENT SIZE_MAX          /* an offset */

typedef struct mt_part {
    int     param;
    int64_t from, n;                     /* its elements [from, from + n) */
    /* Aligned to MT_PART_ALIGN, as what holds the piece is; NULL: the plane was not cut. */
    void   *at[MT_PLANE_COUNT];
} mt_part;

typedef struct mt_cut {
    const unsigned *planes;              /* [parameters of the unit] 1u << plane each */
    size_t          budget;              /* bytes of a piece, at most */
    size_t          align;               /* weights, and the rest, take multiples of it */
    int64_t         grain;               /* elements */
    int             most;                /* parts in a piece; 0: as many as fit */
    size_t          spacing;             /* weights of a parameter begin at multiples of it, as in
                                          * plane HI: MT_PART_ALIGN at least */
} mt_cut;

typedef struct mt_stretch {
    int     param;
    int64_t from, n;
    size_t  offset[MT_PLANE_COUNT];      /* in the piece, or MT_PART_ABSENT */
} mt_stretch;

typedef struct mt_piece {
    int    first, n;                     /* its parts are part[first] and so on, n of them */
    size_t hi_bytes;                     /* bytes of weights, up to the last one's end */
    size_t weights, bytes;               /* of weights, and of all planes, each in whole `align` */
} mt_piece;

typedef struct mt_pieces {
    mt_piece   *piece;                   /* [n] */
    mt_stretch *part;                    /* [n_parts] */
    int         n, n_parts, most;        /* most: parts in one piece */
} mt_pieces;

/* MT_EINVAL: a grain of some parameter does not fit the budget. */
mt_status mt_pieces_cut (const mt_store *s, int unit, const mt_cut *how, mt_pieces **out);
void      mt_pieces_free(mt_pieces *p);                  /* NULL is fine */
MT_CLOSER(mt_pieces_free, mt_pieces)
/* The parts of a piece that is, or will be, in mem. parts: [p->piece[piece].n] */
void      mt_pieces_at  (const mt_pieces *p, int piece, void *mem, mt_part *parts);

/* Where a part is in the host's plane, and its bytes there. */
mt_status mt_part_host  (mt_store *s, int unit, const mt_part *part, mt_plane p, void **at,
                         size_t *bytes);
/* Puts copies in q between the part, which is on the device, and the host's planes; up: to the
 * device. *copied grows by their bytes. */
mt_status mt_part_copy  (mt_store *s, int unit, const mt_part *part, unsigned planes, mt_queue *q,
                         int up, uint64_t *copied);

#endif
