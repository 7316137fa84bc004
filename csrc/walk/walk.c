/* walk.c — goes through a step once, or a few times until what it leaves to the next is steady.
 *
 * Each queue is a number: when it is through with what it was given so far. Handing work over takes
 * the latest of what it waits for, adds what it takes, and sets the number. */
#include "walk.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define STEADY_STEPS 3       /* until what updates leave to the next forward hardly changes */
#define STEADY_SHARE 0.9     /* of a step, the next takes that at least (0.953, of 5,500 tried) */
#define PEER_SHARE 0.5  /* copies between devices hold up compute by so much of what the exchange of
                         * as many bytes does: 1.1 ms of 233 MB on H200s, for 2.1 */
#define NOBODY  (-1)    /* a row: nothing held it up */

typedef struct walker {
    const mt_walk  *in;
    const mt_step  *step;        /* the schedule's */
    mt_walk_events *events;      /* NULL: nobody asks */

    /* [n_units] */
    double  *done;               /* when its update is over */
    double  *left;               /* the same, of the step before, from this one's beginning; of
                                  * several ranks, when a unit's new weights are on the host */
    double  *ready, *queued;     /* when its copy is over, and when it is in the queue */
    int64_t *late;               /* the row that held the copy up */

    int64_t *guest;              /* [n_guests] units whose states arrive */
    int64_t *due;                /* [n_guests] behind how many hand-overs they are asked for */
    int64_t  n_guests;

    /* [n_windows], of what windows keep in host memory */
    double  *back;               /* when it is on the device again; NAN: not asked for */
    double  *written;            /* when it is in the file */
    int64_t *back_for;           /* the row that held its copy back up */
    int64_t *is_out;             /* 1: it left */
    int64_t *spill_at, *spill;   /* when the window's spill comes, of all; the window of each */

    double  *landed;             /* [depth][3] when the last hand-overs had landed: were exchanged
                                    within their machine, between machines, and home */
    double  *added;              /* [stagings] when the last sums were made */
    double  *lent_free;          /* [n_lent] when a buffer is given back */
    int64_t *lent_for;           /* [n_lent] the row that it waits for */
    int64_t *lent_n;             /* [n_lent] at the first of a size: how often one was lent */

    /* From here on all is zero when a walk begins. */
    int64_t  at, uses;           /* the schedule's next step; COMPUTEs passed */
    int64_t  n_landed, n_added, n_spills;
    int64_t  last_out;           /* the window whose bundle left last; NOBODY */

    /* When each queue is through. launch: Python; guests: copies of states that arrive; drive: the
     * file of activations. */
    double   run, launch, h2d, mover, d2h, adder, swap_out, guests, drive;
    double   exchange, network, spread;  /* gradients in their machine, between; new weights */
    double   lowering;                   /* until then new weights go down from the device */
    double   gather;             /* parts of weights, in their machine */
    double   owed;               /* seconds by which what is computed next is held up */
    double   moved;              /* bytes that crossed to and from the host's memory */
    double   lane[MT_LANE_COUNT];    /* of updates that follow their gradients */
    double   updated;            /* until then AdamW has the host's memory */
    int64_t  held, out_for;      /* rows: what Python, and the last copy out, last waited for */
    int64_t  opened;             /* windows so far */
    int64_t  handed, lifted;     /* hand-overs of the last micro-batch; guests asked for */
    double   update_s[MT_WALK_ROWS]; /* of all updates */
    double   busy[MT_WALK_ROWS], idle[MT_WALK_ROWS];
    double   forwards;           /* seconds of them */
    double   ends[3];            /* run, at the end of the last three micro-batches */
} walker;

static double later(double a, double b) { return b > a ? b : a; }
static double least(double a, double b) { return b < a ? b : a; }

static void note(walker *t, int64_t row, int64_t of, double begin, double end)
{
    mt_walk_events *e = t->events;

    if (e == NULL)
        return;
    if (e->n < e->cap)
        e->event[e->n] = (mt_walk_event){ row, of, begin, end };
    e->n++;
}

/* ---- what goes in ----------------------------------------------------------------------- */

static mt_status check_list(const mt_walk *in, const mt_walk_list *list, const char *what)
{
    if (list->begin[0] != 0)
        return MT_FAIL(MT_EINVAL, "walk: %s begin at %lld, not at 0", what,
                       (long long)list->begin[0]);
    for (int64_t w = 0; w < in->n_windows; w++)
        if (list->begin[w + 1] < list->begin[w])
            return MT_FAIL(MT_EINVAL, "walk: %s of window %lld end before they begin", what,
                           (long long)w);
    for (int64_t i = 0; i < list->begin[in->n_windows]; i++)
        if (list->item[i] < 0 || list->item[i] >= in->n_units)
            return MT_FAIL(MT_EINVAL, "walk: %s name unit %lld of %lld", what,
                           (long long)list->item[i], (long long)in->n_units);
    return MT_OK;
}

