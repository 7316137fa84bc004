/* portion.h — what is whose, of a unit that several processes own together.
 *
 * Nouns, in the order they appear below:
 *   shape     of a unit: its parameters, and where they lie in plane HI
 *   line      a unit's elements as plane HI has them, parameter behind parameter
 *   owner     0 to owners - 1: who keeps the states of its portion of every unit, and updates it
 *   portion   of a unit: a stretch of the line, perhaps of no elements. It is one stretch of bytes
 *             in every plane, since all have their parameters in that order
 *   bound     where one portion ends and the next begins
 *
 *     mt_shape_cut(&shape, name, 1, 4, &mine);            // what the second of four owners has
 *     for (int i = 0; i < shape.n; i++)
 *         n = mt_portion_part(&mine, i, shape.desc[i].numel, &from);  // elements [from, from + n)
 *
 * The cut follows from the unit's parameters and the number of owners alone. A bound may be where
 * a parameter begins, and every MT_PORTION_GRAIN elements further on. The one between owners k - 1
 * and k is the last of these at or before k / owners of plane HI's bytes. Three owners of bf16
 * [30000], fp32 [64] and bf16 [7000] (60,000, 256 and 14,000 bytes, at multiples of 512) have
 *
 *     owner 0   parameter 0: elements 0 to 8191                         16,384 bytes
 *     owner 1   parameter 0: 8192 to 24575                              32,768 bytes
 *     owner 2   parameter 0: 24576 to 29999, and all of 1 and 2         25,104 bytes
 *
 * So of weights each has an even share, but for less than a grain (16 KiB of bf16) at either end. A
 * grain is a multiple of 512 bytes in every plane: of SCALE it is 512, of 64 groups. And it is a
 * chunk of sums of squares (ops/sumsq.h). So no two owners share 512 bytes, a scale or a chunk, a
 * piece (pieces.h) may begin where a portion does, and no bit of a result depends on the cut.
 *
 * Threads: any; what is cut does not change.
 */
#ifndef MT_PORTION_H
#define MT_PORTION_H

#include "dtype.h"
#include "status.h"

#define MT_PORTION_GRAIN 8192            /* elements */
#define MT_OWNERS_MOST   65536

/* Of n elements from a grain on. */
static inline int64_t mt_grains(int64_t n)
{
    return n / MT_PORTION_GRAIN + (n % MT_PORTION_GRAIN != 0);
}

typedef struct mt_param_desc {
    mt_dtype dtype;
    int64_t  numel;          /* >= 0 */
    int      trainable;      /* 0: the unit's planes other than HI leave it out */
} mt_param_desc;

typedef struct mt_shape {
    int            n;
    mt_param_desc *desc;                 /* [n] */
    size_t        *offset;               /* [n] bytes into plane HI */
    size_t         bytes;                /* of plane HI */
} mt_shape;

typedef struct mt_bound {
    int     param;                       /* its elements from there on, and the parameters behind */
    int64_t from;
} mt_bound;

typedef struct mt_portion {
    mt_bound begin, end;                 /* two bounds; what is behind the second is another's */
} mt_portion;

/* name: the unit's, for MT_EINVAL: no such owner. */
mt_status mt_shape_cut   (const mt_shape *s, const char *name, int owner, int owners,
                          mt_portion *out);
/* Where a bound is in plane HI, in bytes. */
size_t    mt_shape_byte  (const mt_shape *s, mt_bound b);
/* How many of a parameter's elements are in it, and the first of them; none: from is 0. */
int64_t   mt_portion_part(const mt_portion *p, int param, int64_t numel, int64_t *from);

#endif
