/* gaps.h — what compute waited for in a measured step, by the names that the walk has.
 *
 *     mt_gaps(slices, n, begin, end, busy, idle);
 *
 * A gap in front of a window ends when what the window needs is there: its unit's weights, what it
 * kept, or room for gradients and activations. Whichever came last is to blame for its own time,
 * and the update that a fetch waited for is for the time before. While the thread that launches
 * windows waited for a buffer to hand gradients over in, it is the update's that gave one back, or
 * the sums'. What is left is the host's own, as is a gap at the step's end.
 *
 * Threads: any; nothing is shared.
 */
#ifndef MT_GAPS_H
#define MT_GAPS_H

#include "../core/timeline.h"

typedef struct mt_slice {        /* a piece of work on a lane, in ns; unit: -1, none */
    int64_t lane, work, unit, begin, end;
} mt_slice;

/* Nanoseconds of [begin, end) in which each lane worked, and in which compute stood still, by the
 * lane it waited for; the last: the host's own. Slices are in the order of lanes, each lane's in
 * that of time. busy: [MT_LANE_COUNT]; idle: [MT_LANE_COUNT + 1]. */
void mt_gaps(const mt_slice *slices, int64_t n, int64_t begin, int64_t end, int64_t *busy,
             int64_t *idle);

#endif