static mt_status check_units(const mt_walk *in)
{
    for (int64_t u = 0; u < in->n_units; u++) {
        int64_t on = in->updated_on[u];

        if (on != MT_LANE_HOST && on != MT_LANE_DEVICE && on != MT_LANE_DISK &&
            on != MT_LANE_THROUGH)
            return MT_FAIL(MT_EINVAL,
                           "walk: unit %lld is updated on lane %lld; host update, device "
                           "update, disk and through are known", (long long)u, (long long)on);
        if (on != MT_LANE_DEVICE && in->n_lent > 0 && in->lent[0] < in->gradients[u])
            return MT_FAIL(MT_EINVAL, "walk: %lld bytes of unit %lld's gradients fit no buffer, of "
                           "which the largest has %lld", (long long)in->gradients[u],
                           (long long)u, (long long)in->lent[0]);
    }
    for (int64_t i = 1; i < in->n_lent; i++)
        if (in->lent[i] > in->lent[i - 1])
            return MT_FAIL(MT_EINVAL, "walk: buffer %lld is larger than the one before it",
                           (long long)i);
    return MT_OK;
}

static mt_status check_numbers(const mt_walk *in)
{
    if (in->n_windows < 0 || in->n_units < 0 || in->n_lent < 0 || in->n_slots < 0)
        return MT_FAIL(MT_EINVAL, "walk: %lld windows, %lld units, %lld buffers, %lld slots",
                       (long long)in->n_windows, (long long)in->n_units, (long long)in->n_lent,
                       (long long)in->n_slots);
    if (in->micro < 1 || in->shown < 1 || in->shown > in->micro ||
        (in->shown < in->micro && in->shown < 3))
        return MT_FAIL(MT_EINVAL, "walk: %lld of %lld micro-batches: all, or at least 3",
                       (long long)in->shown, (long long)in->micro);
    if (in->depth < 1 || in->stagings < 1 || in->bays < 1 || in->parts < 1)
        return MT_FAIL(MT_EINVAL,
                       "walk: depth %lld, %lld stagings, %lld bays, %lld parts: at least 1 each",
                       (long long)in->depth, (long long)in->stagings, (long long)in->bays,
                       (long long)in->parts);
    return MT_OK;
}

/* Where the schedule's next COMPUTE stands, from `at` on; n: there is none. */
static int64_t next_use(const mt_step *steps, int64_t n, int64_t at)
{
    while (at < n && steps[at].kind != MT_COMPUTE)
        at++;
    return at;
}

/* The next COMPUTEs are those of window w. *at: behind them. */
static mt_status check_window(const mt_walk *in, const mt_walk_list *list, int64_t w,
                              const mt_step *steps, int64_t n, int64_t *at)
{
    for (int64_t i = list->begin[w]; i < list->begin[w + 1]; i++) {
        if (in->updated_on[list->item[i]] == MT_LANE_DEVICE)
            continue;
        *at = next_use(steps, n, *at);
        if (*at == n || steps[*at].unit != list->item[i])
            return MT_FAIL(MT_EINVAL, "walk: window %lld uses unit %lld, which is not what the "
                           "schedule's step %lld of %lld does", (long long)w,
                           (long long)list->item[i], (long long)*at, (long long)n);
        ++*at;
    }
    return MT_OK;
}

/* The schedule names units that exist, and has each use in its order. */
static mt_status check_schedule(const mt_walk *in, const mt_step *steps, int64_t n)
{
    int64_t at = 0;

    for (int64_t i = 0; i < n; i++)
        if (steps[i].unit < 0 || steps[i].unit >= in->n_units)
            return MT_FAIL(MT_EINVAL, "walk: the schedule names unit %d of %lld", steps[i].unit,
                           (long long)in->n_units);
    for (int64_t micro = 0; micro < in->shown; micro++) {
        for (int64_t w = 0; w < in->n_windows; w++)
            MT_DO(check_window(in, &in->units, w, steps, n, &at));
        for (int64_t w = in->n_windows - 1; w >= 0; w--)
            if (in->backward_s[w] != 0.0)
                MT_DO(check_window(in, &in->again, w, steps, n, &at));
    }
    return MT_OK;
}

static mt_status check_all(const mt_walk *in)
{
    MT_DO(check_numbers(in));
    MT_DO(check_list(in, &in->units, "units"));
    MT_DO(check_list(in, &in->again, "units of backward"));
    MT_DO(check_list(in, &in->leaving, "hand-overs"));
    MT_DO(check_units(in));
    return MT_OK;
}

/* ---- memory ----------------------------------------------------------------------------- */

static double *doubles(double **from, int64_t n)
{
    double *p = *from;

    *from += n;
    return p;
}

static int64_t *numbers(int64_t **from, int64_t n)
{
    int64_t *p = *from;

    *from += n;
    return p;
}

/* Two blocks, cut into all arrays: a search walks thousands of times. */
static mt_status walker_open(walker *t, const mt_walk *in, double **d, int64_t **n)
{
    int64_t  u = in->n_units, w = in->n_windows, lent = in->n_lent;
    double  *from;
    int64_t *also;

    *d = calloc((size_t)(4 * u + 2 * w + 3 * in->depth + in->stagings + lent) + 1,
                sizeof **d);
    *n = calloc((size_t)(3 * u + 4 * w + 2 * lent) + 1, sizeof **n);
    if (*d == NULL || *n == NULL)
        return MT_FAIL(MT_ENOMEM, "walk: no memory for %lld windows of %lld units", (long long)w,
                       (long long)u);
    from = *d;
    t->done = doubles(&from, u);
    t->left = doubles(&from, u);
    t->ready = doubles(&from, u);
    t->queued = doubles(&from, u);
    t->back = doubles(&from, w);
    t->written = doubles(&from, w);
    t->landed = doubles(&from, 3 * in->depth);
    t->added = doubles(&from, in->stagings);
    t->lent_free = doubles(&from, lent);
    also = *n;
    t->late = numbers(&also, u);
    t->guest = numbers(&also, u);
    t->due = numbers(&also, u);
    t->back_for = numbers(&also, w);
    t->is_out = numbers(&also, w);
    t->spill_at = numbers(&also, w);
    t->spill = numbers(&also, w);
    t->lent_for = numbers(&also, lent);
    t->lent_n = numbers(&also, lent);
    return MT_OK;
}

