/* gaps.c — each gap of compute, from its window's need back to what that waited for. */
#include "gaps.h"

#include <string.h>

#define JITTER_NS 50000          /* times on two queues are compared to within this */
#define NO_LANE   (-1)

typedef struct gaps {
    const mt_slice *slice;
    int64_t  first[MT_LANE_COUNT + 1];   /* where each lane's begin */
    int64_t *idle;
    int64_t  told;               /* of the gap at work: ns that have a cause */
    int      longest;            /* of a hand-over's wait: the cause of most, and how long */
    int64_t  longest_ns;
} gaps;

static int64_t least(int64_t a, int64_t b) { return b < a ? b : a; }
static int64_t most(int64_t a, int64_t b) { return b > a ? b : a; }

/* The lane's slices that have a part in [a, b): from *from to before *to. */
static void between(const gaps *g, int lane, int64_t a, int64_t b, int64_t *from, int64_t *to)
{
    int64_t low = g->first[lane], high = g->first[lane + 1];

    while (low < high) {
        int64_t mid = (low + high) / 2;

        if (g->slice[mid].end > a)
            high = mid;
        else
            low = mid + 1;
    }
    *from = low;
    for (high = g->first[lane + 1]; low < high;) {
        int64_t mid = (low + high) / 2;

        if (g->slice[mid].begin >= b)
            high = mid;
        else
            low = mid + 1;
    }
    *to = low;
}

/* Nanoseconds of [a, b) that a lane worked; waits are no work. */
static int64_t busy_in(const gaps *g, int lane, int64_t a, int64_t b)
{
    int64_t i, end, ns = 0;

    if (lane == NO_LANE || b <= a)
        return 0;
    for (between(g, lane, a, b, &i, &end); i < end; i++)
        if (g->slice[i].work != MT_WORK_WAIT)
            ns += most(0, least(g->slice[i].end, b) - most(g->slice[i].begin, a));
    return ns;
}

/* The lane's last slice of work on `like`'s unit (NULL: on any) that ended in the gap (a, b]. */
static const mt_slice *over_in(const gaps *g, int lane, int64_t a, int64_t b, const mt_slice *like)
{
    int64_t begin, i;

    for (between(g, lane, a, b + JITTER_NS, &begin, &i); i > begin; i--) {
        const mt_slice *s = &g->slice[i - 1];

        if (s->work != MT_WORK_WAIT && a < s->end && s->end <= b + JITTER_NS &&
            (like == NULL || s->unit == like->unit))
            return s;
    }
    return NULL;
}

static void blame(gaps *g, int lane, int64_t ns)
{
    if (lane == NO_LANE)
        return;
    g->told += ns;
    g->idle[lane] += most(ns, 0);
    if (ns > g->longest_ns)
        g->longest = lane, g->longest_ns = ns;
}

/* Each lane's work, as far as those before it have left any of the gap. */
static void share(gaps *g, int64_t a, int64_t b, int one, int two, int three)
{
    const int lanes[] = { one, two, three };
    int64_t   rest = b - a;

    for (int i = 0; i < 3; i++) {
        int64_t ns = least(busy_in(g, lanes[i], a, b), rest);

        blame(g, lanes[i], ns);
        rest -= ns;
    }
}

/* At b an update was over: the lane's work or that of the one its states come by, whichever was at
 * it longer, as they go on beside each other; for the rest the gradients it waited for, and the
 * other lane. */
static void blame_update(gaps *g, int lane, int64_t a, int64_t b)
{
    int source = lane == MT_LANE_DISK_UPDATE ? MT_LANE_DISK
                 : lane == MT_LANE_DEVICE ? MT_LANE_THROUGH : NO_LANE;  /* of states that arrive */

    if (busy_in(g, source, a, b) > busy_in(g, lane, a, b))
        share(g, a, b, source, MT_LANE_D2H, lane);
    else
        share(g, a, b, lane, MT_LANE_D2H, source);
}

/* The lane that an update of the unit on the host ended on in (a, b], the end in *end. */
static int updated_on(const gaps *g, int64_t a, int64_t b, const mt_slice *like, int64_t *end)
{
    static const int lanes[] = { MT_LANE_HOST, MT_LANE_THROUGH, MT_LANE_DISK_UPDATE };

    for (int i = 0; i < 3; i++) {
        const mt_slice *s = over_in(g, lanes[i], a, b, like);

        if (s != NULL) {
            *end = s->end;
            return lanes[i];
        }
    }
    return NO_LANE;
}

/* A hand-over's wait goes to the update of the unit it names, or, where it names none, to the sums
 * of earlier gradients. For the host an update on the device is over when it is queued, behind
 * those that the updater has to make; its gradients wait for those on the device. */
