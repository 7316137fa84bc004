/* layout.h — where a unit's planes lie in a file: piece by piece, with a sum for each block.
 *
 * Nouns, in the order they appear below:
 *   section   of a piece (pieces.h): its weights, or its states. Each is a request with sums of its
 *             own, so a fetch reads the one without the other. They lie one after the other, in the
 *             file as in a buffer
 *   layout    a unit's pieces, and their place in the file
 *
 *     mt_layout_make(store, unit, buffer_bytes, 1, &l);
 *     mt_layout_take(l, file);                            // the pieces have their places
 *     r = mt_layout_request(l, piece, MT_SECTION_STATES, 0, buffer);
 *     ...
 *     mt_layout_tell(l, piece, &r);                       // when it is over
 *
 * Threads: any; what was made does not change, but for the sums: those are whose request it is.
 */
#ifndef MT_LAYOUT_H
#define MT_LAYOUT_H

#include "blocks.h"
#include "pieces.h"

#define MT_LAYOUT_GRAIN 4096             /* a part begins at a multiple of so many elements */

enum { MT_SECTION_WEIGHTS, MT_SECTION_STATES, MT_SECTIONS };

typedef struct mt_section {
    size_t    from, bytes;               /* in the piece: whole MT_BLOCK_ALIGN. 0: there is none */
    uint64_t *sums;
} mt_section;

typedef struct mt_layout_piece {
    mt_section section[MT_SECTIONS];
    uint64_t   at;                       /* in the file */
    size_t     hi_at;                    /* its weights in plane HI: hi_bytes from here on */
} mt_layout_piece;

typedef struct mt_layout {
    mt_store        *store;
    int              unit;
    mt_pieces       *cut;
    mt_layout_piece *pieces;             /* [n] of cut's */
    int              n;
    uint64_t         bytes;              /* of all pieces */
    size_t           most_weights;       /* bytes in a piece */
    unsigned        *planes;             /* [parameters of the unit] in the file, a bit each */
} mt_layout;

/* Of the planes at home in the file, in pieces of at most so many bytes. made: what has its place
 * in the unit's arena, which is so for good once that is made; else as it would be now. */
mt_status  mt_layout_make (mt_store *s, int unit, size_t bytes, int made, mt_layout **out);
void       mt_layout_free (mt_layout *l);                /* NULL is fine */
MT_CLOSER(mt_layout_free, mt_layout)
mt_status  mt_layout_take (mt_layout *l, mt_blocks *file);

/* Has the piece something of one of these parameters? */
int        mt_layout_has    (const mt_layout *l, int piece, const int *params, int n);
/* The section of the piece that is, or will be, in mem. bytes 0: there is none. */
mt_request mt_layout_request(const mt_layout *l, int piece, int section, int write, void *mem);
/* One that failed is the ledger's fault, with unit, plane and parameter. */
void       mt_layout_tell   (const mt_layout *l, int piece, const mt_request *r);

#endif