/* ---- copies ----------------------------------------------------------------------------- */

/* When a copy ends: slower while AdamW has the host's memory. */
static double copied(walker *t, double start, double bytes, double rate)
{
    double slow = least(rate, t->in->busy);

    t->moved += bytes;
    if (start < t->updated) {
        if (bytes <= (t->updated - start) * slow)
            return start + bytes / slow;
        bytes -= (t->updated - start) * slow;
        start = t->updated;
    }
    return start + bytes / rate;
}

/* ---- between machines ------------------------------------------------------------------- */

/* When it is over: behind all that the queue was given before. */
static double over_network(walker *t, double *queue, int64_t u, double ready, double seconds)
{
    double begin = later(*queue, ready);

    *queue = begin + seconds;
    t->busy[MT_WALK_NETWORK] += seconds;
    note(t, MT_WALK_NETWORK, u, begin, *queue);
    return *queue;
}

/* ---- updates ---------------------------------------------------------------------------- */

/* States that arrived go down behind their updates, beside the forward. passed: seconds of updates
 * that pass through the device. */
static void guests_leave(walker *t, double passed)
{
    const mt_walk *in = t->in;
    int            any = 0;

    for (int64_t u = 0; u < in->n_units; u++)
        if (in->visiting[u] > 0) {
            double start = later(t->guests, t->run);

            t->guests = copied(t, start, (double)in->visiting[u], in->d2h);
            note(t, MT_LANE_THROUGH, u, start, t->guests);
            any = 1;
        }
    t->update_s[MT_LANE_THROUGH] = passed + (any ? t->guests - t->run : 0.0);
    t->d2h = t->guests;
}

/* New weights of a unit at home on several GPUs' devices go down to the host behind its update, in
 * a queue of their own. */
static void bring_down(walker *t, int64_t u, double *down)
{
    double start = later(*down, t->done[u]);

    *down = t->left[u] = copied(t, start, (double)t->in->lowered[u], t->in->d2h);
    note(t, MT_LANE_THROUGH, u, start, *down);
}

/* The others' parts come from their devices, where these reach each other, which holds up compute;
 * else from the host. */
static void bring_up(walker *t, int64_t u, double *up)
{
    const mt_walk *in = t->in;
    int            peers = in->peers > 0.0, row = peers ? MT_WALK_EXCHANGE : MT_LANE_THROUGH;
    double         from = peers ? t->done[u] : later(t->done[u], t->left[u]);
    double         start = later(*up, from), bytes = (double)in->raised[u];

    *up = t->ready[u] = peers ? start + bytes / in->peers : copied(t, start, bytes, in->h2d);
    note(t, row, u, start, *up);
    t->queued[u] = from;
    t->late[u] = row;
    if (peers) {
        t->busy[row] += *up - start;
        t->owed += PEER_SHARE * in->lost_s[u];
    }
}

/* Of several machines, parts that each has updated go to all others, in the order in which they are
 * in host memory, which `left` says: when all have all of a unit. Gradients come later: where they
 * meet, neither is taken to slow the other down. */
static void spread(walker *t)
{
    const mt_walk *in = t->in;
    double         last = -1.0;
    int64_t        last_u = 0;

    for (;;) {
        int64_t next = NOBODY;

        for (int64_t u = 0; u < in->n_units; u++)
            if (in->spread_s[u] > 0.0 && !isnan(t->done[u]) &&
                (t->left[u] > last || (t->left[u] == last && u > last_u)) &&
                (next == NOBODY || t->left[u] < t->left[next]))
                next = u;
        if (next == NOBODY)
            return;
        last = t->left[next];
        last_u = next;
        t->done[next] = over_network(t, &t->spread, next, last, in->spread_s[next]);
    }
}

/* What several GPUs, or machines, have updated comes to all of them. */
static void new_weights(walker *t)
{
    const mt_walk *in = t->in;
    double         down = 0.0, up = 0.0;

    for (int64_t u = 0; u < in->n_units; u++)
        t->left[u] = t->done[u];
    for (int64_t i = 0; i < in->units.begin[in->n_windows]; i++) {
        int64_t u = in->units.item[i];

        if (in->updated_on[u] == MT_LANE_DEVICE && in->lowered[u] > 0 && t->left[u] == t->done[u])
            bring_down(t, u, &down);
    }
    spread(t);
    for (int64_t i = 0; i < in->units.begin[in->n_windows]; i++) {
        int64_t u = in->units.item[i];

        if (in->updated_on[u] == MT_LANE_DEVICE && in->raised[u] > 0 && t->ready[u] == 0.0)
            bring_up(t, u, &up);
    }
    t->lowering = down;
    t->update_s[MT_LANE_THROUGH] += in->peers > 0.0 ? down : later(down, up);
}