static void before_launch(gaps *g, int64_t a, int64_t b, const mt_slice *wait)
{
    int64_t told = g->told, end;
    int     lane = updated_on(g, wait->begin, wait->end, wait, &end);

    g->longest = lane != NO_LANE ? lane : wait->unit >= 0 ? MT_LANE_HOST : MT_LANE_SUM;
    g->longest_ns = 0;
    if (lane != NO_LANE)
        blame_update(g, lane, a, b);
    else if (wait->unit >= 0)
        share(g, a, b, MT_LANE_HOST, MT_LANE_D2H, MT_LANE_DEVICE);
    else
        share(g, a, b, MT_LANE_SUM, MT_LANE_D2H, NO_LANE);
    blame(g, g->longest, b - a - (g->told - told));      /* and the rest of the wait */
}

/* Before a fetch began, its unit's update ran, or the copies before it, or the disk read its
 * weights. */
static void before_fetch(gaps *g, int64_t a, const mt_slice *fetch)
{
    int64_t         end, copies = busy_in(g, MT_LANE_H2D, a, fetch->begin);
    int             lane = updated_on(g, a, fetch->begin, fetch, &end);
    const mt_slice *read = over_in(g, MT_LANE_DISK, a, fetch->begin, fetch);

    if (lane != NO_LANE) {
        blame_update(g, lane, a, least(end, fetch->begin));
        return;
    }
    blame(g, MT_LANE_H2D, copies);
    if (read != NULL && read->work == MT_WORK_READ)
        blame(g, MT_LANE_DISK, least(busy_in(g, MT_LANE_DISK, a, fetch->begin),
                                     most(fetch->begin - a - copies, 0)));
}

/* The part that is not the host's own, where it launched the window at a or later. */
static void before_window(gaps *g, int64_t a, int64_t b, const mt_slice *window)
{
    /* What it needs; any: of whatever unit. DEVICE: of a unit that lives there. The computing
     * thread waits for the file by window. */
    const struct { int lane, work, any; } needs[] = {
        { MT_LANE_H2D, NO_LANE, 0 }, { MT_LANE_DEVICE, NO_LANE, 0 },
        { MT_LANE_D2H, MT_WORK_BACKWARD, 1 }, { MT_LANE_OUT, MT_WORK_FORWARD, 1 },
        { MT_LANE_BACK, NO_LANE, 0 }, { MT_LANE_SPILL, NO_LANE, 1 },
    };
    const mt_slice *last = NULL;
    int             lane = NO_LANE;

    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) {
        const mt_slice *s = needs[i].work != NO_LANE && needs[i].work != window->work ? NULL
                            : over_in(g, needs[i].lane, a, b, needs[i].any ? NULL : window);

        if (s != NULL && (last == NULL || s->end > last->end))
            last = s, lane = needs[i].lane;
    }
    if (last == NULL)
        return;
    if (lane == MT_LANE_DEVICE) {
        blame_update(g, lane, a, least(last->end, b));
        return;
    }
    blame(g, lane, least(last->end, b) - most(a, last->begin));
    if (lane == MT_LANE_H2D)
        before_fetch(g, a, last);
}

/* A gap before a window (NULL: a step's end), which was launched after the last hand-over's wait in
 * it. */
static void explain(gaps *g, int64_t a, int64_t b, const mt_slice *window)
{
    int64_t at = a, i, end;

    g->told = 0;
    for (between(g, MT_LANE_HAND, a, b, &i, &end); i < end; i++) {
        const mt_slice *wait = &g->slice[i];

        if (wait->end > b + JITTER_NS)
            continue;
        at = least(wait->end, b);
        before_launch(g, most(wait->begin, a), at, wait);
    }
    if (window != NULL)
        before_window(g, at, b, window);
    g->idle[MT_LANE_COUNT] += most(b - a - g->told, 0);
}

void mt_gaps(const mt_slice *slices, int64_t n, int64_t begin, int64_t end, int64_t *busy,
             int64_t *idle)
{
    gaps    g = { .slice = slices, .idle = idle };
    int64_t at = begin, i = 0, to;

    memset(idle, 0, (MT_LANE_COUNT + 1) * sizeof *idle);
    for (int lane = 0; lane < MT_LANE_COUNT; lane++) {
        g.first[lane] = i;
        while (i < n && slices[i].lane == lane)
            i++;
    }
    g.first[MT_LANE_COUNT] = i;
    for (int lane = 0; lane < MT_LANE_COUNT; lane++)
        busy[lane] = busy_in(&g, lane, begin, end);
    for (between(&g, MT_LANE_COMPUTE, begin, end, &i, &to); i < to; i++) {
        explain(&g, at, most(slices[i].begin, begin), &slices[i]);
        at = most(at, slices[i].end);
    }
    explain(&g, at, end, NULL);
}