static void updates_on_disk(walker *t)
{
    for (int64_t u = 0; u < t->in->n_units; u++)
        if (t->in->updated_on[u] == MT_LANE_DISK) {
            t->update_s[MT_LANE_DISK] += t->in->disk_s[u];
            t->update_s[MT_LANE_DISK_UPDATE] += t->in->update_s[u];
        }
}

/* On the host, or what is computed of one elsewhere. */
static double update_s(const mt_walk *in, int64_t u)
{
    return in->update_s[u] * (in->updated_on[u] == MT_LANE_HOST ? in->stretch : 1.0);
}

/* One of a unit, in the forward's order: of units at home on the device there, at once. The others'
 * each behind those before it on the same lane. */
static void update_first(walker *t, int64_t u, double *now, double *passed)
{
    const mt_walk *in = t->in;
    double         begin = t->run;

    switch (in->updated_on[u]) {
    case MT_LANE_DEVICE:
        t->done[u] = t->run += in->update_s[u];
        note(t, MT_LANE_DEVICE, u, begin, t->run);
        return;
    case MT_LANE_DISK:
        begin = t->drive;
        t->done[u] = t->drive += later(in->update_s[u], in->disk_s[u]);
        break;
    case MT_LANE_THROUGH:
        begin = *passed;
        t->done[u] = *passed += in->through_s[u];
        break;
    default:
        if (in->update_s[u] == 0.0)             /* frozen: nothing to wait for */
            return;
        begin = *now;
        t->done[u] = *now += update_s(in, u);
    }
    note(t, in->updated_on[u], u, begin, t->done[u]);
}

static void updates_first(walker *t)
{
    const mt_walk *in = t->in;
    double         now = 0.0, passed = 0.0;

    for (int64_t u = 0; u < in->n_units; u++) {
        t->done[u] = NAN;
        t->ready[u] = 0.0;
    }
    for (int64_t i = 0; i < in->units.begin[in->n_windows]; i++) {
        int64_t u = in->units.item[i];

        if (isnan(t->done[u])) {
            t->done[u] = 0.0;
            update_first(t, u, &now, &passed);
        }
    }
    t->updated = later(now, passed);
    t->update_s[MT_LANE_HOST] = now;
    t->update_s[MT_LANE_DEVICE] = t->run;
    updates_on_disk(t);
    guests_leave(t, passed);
    new_weights(t);
}

/* Updates that follow their gradients: those of the backward before that are not over. */
static void updates_behind(walker *t)
{
    const mt_walk *in = t->in;
    double         all = 0.0, away = 0.0, passed = 0.0;

    for (int64_t u = 0; u < in->n_units; u++) {
        int64_t on = in->updated_on[u];

        t->done[u] = t->left[u];
        t->lane[on] = later(t->lane[on], t->left[u]);
        all += in->update_s[u];
        away += on != MT_LANE_DEVICE ? in->update_s[u] : 0.0;
        passed += on == MT_LANE_THROUGH ? in->through_s[u] : 0.0;
        t->update_s[MT_LANE_HOST] += on == MT_LANE_HOST ? update_s(in, u) : 0.0;
    }
    t->updated = later(t->lane[MT_LANE_HOST], t->lane[MT_LANE_THROUGH]);
    t->update_s[MT_LANE_DEVICE] = all - away;
    updates_on_disk(t);
    t->drive = t->lane[MT_LANE_DISK];
    guests_leave(t, passed);
}

/* ---- fetches ---------------------------------------------------------------------------- */

/* Weights come from the drive, a piece read while another is copied; the mover is at it until the
 * last is read. What the drive has to do for updates waits so long. */
static void read_weights(walker *t, int64_t u, double start)
{
    double took = t->in->read_s[u];

    if (start + took > t->h2d) {
        t->h2d = start + took;
        t->late[u] = MT_LANE_DISK;
    }
    t->mover = later(t->mover, start + took);
    t->busy[MT_LANE_DISK] += took;
    for (int64_t i = 0; i < t->in->n_units; i++)
        if (t->in->updated_on[i] == MT_LANE_DISK && t->done[i] > start)
            t->done[i] += took;
    if (t->lane[MT_LANE_DISK] > start)
        t->lane[MT_LANE_DISK] += took;
}

/* The row that new weights wait for: the one that takes longer. */
static int64_t updated_by(const mt_walk *in, int64_t u)
{
    return in->spread_s[u] > in->update_s[u] ? MT_WALK_NETWORK : in->updated_on[u];
}

/* Behind its copy a part goes to the other GPUs, and theirs come, in a queue of their own. When all
 * are there. On the links to the host they take both ways, as gradients do. */
static double gathered(walker *t, int64_t u)
{
    double begin = later(t->gather, t->h2d), took = t->in->gather_s[u];

    if (took == 0.0)
        return t->h2d;
    if (begin > t->h2d)
        t->late[u] = MT_WALK_EXCHANGE;
    t->gather = begin + took;
    if (t->in->on_link)
        t->h2d = t->gather;
    t->busy[MT_WALK_EXCHANGE] += took;
    note(t, MT_WALK_EXCHANGE, u, begin, t->gather);
    t->owed += t->in->held_s[u];
    return t->gather;
}

static void fetch(walker *t, int64_t u, double rate, double handed, double freed)
{
    double start;

    t->mover = later(later(t->mover, handed), t->done[u]);
    start = later(later(t->h2d, t->mover), freed);
    t->late[u] = start == t->done[u] ? updated_by(t->in, u) : MT_LANE_H2D;
    t->h2d = copied(t, start, (double)t->in->weights[u] / (double)t->in->parts, rate);
    t->busy[MT_LANE_H2D] += t->h2d - start;
    if (t->in->read_s[u] > 0.0)
        read_weights(t, u, start);
    note(t, MT_LANE_H2D, u, start, t->h2d);
    t->queued[u] = t->mover;
    t->ready[u] = gathered(t, u);
}

/* Hands over the copies that stand before the next use in the schedule. Each waits for its unit's
 * update, then, on the device, for all that was launched so far (FREED). */
static void hand_over(walker *t, double rate)
{
    double handed = t->launch, freed = t->uses > 0 ? t->run : 0.0;

    for (; t->step[t->at].kind != MT_COMPUTE; t->at++)
        if (t->step[t->at].kind == MT_FETCH)
            fetch(t, t->step[t->at].unit, rate, handed, freed);
    t->at++;
    t->uses++;
}

/* ---- windows ---------------------------------------------------------------------------- */

/* Compute stands still. */
static void stand(walker *t, double until, int64_t row)
{
    if (until > t->run) {
        t->idle[row] += until - t->run;
        t->run = until;
    }
}

/* When a window's weights are there: not before begin. *row: what it waits for. Its kernels are
 * launched once its copies are in their queue. */
static double weights_of(walker *t, const mt_walk_list *list, int64_t w, double begin,
                         int64_t *row)
{
    for (int64_t i = list->begin[w]; i < list->begin[w + 1]; i++) {
        int64_t u = list->item[i];

        if (t->in->updated_on[u] != MT_LANE_DEVICE)
            hand_over(t, list == &t->in->units ? t->in->h2d : t->in->both);
        else if (t->in->raised[u] == 0)
            continue;
        t->launch = later(t->launch, t->queued[u]);
        if (t->ready[u] > begin) {
            begin = t->ready[u];
            *row = t->late[u];
        }
    }
    return begin;
}

static void window(walker *t, const mt_walk_list *list, int64_t w, double seconds, double host_s)
{
    int64_t row = NOBODY;
    double  begin;

    if (++t->opened == t->in->stay)
        t->launch = later(t->launch, t->guests);
    begin = weights_of(t, list, w, t->run, &row);
    if (t->launch > begin) {
        begin = t->launch;
        row = t->held;
    }
    t->held = MT_WALK_OWN;
    if (row != NOBODY)
        t->idle[row] += begin - t->run;
    t->launch += host_s;
    seconds += t->owed;
    t->owed = 0.0;
    t->busy[MT_LANE_COMPUTE] += seconds;
    t->busy[MT_WALK_OWN] += host_s;
    t->run = begin + seconds;
    note(t, MT_LANE_COMPUTE, w, begin, t->run);
    stand(t, t->launch, MT_WALK_OWN);
}

/* ---- gradients -------------------------------------------------------------------------- */

/* The buffer for a unit's gradients: its number. Python waits for the one that was lent first.
 * Those of a size are lent in turn. */
static int64_t borrow(walker *t, int64_t u)
{
    const int64_t *bytes = t->in->lent;
    int64_t        first = 0, end = t->in->n_lent, n, slot;

    while (bytes[end - 1] < t->in->gradients[u])
        end--;
    while (bytes[first] > bytes[end - 1])
        first++;
    n = t->lent_n[first]++;
    slot = first + n % (end - first);
    if (n < end - first)
        return slot;
    if (t->lent_free[slot] > t->launch) {
        t->launch = t->lent_free[slot];
        t->held = t->lent_for[slot];
    }
    t->d2h = later(t->d2h, t->lent_free[slot]);
    return slot;
}

/* The unit's update begins when its gradients have landed, behind those before it on its lane. */
static void follow(walker *t, int64_t u, int64_t buffer)
{
    const mt_walk *in = t->in;
    int64_t        on = in->updated_on[u];
    double         begin = later(t->lane[on], t->d2h);
    double         disk_s = on == MT_LANE_DISK ? in->disk_s[u] : 0.0;

    t->lane[on] = t->done[u] = begin + (on == MT_LANE_THROUGH ? in->through_s[u]
                                                              : later(update_s(in, u), disk_s));
    note(t, on, u, begin, t->done[u]);
    if (on != MT_LANE_DISK)
        t->updated = later(t->updated, t->done[u]);
    t->lent_free[buffer] = t->done[u];
    t->lent_for[buffer] = on;
}

static void add_up(walker *t, int64_t u)
{
    double begin = later(t->adder, t->d2h);

    t->adder = begin + t->in->add_s[u];
    note(t, MT_LANE_SUM, u, begin, t->adder);
    t->busy[MT_LANE_SUM] += t->in->add_s[u];
    t->added[t->n_added++ % t->in->stagings] = t->adder;
}

static void send(walker *t, int64_t u, int adding)
{
    double start = t->d2h;

    if (adding && t->n_added >= t->in->stagings)        /* no staging buffer is free */
        start = later(start, t->added[t->n_added % t->in->stagings]);
    t->d2h = copied(t, start, (double)t->in->gradients[u], t->in->both);
    note(t, MT_LANE_D2H, u, start, t->d2h);
    t->busy[MT_LANE_D2H] += t->d2h - start;
    if (adding)
        add_up(t, u);
}

/* Compute waits until gradients are exchanged, and home. */
static void stand_until(walker *t, double exchanged, double summed, double home)
{
    stand(t, exchanged, MT_WALK_EXCHANGE);
    stand(t, summed, MT_WALK_NETWORK);
    stand(t, home, MT_LANE_D2H);
}

/* Python is no more than `depth` hand-overs ahead (LANDED). */
static void land(walker *t)
{
    double *landed = &t->landed[3 * (t->n_landed % t->in->depth)];
    double  before[3] = { landed[0], landed[1], landed[2] };

    landed[0] = t->exchange;
    landed[1] = t->network;
    landed[2] = t->d2h;
    if (t->n_landed++ >= t->in->depth)
        stand_until(t, before[0], before[1], before[2]);
}

/* A unit's gradients go to their owners, which add them up: when the sums are there. On the links
 * to the host they take both ways, and stand in the queue of what goes home. */
static double exchange(walker *t, int64_t u)
{
    const mt_walk *in = t->in;
    double         begin = later(t->exchange, t->run);

    if (in->exchange_s[u] == 0.0 && in->network_s[u] == 0.0)
        return t->run;
    if (in->on_link)
        begin = later(begin, t->d2h);
    t->exchange = begin + in->exchange_s[u];
    t->busy[MT_WALK_EXCHANGE] += in->exchange_s[u];
    note(t, MT_WALK_EXCHANGE, u, begin, t->exchange);
    if (in->on_link) {
        t->d2h = t->exchange;
        t->h2d = later(t->h2d, begin) + in->exchange_s[u];
    }
    t->owed += in->lost_s[u];
    if (in->network_s[u] == 0.0)
        return t->exchange;
    return over_network(t, &t->network, u, t->exchange, in->network_s[u]);
}

/* Gradients leave behind compute, and behind their exchange. Those of units at home on the device
 * take the same queue, and next to no time. */
static void offload(walker *t, int64_t u, int adding)
{
    int    kept = t->in->n_lent == 0, here = t->in->updated_on[u] == MT_LANE_DEVICE;
    double summed = exchange(t, u);

    t->d2h = later(t->d2h, summed);
    if (here && !kept) {
        note(t, MT_LANE_DEVICE, u, t->run, t->run + t->in->update_s[u]);
        t->run += t->in->update_s[u];
    }
    if (!here) {
        int64_t buffer = kept ? 0 : borrow(t, u);

        send(t, u, adding);
        if (!kept)
            follow(t, u, buffer);
    }
    land(t);
}

/* States that arrive for an update: up behind compute so far, beside what else crosses. */
static void lift(walker *t, int64_t u)
{
    double start = later(t->guests, t->run);

    t->guests = start + (double)t->in->visiting[u] / t->in->both;
    note(t, MT_LANE_THROUGH, u, start, t->guests);
    t->update_s[MT_LANE_THROUGH] += t->guests - start;
}

/* Behind a hand-over of the last micro-batch: those whose states are due. */
static void lift_due(walker *t)
{
    t->handed++;
    for (; t->lifted < t->n_guests && t->due[t->lifted] == t->handed; t->lifted++)
        lift(t, t->guest[t->lifted]);
}

/* Guests in the order of their hand-overs, each asked for `ahead` of these before its own. */
static void find_guests(walker *t)
{
    const mt_walk_list *l = &t->in->leaving;
    int64_t             at = 0;

    for (int64_t w = t->in->n_windows - 1; w >= 0; w--)
        for (int64_t i = l->begin[w]; i < l->begin[w + 1]; i++) {
            at++;
            if (t->in->visiting[l->item[i]] > 0) {
                t->guest[t->n_guests] = l->item[i];
                t->due[t->n_guests++] = at > t->in->ahead ? at - t->in->ahead : 1;
            }
        }
}

/* ---- what windows keep in host memory --------------------------------------------------- */

/* Python waits for a bay that is written; none is free of the bundles that left last. */
static double await_bay(walker *t, double start)
{
    double free_at;

    if (t->n_spills < t->in->bays)
        return start;
    free_at = t->written[t->spill[t->n_spills - t->in->bays]];
    if (free_at <= t->launch)
        return start;
    t->launch = free_at;
    t->held = MT_LANE_SPILL;
    if (free_at <= start)
        return start;
    t->out_for = MT_LANE_SPILL;
    return free_at;
}

static void write_out(walker *t, int64_t w)
{
    double took = (double)t->in->away[w] / t->in->write, begin = later(t->drive, t->swap_out);

    t->drive = t->written[w] = begin + took;
    note(t, MT_LANE_SPILL, w, begin, t->drive);
    t->busy[MT_LANE_SPILL] += took;
    t->spill_at[w] = t->n_spills;
    t->spill[t->n_spills++] = w;
}

/* A window's bundle leaves behind its forward; compute waits for the one before it, whose memory is
 * needed. */
static void leave(walker *t, int64_t w)
{
    double  before = t->swap_out, start = later(before, t->run);
    int64_t held = t->out_for;

    t->out_for = MT_LANE_OUT;
    if (t->in->spilled[w])
        start = await_bay(t, start);
    t->swap_out = copied(t, start, (double)t->in->away[w], t->in->both);
    if (start < t->lowering) {              /* new weights go down too: each at half of the rate */
        double beside = least(t->swap_out - start, t->lowering - start);

        t->swap_out += beside;
        t->lowering += beside;
    }
    note(t, MT_LANE_OUT, w, start, t->swap_out);
    t->busy[MT_LANE_OUT] += t->swap_out - start;
    if (t->in->spilled[w])
        write_out(t, w);
    if (t->last_out != NOBODY)
        stand(t, before, held);
    t->is_out[w] = 1;
    t->last_out = w;
}

/* When a bundle is in host memory: the latest are still; each that came back leaves its bay to
 * one more. */
static double read_in(walker *t, int64_t w)
{
    int64_t behind = t->spill_at[w] + t->in->bays;
    double  took, begin;

    if (behind >= t->n_spills)
        return 0.0;
    took = (double)t->in->away[w] / t->in->read;
    begin = t->back[t->spill[behind]];
    begin = later(t->drive, isnan(begin) ? 0.0 : begin);
    t->drive = begin + took;
    note(t, MT_LANE_SPILL, w, begin, t->drive);
    t->busy[MT_LANE_SPILL] += took;
    if (t->drive > t->launch) {
        t->launch = t->drive;
        t->held = MT_LANE_SPILL;
    }
    return t->drive;
}

/* A bundle begins to come back, unless it is the last that left: that is on the device still. */
static void come(walker *t, int64_t w)
{
    double start, there;

    if (!t->is_out[w] || w == t->last_out || !isnan(t->back[w]))
        return;
    start = later(t->h2d, t->run);
    t->back_for[w] = MT_LANE_BACK;
    if (t->in->spilled[w] && (there = read_in(t, w)) > start) {
        start = there;
        t->back_for[w] = MT_LANE_SPILL;
    }
    t->h2d = t->back[w] = copied(t, start, (double)t->in->away[w], t->in->both);
    note(t, MT_LANE_BACK, w, start, t->h2d);
    t->busy[MT_LANE_BACK] += t->h2d - start;
}

/* In front of a window's backward: its own bundle, and the one of the window before it. */
static void bundles(walker *t, int64_t w)
{
    if (t->last_out == NOBODY)
        return;
    come(t, w);
    if (!isnan(t->back[w]))
        stand(t, t->back[w], t->back_for[w]);
    if (w < t->last_out)
        stand(t, t->swap_out, MT_LANE_OUT);
    if (w > 0)
        come(t, w - 1);
}

/* A micro-batch begins: nothing is away. */
static void forget(walker *t)
{
    for (int64_t w = 0; w < t->in->n_windows; w++) {
        t->is_out[w] = 0;
        t->back[w] = NAN;
    }
    t->n_spills = 0;
    t->last_out = NOBODY;
}

/* ---- a step ----------------------------------------------------------------------------- */

static void forward(walker *t)
{
    for (int64_t w = 0; w < t->in->n_windows; w++) {
        window(t, &t->in->units, w, t->in->forward_s[w], t->in->forward_host_s[w]);
        if (t->in->away[w] > 0)
            leave(t, w);
    }
}

static void backward(walker *t, int adding, int last)
{
    const mt_walk      *in = t->in;
    const mt_walk_list *l = &in->leaving;

    for (int64_t w = in->n_windows - 1; w >= 0; w--) {
        bundles(t, w);
        if (in->backward_s[w] != 0.0)
            window(t, &in->again, w, in->backward_s[w], in->backward_host_s[w]);
        for (int64_t i = l->begin[w]; i < l->begin[w + 1]; i++) {
            offload(t, l->item[i], adding);
            if (last)
                lift_due(t);
        }
    }
}

static void restart(walker *t, double launch)
{
    memset((char *)t + offsetof(walker, at), 0, sizeof *t - offsetof(walker, at));
    t->launch = launch;
    t->held = MT_WALK_OWN;
    t->out_for = MT_LANE_OUT;
    for (int64_t i = 0; i < t->in->n_lent; i++)
        t->lent_n[i] = 0;
    if (t->events != NULL)
        t->events->n = 0;
}

static void walk_once(walker *t, double launch)
{
    restart(t, launch);
    if (t->in->n_lent > 0)
        updates_behind(t);
    else
        updates_first(t);
    for (int64_t micro = 0; micro < t->in->shown; micro++) {
        double began = micro > 0 ? t->run : 0.0;

        forget(t);
        forward(t);
        t->forwards += t->run - began;
        backward(t, micro > 0, micro == t->in->shown - 1);
        t->ends[micro % 3] = t->run;
    }
    stand_until(t, t->exchange, t->network, t->d2h);    /* all gradients have landed */
    stand(t, t->adder, MT_LANE_SUM);
    stand(t, t->guests, MT_LANE_THROUGH);
}

/* Updates that follow their gradients leave some to the next step: a few steps, until that is
 * steady. 0: it takes too long in any case. */
static int make_steady(walker *t, double ahead, double than)
{
    for (int i = 0; i < STEADY_STEPS; i++) {
        if (t->run * STEADY_SHARE >= than)
            return 0;
        for (int64_t u = 0; u < t->in->n_units; u++)
            t->left[u] = t->done[u] > t->run ? t->done[u] - t->run : 0.0;
        walk_once(t, ahead);
    }
    return 1;
}

/* Seconds in which the host's memory moves what a step needs: all GPUs of a machine have one. */
static double memory_of(const walker *t)
{
    const mt_walk *in = t->in;

    if (in->memory == 0.0)
        return 0.0;
    return in->memory_s + t->moved * ((double)in->micro / (double)in->shown) / in->memory;
}

/* Of a step, by its queues. */
static double queues_of(const walker *t)
{
    const mt_walk *in = t->in;
    int64_t        n = in->shown, more = in->micro - n;
    double         seconds = t->run, bound = 0.0, passed = 0.0;
    int            reads = 0;

    for (int64_t u = 0; u < in->n_units; u++) {
        passed += in->updated_on[u] == MT_LANE_THROUGH ? in->through_s[u] : 0.0;
        reads |= in->read_s[u] > 0.0;
    }
    if (more > 0)               /* those before the last are taken to be alike */
        seconds += (double)more * (t->ends[(n - 2) % 3] - t->ends[(n - 3) % 3]);
    if (in->n_lent > 0)         /* step after step */
        bound = later(later(t->update_s[MT_LANE_HOST], t->update_s[MT_LANE_DISK]), passed);
    if (reads)
        bound = later(bound, t->update_s[MT_LANE_DISK]
                             + t->busy[MT_LANE_DISK] * ((double)in->micro / (double)n));
    return later(seconds, bound);
}

static double seconds_of(const walker *t)
{
    return later(queues_of(t), memory_of(t)) + t->in->rest_s;
}

/* Of all micro-batches, from those that were walked through. What waits for updates is in the
 * first alone. */
static void tell(const walker *t, double seconds, mt_walked *out)
{
    double share = (double)t->in->micro / (double)t->in->shown;

    out->seconds = seconds;
    out->forward_s = t->forwards * share;
    for (int row = 0; row < MT_WALK_ROWS; row++) {
        int once = row == MT_LANE_HOST || row == MT_LANE_THROUGH;

        out->busy[row] = t->busy[row] * share + t->update_s[row];
        out->idle[row] = t->idle[row] * (once ? 1.0 : share);
    }
    out->busy[MT_WALK_MEMORY] = memory_of(t);
    out->idle[MT_WALK_MEMORY] = later(0.0, memory_of(t) - queues_of(t));
}

/* By how much Python is ahead of the device when a step begins: first by about half of a backward,
 * then by what it was at the end. */
static double ahead_of(walker *t)
{
    double ahead = 0.0, found;

    for (int64_t w = 0; w < t->in->n_windows; w++)
        ahead += t->in->backward_s[w];
    ahead = -ahead / 2.0;
    walk_once(t, ahead);
    found = t->launch - t->run;
    if (found <= ahead)
        return ahead;
    ahead = found < 0.0 ? found : 0.0;
    walk_once(t, ahead);
    return ahead;
}

/* ---- the schedule ----------------------------------------------------------------------- */

static int64_t use_window(const mt_walk *in, const mt_walk_list *list, int64_t w, int *trace,
                          int64_t n)
{
    for (int64_t i = list->begin[w]; i < list->begin[w + 1]; i++)
        if (in->updated_on[list->item[i]] != MT_LANE_DEVICE)
            trace[n++] = (int)list->item[i];
    return n;
}

static int64_t trace_of(const mt_walk *in, int *trace)
{
    int64_t n = 0;

    for (int64_t micro = 0; micro < in->shown; micro++) {
        for (int64_t w = 0; w < in->n_windows; w++)
            n = use_window(in, &in->units, w, trace, n);
        for (int64_t w = in->n_windows - 1; w >= 0; w--)
            if (in->backward_s[w] != 0.0)
                n = use_window(in, &in->again, w, trace, n);
    }
    return n;
}

static void sizes_of(const int64_t *bytes, int64_t n, size_t *sizes)
{
    for (int64_t i = 0; i < n; i++)
        sizes[i] = (size_t)bytes[i];
}

mt_status mt_walk_schedule(const mt_walk *in, mt_schedule **out)
{
    int      *trace MT_FREED = NULL;
    size_t   *sizes MT_FREED = NULL, most;

    MT_DO(check_all(in));
    most = (size_t)((in->units.begin[in->n_windows] + in->again.begin[in->n_windows]) * in->shown);
    trace = calloc(most + 1, sizeof *trace);
    sizes = calloc((size_t)(in->n_units + in->n_slots) + 1, sizeof *sizes);
    if (trace == NULL || sizes == NULL)
        return MT_FAIL(MT_ENOMEM, "walk: no memory for %zu uses", most);
    sizes_of(in->weights, in->n_units, sizes);
    sizes_of(in->slots, in->n_slots, sizes + in->n_units);
    return mt_schedule_build(trace, trace_of(in, trace), sizes, (int)in->n_units,
                             sizes + in->n_units, (int)in->n_slots, out);
}

/* ---- the door --------------------------------------------------------------------------- */

mt_status mt_walk_run(const mt_walk *in, const mt_step *steps, int64_t n_steps, double than,
                      mt_walk_events *events, mt_walked *out, int *under)
{
    walker    t = { .in = in, .step = steps, .events = events };
    double   *d MT_FREED = NULL, ahead, seconds;
    int64_t  *n MT_FREED = NULL;

    MT_DO(check_all(in));
    MT_DO(check_schedule(in, steps, n_steps));
    MT_DO(walker_open(&t, in, &d, &n));
    find_guests(&t);
    ahead = ahead_of(&t);
    *under = in->n_lent == 0 || make_steady(&t, ahead, than);
    seconds = seconds_of(&t);
    *under = *under && seconds < than;
    if (*under)
        tell(&t, seconds, out);
    return MT_OK;
}
