/* search.c — bounds for all that fits, walks for what may be best.
 *
 * Sums over units and windows are made in one order everywhere, so that choices which cost the same
 * have the same bits, and the first of them is preferred. */
#include "search.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDED (1 + 1e-9)   /* the walk adds a bound's numbers up in another order */

static double  later(double a, double b) { return b > a ? b : a; }
static double  least(double a, double b) { return b < a ? b : a; }
static int64_t most(int64_t a, int64_t b) { return b > a ? b : a; }

/* What follows from a row, of one number of micro-batches: its part of a bound. */
typedef struct row_bound {
    double  first_s;             /* of the first forward */
    double  top_s;               /* of a forward, from the last window whose weights come on */
    double  end_s;               /* from the last window to the norm */
    double  update_s;            /* of the busiest updates, where they run beside all of a step */
    double  behind_s, settled_s; /* that a backward waits for, and that are part of it */
    double  weights, again, gradients;  /* bytes that cross; weights that backward needs */
    double  add_s, longest_add_s;
    double  host_s, held_s;      /* of updates on the host; more for each byte that is kept there */
    double  read, read_again;    /* bytes of weights in the file, and of those backward needs */
    int64_t states;              /* bytes that arrive */
} row_bound;

typedef struct change {          /* window w keeps `mode`; linked: and the next one is LINKED */
    int w, mode, linked;
} change;

typedef struct track_bound {     /* a track's part of a bound */
    mt_track t;
    double   spill_s, forward_wait_s, backward_wait_s;
    mt_level first;
    const uint8_t *modes, *flags;
    mt_level *level;             /* [n_levels]; NULL: nobody asked */
    change   *by;                /* [n_levels] what a level differs in from the one before */
} track_bound;

typedef struct candidate {
    double    bound, order;      /* order: as if compute waited for nothing that is kept away */
    int64_t   spilled, top;      /* bytes in a file, and of all on the device */
    int64_t   number;            /* of micro-batches */
    mt_choice at;
} candidate;

typedef struct plan {            /* what a search makes of its input */
    const mt_search *in;
    int64_t *first, *last;       /* [n_units] windows that use it; first: -1, none does */
    int64_t *needed;             /* [n_units] 1: some backward that learns binds its weights */
    int64_t *order;              /* [n_order] units by first use */
    int64_t  n_order, buffers;   /* buffers: that gradients pass through with all units in RAM */

    /* for one walk: [n_units] ..., [n_windows] ... */
    int64_t *updated_on, *visiting, *slots, *lent, *sizes;
    double  *update_s, *disk_s, *through_s, *read_s, *over;
    double  *forward_s, *forward_host_s, *backward_s, *backward_host_s;
    int64_t *away, *spilled, *kept, *work;
    uint8_t *modes;

    void    *memory;             /* all arrays above */
    int64_t *totals;             /* [n_rows][n_rings] bytes of slots; NULL: nobody asked */
    candidate *found;
    int64_t  n_found, room;
} plan;

/* ---- slots ------------------------------------------------------------------------------ */

#define SMALL_CLASS_BYTES ((int64_t)64 << 20)

static int larger_first(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x < y) - (x > y);
}

static int64_t sort_sizes(int64_t *sizes, int64_t n)
{
    qsort(sizes, (size_t)n, sizeof *sizes, larger_first);
    while (n > 0 && sizes[n - 1] <= 0)
        n--;
    return n;
}

static int64_t plan_sorted(const int64_t *sizes, int64_t n, int64_t ring, int64_t *out)
{
    int64_t made = 0, i = 0, left = 0;

    for (int64_t k = 0; k < n; k++)
        left += sizes[k];
    while (i < n) {
        int64_t top = sizes[i], members = 0;

        if (left <= SMALL_CLASS_BYTES && ring > 2) {
            memcpy(out + made, sizes + i, (size_t)(n - i) * sizeof *out);
            return made + n - i;
        }
        for (; i < n && 2 * sizes[i] >= top; i++) {
            left -= sizes[i];
            if (members++ < ring)
                out[made++] = top;
        }
    }
    return made;
}

int64_t mt_plan_slots(int64_t *sizes, int64_t n, int64_t ring, int64_t *out)
{
    return plan_sorted(sizes, sort_sizes(sizes, n), ring, out);
}

/* Sizes of what is fetched at once, of units at these homes. Returns how many. */
static int64_t sizes_of(const mt_search *in, const uint8_t *homes, int64_t *sizes)
{
    int64_t n = 0;

    for (int64_t u = 0; u < in->step.n_units; u++) {
        int64_t begin = in->pieces.begin[u], end = in->pieces.begin[u + 1];

        if (homes[u] == MT_HOME_VRAM || homes[u] == MT_HOME_ARRIVE)
            continue;
        if (begin == end || homes[u] == MT_HOME_DISK_WEIGHTS)
            sizes[n++] = in->bytes[u];
        else
            while (begin < end)
                sizes[n++] = in->pieces.item[begin++];
    }
    return n;
}

static mt_status find_totals(plan *p)
{
    const mt_search *in = p->in;
    int64_t          units = in->step.n_units, rings = in->n_rings;

    if ((p->totals = calloc((size_t)(in->n_rows * rings) + 1, sizeof *p->totals)) == NULL)
        return MT_FAIL(MT_ENOMEM, "search: no memory for %lld rows", (long long)in->n_rows);
    for (int64_t row = 0; row < in->n_rows; row++) {
        const uint8_t *homes = in->homes + row * units;
        int64_t       *total = p->totals + row * rings, n;

        if (row > 0 && memcmp(homes, homes - units, (size_t)units) == 0) {
            memcpy(total, total - rings, (size_t)rings * sizeof *total);
            continue;
        }
        n = sort_sizes(p->sizes, sizes_of(in, homes, p->sizes));
        for (int64_t k = 0; k < rings; k++)
            for (int64_t i = plan_sorted(p->sizes, n, in->rings[k], p->slots); i > 0; i--)
                total[k] += p->slots[i - 1];
    }
    return MT_OK;
}

/* ---- what follows from the model -------------------------------------------------------- */

static int is_settled(int home) { return home == MT_HOME_VRAM || home == MT_HOME_ARRIVE; }
static int is_on_disk(int home) { return home >= MT_HOME_DISK; }

static void find_uses(plan *p)
{
    const mt_walk *s = &p->in->step;

    for (int64_t u = 0; u < s->n_units; u++)
        p->first[u] = -1;
    for (int64_t w = 0; w < s->n_windows; w++) {
        for (int64_t i = s->units.begin[w]; i < s->units.begin[w + 1]; i++) {
            int64_t u = s->units.item[i];

            if (p->first[u] < 0) {
                p->first[u] = w;
                p->order[p->n_order++] = u;
            }
            p->last[u] = w;
        }
        for (int64_t i = s->again.begin[w]; i < s->again.begin[w + 1]; i++)
            p->needed[s->again.item[i]] |= p->in->learns[w] != 0;
    }
}

/* Where gradients are kept nowhere, the buffers that those of units away from the device pass
 * through. */
static int64_t lend(plan *p, const uint8_t *homes)
{
    const mt_search *in = p->in;
    int64_t          n = 0;

    if (in->keeps)
        return 0;
    for (int64_t u = 0; u < in->step.n_units; u++)
        if (homes == NULL || !is_settled(homes[u]))
            p->sizes[n++] = in->step.gradients[u];
    return mt_plan_slots(p->sizes, n, in->lends, p->lent);
}

static mt_status plan_open(plan *p, const mt_search *in)
{
    int64_t units = in->step.n_units, windows = in->step.n_windows;
    int64_t sizes = units + in->pieces.begin[units], n;
    int64_t *at;
    double  *d;

    *p = (plan){ .in = in };
    n = 12 * units + 9 * windows + 2 * sizes + 1;
    if ((p->memory = calloc((size_t)n, 8)) == NULL)
        return MT_FAIL(MT_ENOMEM, "search: no memory for %lld units", (long long)units);
    at = p->memory;
    p->first = at, p->last = at += units, p->needed = at += units, p->order = at += units;
    p->updated_on = at += units, p->visiting = at += units, p->lent = at += units;
    p->slots = at += units, p->sizes = at += sizes;
    p->away = at += sizes, p->spilled = at += windows, p->kept = at += windows;
    p->work = at += windows, p->modes = (uint8_t *)(at += windows);
    d = (double *)(at + windows);
    p->update_s = d, p->disk_s = d += units, p->through_s = d += units, p->read_s = d += units;
    p->over = d += units, p->forward_s = d += units, p->forward_host_s = d += windows;
    p->backward_s = d += windows, p->backward_host_s = d + windows;
    find_uses(p);
    p->buffers = lend(p, NULL);
    return MT_OK;
}

static void plan_close(plan *p)
{
    free(p->found);
    free(p->totals);
    free(p->memory);
}

/* ---- costs ------------------------------------------------------------------------------ */

static int64_t cost_at(const mt_search *in, int64_t m, int64_t w)
{
    return m * in->n_kinds + in->kind[w];
}

static double seconds_of(const mt_search *in, int64_t m, int64_t w, int mode)
{
    return in->backward_s[cost_at(in, m, w) * in->n_modes + mode];
}

static int64_t bytes_of(const mt_search *in, const int64_t *table, int64_t m, int64_t w, int mode)
{
    return table[cost_at(in, m, w) * in->n_modes + mode];
}

static int64_t away_of(const mt_search *in, int64_t m, int64_t w, int mode)
{
    return in->learns[w] ? bytes_of(in, in->away, m, w, mode) : 0;
}

static double forward_s(const mt_search *in, int64_t m)
{
    double s = 0.0;

    for (int64_t w = 0; w < in->step.n_windows; w++)
        s += in->forward_s[cost_at(in, m, w)];
    return s;
}

/* Of a window's backward, with what keeps least or most of it. */
static double extreme_s(const mt_search *in, int64_t m, int64_t w, int longest)
{
    double found = NAN;

    for (int mode = 0; mode < in->n_modes; mode++) {
        double s = seconds_of(in, m, w, mode);

        if (!isnan(s) && (isnan(found) || (longest ? s > found : s < found)))
            found = s;
    }
    return found;
}

/* ---- AdamW on the host, which copies hold up ---------------------------------------------
 *
 * Both take the host's memory. An update waits for nothing that is copied, so what counts is how
 * much crosses while updates run. They begin with the step, and what crosses in forward is taken to
 * cross evenly until it or the updates are over, whichever is later. Where gradients are kept
 * nowhere, updates run beside backward and the next forward. */

static double times_crossed(const mt_search *in) { return in->keeps ? 1.0 : 2.0; }

/* Bytes, without what windows keep in host memory. */
static double crossing_of(const mt_search *in, const uint8_t *homes)
{
    double  bytes = 0.0;
    int64_t states = 0;

    for (int64_t u = 0; u < in->step.n_units; u++) {
        bytes += is_settled(homes[u]) ? in->settled[u] : in->streamed[u];
        bytes += homes[u] == MT_HOME_THROUGH ? in->passing[u] : 0.0;
        states += homes[u] == MT_HOME_ARRIVE ? in->states[u] : 0;
    }
    return bytes + times_crossed(in) * (double)states;
}

/* backward_s: NAN, the longest that may be. */
static double span_of(const mt_search *in, int64_t m, double backward_s)
{
    double s = forward_s(in, m), longest = 0.0;

    if (in->keeps)
        return s;
    for (int64_t w = 0; isnan(backward_s) && w < in->step.n_windows; w++)
        longest += extreme_s(in, m, w, 1);
    return s + (isnan(backward_s) ? longest : backward_s);
}

/* Updates that take alone_s alone take so many times that. */
static double stretch_of(const mt_search *in, double alone_s, double crossing, double span_s)
{
    return 1.0 + in->byte_s * crossing / later(alone_s, span_s);
}

/* ---- one walk --------------------------------------------------------------------------- */

/* Fills the arrays of units in `out` for these homes. Returns seconds of updates on the host. */
static double place(plan *p, int64_t m, const uint8_t *homes, mt_walk *out)
{
    const mt_search *in = p->in;
    double           alone_s = 0.0;

    for (int64_t u = 0; u < in->step.n_units; u++) {
        int home = homes[u], filed = home == MT_HOME_DISK_WEIGHTS;

        p->updated_on[u] = is_settled(home) ? MT_LANE_DEVICE
                           : is_on_disk(home) ? MT_LANE_DISK
                           : home == MT_HOME_THROUGH ? MT_LANE_THROUGH : MT_LANE_HOST;
        p->update_s[u] = is_settled(home) ? in->device_s[m * in->step.n_units + u]
                         : is_on_disk(home) ? in->pool_s[u] : in->host_s[u];
        p->visiting[u] = home == MT_HOME_ARRIVE ? in->states[u] : 0;
        p->disk_s[u] = filed ? in->drive_weights_s[u] : is_on_disk(home) ? in->drive_s[u] : 0.0;
        p->through_s[u] = home == MT_HOME_THROUGH ? in->passing_s[u] : 0.0;
        p->read_s[u] = filed ? in->fetch_s[u] : 0.0;
        alone_s += p->updated_on[u] == MT_LANE_HOST ? in->host_s[u] : 0.0;
    }
    out->updated_on = p->updated_on, out->update_s = p->update_s, out->visiting = p->visiting;
    out->disk_s = p->disk_s, out->through_s = p->through_s, out->read_s = p->read_s;
    return alone_s;
}

/* Fills those of windows. *away: bytes that leave. Returns seconds of a backward. */
static double keep(plan *p, int64_t m, const uint8_t *modes, mt_walk *out, int64_t *away)
{
    const mt_search *in = p->in;
    double           backward_s = 0.0;

    *away = 0;
    for (int64_t w = 0; w < in->step.n_windows; w++) {
        int64_t at = cost_at(in, m, w);

        p->forward_s[w] = in->forward_s[at];
        p->forward_host_s[w] = in->forward_host_s[at];
        p->backward_s[w] = in->backward_s[at * in->n_modes + modes[w]];
        p->backward_host_s[w] = in->backward_host_s[at * in->n_modes + modes[w]];
        *away += p->away[w] = away_of(in, m, w, modes[w]);
        p->spilled[w] = in->on_disk[modes[w]];
        backward_s += p->backward_s[w];
    }
    out->forward_s = p->forward_s, out->forward_host_s = p->forward_host_s;
    out->backward_s = p->backward_s, out->backward_host_s = p->backward_host_s;
    out->away = p->away, out->spilled = p->spilled;
    return backward_s;
}

static int64_t slots_of_walk(plan *p, const uint8_t *homes, int64_t ring)
{
    int64_t n = 0;

    if (!p->in->whole)
        return mt_plan_slots(p->sizes, sizes_of(p->in, homes, p->sizes), ring, p->slots);
    for (int64_t u = 0; u < p->in->step.n_units; u++)
        if (!is_settled(homes[u]))
            p->sizes[n++] = p->in->step.weights[u];
    return mt_plan_slots(p->sizes, n, 2, p->slots);  /* what is fetched ahead is about a layer */
}

static mt_status time_of(plan *p, int64_t m, const uint8_t *homes, double memory_s, int64_t ring,
                         const uint8_t *modes, double than, mt_walked *found, int *under)
{
    const mt_search *in = p->in;
    mt_walk          walk = in->step;
    mt_schedule     *sch = NULL;
    double           alone_s, backward_s;
    int64_t          away;
    mt_status        st;

    walk.lent = p->lent;
    walk.n_lent = lend(p, homes);
    walk.slots = p->slots;
    walk.n_slots = slots_of_walk(p, homes, ring);
    walk.micro = in->micro[m];
    walk.shown = walk.micro < in->step.shown ? walk.micro : in->step.shown;
    walk.memory_s = memory_s;
    alone_s = place(p, m, homes, &walk);
    backward_s = keep(p, m, modes, &walk, &away);
    walk.stretch = stretch_of(in, alone_s,
                              crossing_of(in, homes) + times_crossed(in) * (double)away,
                              span_of(in, m, backward_s));
    if ((st = mt_walk_schedule(&walk, &sch)) == MT_OK)
        st = mt_walk_run(&walk, sch->steps, sch->n, than, NULL, found, under);
    mt_schedule_free(sch);
    return st;
}

mt_status mt_search_time(const mt_search *in, int64_t micro, const uint8_t *homes, double memory_s,
                         int64_t ring, const uint8_t *modes, double than, mt_walked *found,
                         int *under)
{
    plan      p;
    mt_status st = plan_open(&p, in);

    if (st == MT_OK)
        st = time_of(&p, micro, homes, memory_s, ring, modes, than, found, under);
    plan_close(&p);
    return st;
}

/* ---- a row's part of a bound ------------------------------------------------------------- */

/* Seconds of a unit's update on its lane; HOST: stretched. */
static double lane_s(const plan *p, int64_t u, double stretch)
{
    switch (p->updated_on[u]) {
    case MT_LANE_HOST:    return p->update_s[u] * stretch;
    case MT_LANE_THROUGH: return p->through_s[u];
    case MT_LANE_DISK:    return later(p->update_s[u], p->disk_s[u]);
    default:              return 0.0;
    }
}

/* When a unit's weights are on the device: slower while AdamW has the host's memory. */
static double copied(const mt_search *in, double start, double updated, int64_t u)
{
    double n = (double)in->bytes[u] / (double)in->step.parts;
    double slow = least(in->step.h2d, in->step.busy);
    double beside = least(later(updated - start, 0.0), n / slow);

    return start + beside + later(n - beside * slow, 0.0) / in->step.h2d;
}

/* Of the first forward: each fetch behind its unit's update and the fetch before it, each window
 * behind its weights. Updates that follow their gradients are over. run: seconds of updates on the
 * device. */
static double first_forward(const plan *p, int64_t m, double stretch, double run)
{
    const mt_search *in = p->in;
    double           done[MT_LANE_COUNT] = { 0.0 }, updated = 0.0, h2d = 0.0, moved = 0.0;
    double          *over = p->over;     /* [n_order] when a unit's update is */
    int64_t          n = 0;

    for (int64_t i = 0; i < p->n_order && in->keeps; i++) {
        int64_t u = p->order[i], lane = p->updated_on[u];
        double  s = lane_s(p, u, stretch);

        done[lane] += s;
        over[i] = s > 0.0 ? done[lane] : 0.0;
        if (lane == MT_LANE_HOST || lane == MT_LANE_THROUGH)
            updated = later(updated, done[lane]);
    }
    for (int64_t w = 0; w < in->step.n_windows; w++) {
        for (; n < p->n_order && p->first[p->order[n]] == w; n++) {
            int64_t u = p->order[n];
            double  start, ready;

            if (p->updated_on[u] == MT_LANE_DEVICE)
                continue;
            moved = later(moved, in->keeps ? over[n] : 0.0);
            start = later(h2d, moved);
            ready = copied(in, start, updated, u);
            if (p->read_s[u] > 0.0) {
                ready = later(ready, start + p->read_s[u]);
                moved = later(moved, start + p->read_s[u]);
            }
            h2d = ready;
            run = later(run, h2d);
        }
        run += in->forward_s[cost_at(in, m, w)];
    }
    return run;
}

/* That a backward waits for: a unit's gradients need a buffer, which is given back when an update
 * is over, so on each lane all but as many updates as there are buffers are. */
static double behind(const plan *p, double stretch)
{
    const mt_walk *s = &p->in->step;
    double         over[MT_LANE_COUNT] = { 0.0 }, found = 0.0;
    int64_t        left[MT_LANE_COUNT] = { 0 };

    for (int64_t i = 0; i < s->leaving.begin[s->n_windows]; i++) {     /* the last to leave first */
        int64_t u = s->leaving.item[i], lane = p->updated_on[u];

        if (++left[lane] > p->buffers)
            found = later(found, over[lane] += lane_s(p, u, stretch));
    }
    return found;
}

static void bound_row(plan *p, int64_t row, int64_t m, row_bound *out)
{
    const mt_search *in = p->in;
    const mt_walk   *s = &in->step;
    const uint8_t   *homes = in->homes + row * s->n_units;
    mt_walk          walk = *s;
    double           alone_s = place(p, m, homes, &walk), device_s = 0.0, passed_s = 0.0;
    double           drive_s = 0.0, crossing = crossing_of(in, homes), span = span_of(in, m, NAN);
    double           stretch = stretch_of(in, alone_s, crossing, span), leaving = 0.0;
    int64_t          top = 0;

    *out = (row_bound){ 0 };
    for (int64_t i = 0; i < p->n_order; i++) {
        int64_t u = p->order[i];

        if (is_settled(homes[u]))
            continue;
        top = most(top, p->last[u]);
        out->weights += (double)in->bytes[u];
        out->gradients += (double)s->gradients[u];
        out->add_s += s->add_s[u];
        out->longest_add_s = later(out->longest_add_s, s->add_s[u]);
        out->again += p->needed[u] ? (double)in->bytes[u] : 0.0;
    }
    for (int64_t u = 0; u < s->n_units; u++) {
        device_s += p->updated_on[u] == MT_LANE_DEVICE ? p->update_s[u] : 0.0;
        passed_s += p->through_s[u];
        drive_s += p->disk_s[u];
        out->host_s += p->updated_on[u] == MT_LANE_HOST ? stretch * p->update_s[u] : 0.0;
        out->states += p->visiting[u];
        if (homes[u] == MT_HOME_DISK_WEIGHTS) {
            out->read += (double)in->bytes[u];
            out->read_again += p->needed[u] ? (double)in->bytes[u] : 0.0;
        }
    }
    for (int64_t i = s->leaving.begin[0]; i < s->leaving.begin[1]; i++)
        leaving += is_settled(homes[s->leaving.item[i]]) ? 0.0
                   : (double)s->gradients[s->leaving.item[i]];
    for (int64_t w = s->n_windows - 1; w >= top; w--)
        out->top_s += in->forward_s[cost_at(in, m, w)];
    out->end_s = leaving / s->both;
    out->held_s = alone_s * (stretch_of(in, alone_s, times_crossed(in), span) - 1.0);
    out->first_s = first_forward(p, m, stretch, in->keeps ? device_s : 0.0);
    if (in->keeps)
        return;
    out->update_s = later(out->host_s, later(passed_s, drive_s));
    out->behind_s = behind(p, stretch);
    out->settled_s = device_s;
}

/* Seconds that a step cannot undercut: each of its passes by itself, then all of a step.
 *
 * The first forward: first_forward. Later ones: compute, standing still for activations that leave;
 * weights that no slot can have kept, and compute behind the last of these. A backward: compute,
 * and the longer of what it waits for and of updates that it may make meanwhile; weights with
 * activations. From the second backward on, the host adds up gradients, and is behind by a few
 * units at the most. waits: 0, as if compute waited for nothing that is kept away. */
static double bound_of(const mt_search *in, double slots, int64_t m, double forward,
                       const row_bound *h, const track_bound *t, double backward_s, int waits)
{
    const mt_walk *s = &in->step;
    double         micro = (double)in->micro[m], parts = (double)s->parts;
    double         compute_s = forward + (waits ? t->forward_wait_s : 0.0);
    double         out = (double)t->t.out, host_s = h->host_s + h->held_s * out;
    double         first = later(h->first_s, compute_s), come, backward, adding, found, again, read;

    if (in->keeps)
        first = later(first, host_s);
    forward = later(compute_s, (h->weights - slots) / parts / s->h2d + h->top_s);
    come = later(h->again - slots, 0.0) / parts;
    backward = backward_s + later(waits ? t->backward_wait_s : 0.0, h->settled_s);
    backward = later(backward, later((come + out) / s->both, h->behind_s));
    adding = later(backward, h->add_s - (double)(s->depth + s->stagings + 1) * h->longest_add_s);
    found = first + backward + (micro - 1.0) * (forward + adding) + h->end_s;
    if (in->micro[m] > 1)
        found = later(found, first + backward + forward + (micro - 1.0) * h->add_s);
    again = later(h->read_again - slots, 0.0);
    read = h->read + again + (micro - 1.0) * (later(h->read - slots, 0.0) + again);
    found = later(found, micro * t->spill_s);
    found = later(found, h->update_s);
    found = later(found, host_s);
    found = later(found, micro * h->gradients / s->both);
    found = later(found, read / (double)in->gpus / s->read);   /* a first finds none in a slot */
    return s->rest_s + found;
}

/* ---- levels ----------------------------------------------------------------------------- */

/* Bytes beside a window's work, for links: a linked window's own input is made from what the layer
 * before keeps, which has come back with its own; both come while the window behind it runs. */
static void add_coming(const mt_search *in, int64_t m, const uint8_t *modes, int64_t *work)
{
    int64_t n = in->step.n_windows;

    for (int64_t w = 1; w < n; w++) {
        if (!in->is_linked[modes[w]])
            continue;
        work[w] += away_of(in, m, w - 1, modes[w - 1]);
        if (w + 1 < n)
            work[w + 1] += away_of(in, m, w, modes[w]);
    }
}

static int64_t with_cache(const mt_search *in, int64_t bytes)
{
    return most(bytes + (int64_t)((double)bytes * in->cache), 0);
}

static mt_level level_of(const mt_search *in, int64_t m, const uint8_t *modes, const int64_t *kept,
                         const int64_t *work)
{
    mt_level found = { INT64_MIN, 0, 0.0 };
    int64_t  alive = 0, early = 0, beside = INT64_MIN;

    for (int64_t w = 0; w < in->step.n_windows; w++) {
        alive += kept[w];
        found.peak = most(found.peak, alive + work[w]);
        if (w < in->early) {
            early = alive;
            beside = most(beside, work[w]);
        }
        found.backward_s += seconds_of(in, m, w, modes[w]);
    }
    found.peak = with_cache(in, found.peak);
    found.early = with_cache(in, early + beside);
    return found;
}

static void keep_at(const mt_search *in, int64_t m, int64_t w, int mode, uint8_t *modes,
                    int64_t *kept, int64_t *work)
{
    work[w] += bytes_of(in, in->work, m, w, mode) - bytes_of(in, in->work, m, w, modes[w]);
    kept[w] = in->learns[w] ? bytes_of(in, in->kept, m, w, mode) : 0;
    modes[w] = (uint8_t)mode;
}

/* What the first level keeps, and beside it in a backward. */
static void begin_at(const mt_search *in, int64_t m, const uint8_t *base, uint8_t *modes,
                     int64_t *kept, int64_t *work)
{
    memcpy(modes, base, (size_t)in->step.n_windows);
    for (int64_t w = 0; w < in->step.n_windows; w++) {
        work[w] = bytes_of(in, in->work, m, w, base[w]) + in->flying[w];
        kept[w] = in->learns[w] ? bytes_of(in, in->kept, m, w, base[w]) : 0;
    }
    add_coming(in, m, base, work);          /* links of later levels make none */
}

/* A step of a window to keeping more. */
typedef struct rung {
    double  gain;                /* seconds saved per byte */
    int64_t w;
    int     order, mode;
} rung;

/* What saves most per byte first; last windows first: they are needed again soonest, so keeping
 * theirs hardly raises the peak. */
static int better_first(const void *a, const void *b)
{
    const rung *x = a, *y = b;

    if (x->gain != y->gain)
        return x->gain > y->gain ? -1 : 1;
    if (x->w != y->w)
        return x->w > y->w ? -1 : 1;
    return x->order - y->order;
}

/* Rungs of one window from `mode` on, each less rewarding than the one before; a mode that another
 * line passes below is left out. spared: seconds of another window, by the first. */
static int64_t hull(const mt_search *in, int64_t m, int64_t w, int mode, double spared, rung *out)
{
    int n = 0;

    for (;;) {
        int64_t at = bytes_of(in, in->kept, m, w, mode), bytes = 0;
        double  at_s = seconds_of(in, m, w, mode), gain = -1.0;
        int     found = -1;

        for (int next = MT_KEEP_REPLAY; next <= MT_KEEP_SAVED; next++) {
            double  s = seconds_of(in, m, w, next), here;
            int64_t more = bytes_of(in, in->kept, m, w, next) - at;

            if (isnan(s) || more <= 0 || !(s < at_s))
                continue;
            here = (at_s - s + spared) / (double)more;
            if (found < 0 || here > gain || (here == gain && more > bytes))
                found = next, gain = here, bytes = more;
        }
        if (found < 0)
            return n;
        out[n] = (rung){ gain, w, n, found };
        n++;
        mode = found;
        spared = 0.0;
    }
}

/* The mode of KEEPs with the fewest bytes; of equal ones the fastest. */
static int least_mode(const mt_search *in, int64_t m, int64_t w)
{
    int found = -1;

    for (int mode = MT_KEEP_REPLAY; mode <= MT_KEEP_SAVED; mode++) {
        double  s = seconds_of(in, m, w, mode);
        int64_t more;

        if (isnan(s))
            continue;
        more = found < 0 ? -1 : bytes_of(in, in->kept, m, w, mode)
                                - bytes_of(in, in->kept, m, w, found);
        if (more < 0 || (more == 0 && s < seconds_of(in, m, w, found)))
            found = mode;
    }
    return found;
}

static int64_t find_rungs(const mt_search *in, int64_t m, const track_bound *t, rung *out)
{
    int64_t n = 0;

    for (int64_t w = 0; w < in->step.n_windows; w++) {
        double spared = 0.0;
        int    begin = least_mode(in, m, w);

        if (t->flags[w] & MT_TRACK_FIXED)
            continue;
        if (w > 0 && t->flags[w - 1] & MT_TRACK_PAIR)
            begin = MT_KEEP_LINKED;
        if (t->flags[w] & MT_TRACK_PAIR)
            spared = seconds_of(in, m, w + 1, MT_KEEP_REPLAY)
                     - seconds_of(in, m, w + 1, MT_KEEP_LINKED);
        n += hull(in, m, w, begin, spared, out + n);
    }
    qsort(out, (size_t)n, sizeof *out, better_first);
    return n;
}

/* The next mode on the way from what a window keeps to `high`, for the last bytes that are left. */
static int mode_between(const mt_search *in, int64_t m, int64_t w, int low, int64_t above, int high)
{
    int     found = high;
    int64_t bytes = bytes_of(in, in->kept, m, w, high);

    for (int mode = MT_KEEP_REPLAY; mode <= MT_KEEP_SAVED; mode++) {
        double  s = seconds_of(in, m, w, mode);
        int64_t n;

        if (isnan(s) || !(s < seconds_of(in, m, w, low)))
            continue;
        n = bytes_of(in, in->kept, m, w, mode);
        if (n > above && n < bytes)
            found = mode, bytes = n;
    }
    return found;
}

/* Of a pair, the second is linked once the first keeps attention's output. */
static void climb(plan *p, int64_t m, track_bound *t, const rung *rungs, int64_t n)
{
    const mt_search *in = p->in;
    uint8_t         *modes = p->modes;
    int64_t         *kept = p->kept, *work = p->work;

    begin_at(in, m, t->modes, modes, kept, work);
    t->level[0] = t->first;
    t->t.n_levels = 1;
    for (int64_t i = 0; i < n; i++) {
        int64_t w = rungs[i].w, above = bytes_of(in, in->kept, m, w, modes[w]);
        int     low = modes[w], mode = -1;

        while (mode != rungs[i].mode) {
            change   *by = &t->by[t->t.n_levels];
            mt_level *level = &t->level[t->t.n_levels++];

            mode = mode_between(in, m, w, low, above, rungs[i].mode);
            above = bytes_of(in, in->kept, m, w, mode);
            *by = (change){ (int)w, mode, 0 };
            keep_at(in, m, w, mode, modes, kept, work);
            if (t->flags[w] & MT_TRACK_PAIR && modes[w + 1] == MT_KEEP_REPLAY) {
                by->linked = 1;
                keep_at(in, m, w + 1, MT_KEEP_LINKED, modes, kept, work);
            }
            *level = level_of(in, m, modes, kept, work);
            level->peak = most(level->peak, level[-1].peak);    /* no less than of those before */
            level->early = most(level->early, level[-1].early);
        }
    }
}

static mt_status make_levels(plan *p, int64_t m, track_bound *t)
{
    size_t    n = (size_t)p->in->step.n_windows, many = 4 * n + 1;
    rung     *rungs = calloc(many, sizeof *rungs);
    mt_status st = MT_OK;

    t->level = calloc(many, sizeof *t->level);
    t->by = calloc(many, sizeof *t->by);
    if (rungs == NULL || t->level == NULL || t->by == NULL)
        st = MT_FAIL(MT_ENOMEM, "search: no memory for levels of %zu windows", n);
    else
        climb(p, m, t, rungs, find_rungs(p->in, m, t, rungs));
    free(rungs);
    return st;
}

static void track_close(track_bound *t)
{
    free(t->level);
    free(t->by);
}

static void modes_of(const mt_search *in, const track_bound *t, int64_t level, uint8_t *modes)
{
    memcpy(modes, t->modes, (size_t)in->step.n_windows);
    for (int64_t i = 1; i <= level; i++) {
        modes[t->by[i].w] = (uint8_t)t->by[i].mode;
        if (t->by[i].linked)
            modes[t->by[i].w + 1] = MT_KEEP_LINKED;
    }
}

/* ---- a track's part of a bound ------------------------------------------------------------ */

/* What windows keep away from the device: all that crosses the bus, or what passes through bays. */
typedef struct bundles {
    int64_t n, bytes, largest, first, last, before_last;
    int64_t all_but[2];          /* bytes without the last `left`, and without the last `unread` */
} bundles;

static bundles find_bundles(const mt_search *in, int64_t m, const uint8_t *modes, int disk,
                            int64_t left, int64_t unread)
{
    bundles b = { 0 };
    int64_t n = 0;

    for (int64_t w = 0; w < in->step.n_windows; w++)
        n += (!disk || in->on_disk[modes[w]]) && away_of(in, m, w, modes[w]) > 0;
    for (int64_t w = 0; w < in->step.n_windows; w++) {
        int64_t bytes = away_of(in, m, w, modes[w]);

        if ((disk && !in->on_disk[modes[w]]) || bytes <= 0)
            continue;
        b.first = b.n == 0 ? w : b.first;
        b.before_last = b.last;
        b.last = w;
        b.bytes += bytes;
        b.largest = most(b.largest, bytes);
        b.all_but[0] += b.n < n - left ? bytes : 0;
        b.all_but[1] += b.n < n - unread ? bytes : 0;
        b.n++;
    }
    return b;
}

/* Seconds of a forward and of a backward in which compute at least stands still for bundles.
 *
 * A forward is behind the first of them when it begins to leave, and compute may run on when all
 * but the last have left, or but the last bays are written. In backward the last comes back when
 * the window behind it runs, and compute is in front of the first bundle's window when that is
 * back. Between these, compute may run. */
static void wait_for(const mt_search *in, int64_t m, const uint8_t *modes, const bundles *b,
                     int64_t left, double out, double back, track_bound *t)
{
    double computed = 0.0, beside = 0.0;

    if (b->n <= most(left, 1))
        return;
    for (int64_t w = b->first + 1; w <= b->last; w++)
        computed += in->forward_s[cost_at(in, m, w)];
    for (int64_t w = b->first + 1; w <= b->before_last + 1; w++)
        beside += seconds_of(in, m, w, modes[w]);
    t->forward_wait_s = later(t->forward_wait_s, (double)b->all_but[0] / out - computed);
    t->backward_wait_s = later(t->backward_wait_s, (double)b->all_but[1] / back - beside);
}

/* In host memory, with the bays that carry what goes on to a file. */
static int64_t away_bytes(const mt_search *in, const bundles *all, const bundles *filed)
{
    int64_t bays = filed->n < in->step.bays ? filed->n : in->step.bays;

    return all->bytes - filed->bytes + bays * filed->largest;
}

static void bound_track(plan *p, int64_t m, int64_t track, track_bound *t)
{
    const mt_search *in = p->in;
    const mt_walk   *s = &in->step;
    int64_t          at = (in->tracks[m] + track) * s->n_windows;
    bundles          all, filed;

    *t = (track_bound){ .modes = in->modes + at, .flags = in->flags + at };
    begin_at(in, m, t->modes, p->modes, p->kept, p->work);
    t->first = level_of(in, m, p->modes, p->kept, p->work);
    all = find_bundles(in, m, t->modes, 0, 1, 1);
    filed = find_bundles(in, m, t->modes, 1, s->bays, s->bays + 1);
    t->t.away = away_bytes(in, &all, &filed);
    t->t.out = all.all_but[0];
    t->t.spilled = filed.bytes + filed.n * in->padding;
    if (filed.n > s->bays)       /* the last are never read, and nobody waits for fewer */
        t->spill_s = (double)filed.bytes / s->write + (double)filed.all_but[0] / s->read;
    wait_for(in, m, t->modes, &all, 1, s->both, s->both, t);
    wait_for(in, m, t->modes, &filed, s->bays, s->write, s->read, t);
    t->t.least_s = t->forward_wait_s + t->backward_wait_s;
    for (int64_t w = 0; w < s->n_windows; w++)
        t->t.least_s += t->flags[w] & MT_TRACK_FIXED ? seconds_of(in, m, w, t->modes[w])
                        : extreme_s(in, m, w, 0);
}

/* ---- what fits -------------------------------------------------------------------------- */

static int64_t top_of(const mt_level *level, int64_t states)
{
    return states > 0 ? most(level->peak, states + level->early) : level->peak;
}

/* The last level that fits into so many bytes, of which the first is known to. */
static int64_t last_level(const track_bound *t, int64_t room, int64_t states)
{
    int64_t low = 0, high = t->t.n_levels;

    while (high - low > 1) {
        int64_t middle = (low + high) / 2;

        if (top_of(&t->level[middle], states) <= room)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* What fits of a row with these slots: with something away only where that leaves less to compute
 * again than all tracks before; none behind one that keeps all on the device. */
static mt_status add_row(plan *p, int64_t m, track_bound *tracks, int64_t n, candidate c,
                         double than, double forward, const row_bound *h)
{
    const mt_search *in = p->in;
    int64_t          slots = p->totals[c.at.row * in->n_rings + c.at.ring];
    int64_t          here = slots + in->planes[c.at.row] + in->cached[m];
    int64_t          vram = in->most_vram - here;
    int64_t          host = in->most_host - in->host[c.at.row];
    double           best = INFINITY, spared = (double)most(slots, in->spared);
    mt_status        st;

    if (vram < 0 || host < 0)
        return MT_OK;
    host /= in->gpus;
    for (int64_t i = 0; i < n; i++) {
        track_bound *t = &tracks[i];
        int64_t      level;
        double       backward_s;

        if ((t->t.away > 0 && t->t.least_s > than * ROUNDED / (double)in->micro[m] - forward) ||
            t->t.away > host || t->t.spilled > in->room[c.at.row] ||
            top_of(&t->first, h->states) > vram)
            continue;
        if (t->level == NULL && (st = make_levels(p, m, t)) != MT_OK)
            return st;
        level = last_level(t, vram, h->states);
        backward_s = t->level[level].backward_s;
        if (!(backward_s < best))
            continue;
        best = t->t.away == 0 ? backward_s : best;
        c.bound = bound_of(in, spared, m, forward, h, t, backward_s, 1);
        c.order = bound_of(in, spared, m, forward, h, t, backward_s, 0);
        c.spilled = t->t.spilled;
        c.top = here + top_of(&t->level[level], h->states);
        c.at.track = (int)i, c.at.level = (int)level;
        if (c.bound <= than * ROUNDED) {
            if ((st = MT_GROW(p->found, p->room, p->n_found + 1, "search")) != MT_OK)
                return st;
            p->found[p->n_found++] = c;
        }
        if (t->t.away == 0 && level == t->t.n_levels - 1)
            break;
    }
    return MT_OK;
}

/* All that fits of one number of micro-batches, without most of what takes `than` or longer. */
static mt_status add_micro(plan *p, int64_t m, track_bound *tracks, int64_t n, double than)
{
    const mt_search *in = p->in;
    double           forward = forward_s(in, m);
    double           backward_s = 0.0;
    track_bound      nothing = { 0 };
    mt_status        st;

    for (int64_t w = 0; w < in->step.n_windows; w++)
        backward_s += extreme_s(in, m, w, 0);
    for (int64_t row = 0; row < in->n_rows; row++) {
        row_bound h;

        if (in->several[row] != (in->micro[m] > 1) || in->planes[row] > in->most_vram ||
            in->host[row] > in->most_host)
            continue;
        bound_row(p, row, m, &h);
        for (int64_t k = in->n_rings - 1; k >= 0; k--) {
            int64_t  *slots = &p->totals[row * in->n_rings + k];
            candidate c = { .number = in->micro[m],
                            .at = { .row = (int)row, .ring = (int)k, .micro = (int)m } };

            if ((k > 0 && slots[0] == slots[-1]) ||      /* the smaller ring stands for both */
                bound_of(in, (double)most(*slots, in->spared), m, forward, &h, &nothing, backward_s,
                         0) > than * ROUNDED)
                continue;
            if ((st = add_row(p, m, tracks, n, c, than, forward, &h)) != MT_OK)
                return st;
        }
    }
    return MT_OK;
}

/* ---- the best --------------------------------------------------------------------------- */

static int first_tried(const void *a, const void *b)
{
    const candidate *x = a, *y = b;

    if (x->order != y->order)
        return x->order < y->order ? -1 : 1;
    if (x->spilled != y->spilled)
        return x->spilled < y->spilled ? -1 : 1;
    if (x->top != y->top)
        return x->top < y->top ? -1 : 1;
    if (x->at.row != y->at.row)
        return x->at.row < y->at.row ? -1 : 1;
    if (x->at.ring != y->at.ring)
        return x->at.ring > y->at.ring ? -1 : 1;
    if (x->number != y->number)
        return x->number < y->number ? -1 : 1;
    return x->at.track - y->at.track;
}

/* Walks a candidate; *than falls where its time, by what its kind has to be worth, is less. */
static mt_status try_one(plan *p, const candidate *c, const track_bound *t, double *than,
                         mt_walked *found, int *under)
{
    const mt_search *in = p->in;
    const uint8_t   *homes = in->homes + c->at.row * in->step.n_units;
    int              through = memchr(homes, MT_HOME_THROUGH, (size_t)in->step.n_units) != NULL;
    double           worth = through ? in->worth : 1.0;
    mt_status        st;

    modes_of(in, t, c->at.level, p->modes);
    st = time_of(p, c->at.micro, homes, in->memory_s[c->at.row * in->n_micro + c->at.micro],
                 in->rings[c->at.ring], p->modes, *than / worth, found, under);
    if (st == MT_OK && *under)
        *than = found->seconds * worth;
    return st;
}

/* Tracks of micro m, *n of them. */
static mt_status tracks_open(plan *p, int64_t m, track_bound **out, int64_t *n)
{
    *n = p->in->tracks[m + 1] - p->in->tracks[m];
    if ((*out = calloc((size_t)*n + 1, sizeof **out)) == NULL)
        return MT_FAIL(MT_ENOMEM, "search: no memory for %lld tracks", (long long)*n);
    for (int64_t i = 0; i < *n; i++)
        bound_track(p, m, i, &(*out)[i]);
    return MT_OK;
}

static void tracks_close(track_bound *tracks, int64_t n)
{
    for (int64_t i = 0; i < n && tracks != NULL; i++)
        track_close(&tracks[i]);
    free(tracks);
}

/* Walks candidates in order until their bounds, or `left`, are exhausted. */
static mt_status try_all(plan *p, track_bound **tracks, double than, double limit, int64_t left,
                         mt_choice *best, uint8_t *modes, mt_walked *out, int *any)
{
    mt_status st = MT_OK;
    int64_t   n = 0;

    for (int64_t i = 0; i < p->n_found; i++)
        if (p->found[i].bound <= limit * ROUNDED)
            p->found[n++] = p->found[i];
    if (n > 0)                           /* of none there is no array */
        qsort(p->found, (size_t)n, sizeof *p->found, first_tried);
    for (int64_t i = 0; i < n && i < left && p->found[i].order < than && st == MT_OK; i++) {
        const candidate *c = &p->found[i];
        const track_bound *t = &tracks[c->at.micro][c->at.track];
        mt_walked        found;
        int              under = 0;

        if (c->bound < than)
            st = try_one(p, c, t, &than, &found, &under);
        if (st != MT_OK || !under)
            continue;
        *any = 1;
        *best = c->at;
        *out = found;
        modes_of(p->in, t, c->at.level, modes);
    }
    return st;
}

mt_status mt_search_best(const mt_search *in, double than, int64_t most_tried, mt_choice *best,
                         uint8_t *modes, mt_walked *found, int *any)
{
    plan          p;
    double        limit = than;          /* seconds that none may exceed */
    track_bound **tracks = calloc((size_t)in->n_micro + 1, sizeof *tracks);
    int64_t      *n = calloc((size_t)in->n_micro + 1, sizeof *n);
    mt_status     st = plan_open(&p, in);

    *any = 0;
    if (st == MT_OK && (tracks == NULL || n == NULL))
        st = MT_FAIL(MT_ENOMEM, "search: no memory for %lld micros", (long long)in->n_micro);
    if (st == MT_OK)
        st = find_totals(&p);
    for (int64_t m = 0; m < in->n_micro && st == MT_OK; m++) {
        int64_t low = p.n_found;

        if ((st = tracks_open(&p, m, &tracks[m], &n[m])) == MT_OK)
            st = add_micro(&p, m, tracks[m], n[m], limit);
        for (int64_t i = low; i < p.n_found; i++)
            low = p.found[i].bound < p.found[low].bound ? i : low;
        if (st == MT_OK && low < p.n_found)     /* its time tells which of the others cannot win */
            st = try_one(&p, &p.found[low], &tracks[m][p.found[low].at.track], &limit, found, any);
    }
    *any = 0;
    if (st == MT_OK)
        st = try_all(&p, tracks, than, limit, most_tried, best, modes, found, any);
    for (int64_t m = 0; m < in->n_micro && tracks != NULL && n != NULL; m++)
        tracks_close(tracks[m], n[m]);
    free(tracks);
    free(n);
    plan_close(&p);
    return st;
}

/* ---- what is asked about ------------------------------------------------------------------ */

mt_status mt_search_track(const mt_search *in, int64_t m, int64_t track, mt_track *out,
                          mt_level *levels, uint8_t *modes)
{
    plan        p;
    track_bound t = { 0 };
    mt_status   st = plan_open(&p, in);

    if (st == MT_OK) {
        bound_track(&p, m, track, &t);
        st = make_levels(&p, m, &t);
    }
    if (st == MT_OK)
        *out = t.t;
    for (int64_t i = 0; st == MT_OK && levels != NULL && i < t.t.n_levels; i++) {
        levels[i] = t.level[i];
        modes_of(in, &t, i, modes + i * in->step.n_windows);
    }
    track_close(&t);
    plan_close(&p);
    return st;
}

mt_status mt_search_memory(const mt_search *in, int64_t m, const uint8_t *modes, mt_memory_of *out)
{
    plan      p;
    mt_level  level;
    bundles   all, filed;
    int64_t   alive = 0;
    mt_status st = plan_open(&p, in);

    if (st != MT_OK)
        return st;
    begin_at(in, m, modes, p.modes, p.kept, p.work);
    level = level_of(in, m, modes, p.kept, p.work);
    all = find_bundles(in, m, modes, 0, 1, 1);
    filed = find_bundles(in, m, modes, 1, in->step.bays, in->step.bays + 1);
    *out = (mt_memory_of){ .peak = level.peak, .early = level.early,
                           .away = away_bytes(in, &all, &filed),
                           .spilled = filed.bytes + filed.n * in->padding };
    for (int64_t w = 0; w < in->step.n_windows; w++) {
        int64_t flying = in->flying[w], work = p.work[w] - flying;

        alive += p.kept[w];
        if (alive + work + flying > out->kept + out->work + out->flying)
            out->kept = alive, out->work = work, out->flying = flying;
    }
    plan_close(&p);
    return st;
}

mt_status mt_search_bound(const mt_search *in, const mt_choice *at, double *seconds)
{
    plan        p;
    track_bound t = { 0 };
    row_bound   h;
    mt_status   st = plan_open(&p, in);

    if (st == MT_OK) {
        bound_row(&p, at->row, at->micro, &h);
        bound_track(&p, at->micro, at->track, &t);
        st = make_levels(&p, at->micro, &t);
    }
    if (st == MT_OK)
        st = find_totals(&p);
    if (st == MT_OK)
        *seconds = bound_of(in, (double)most(p.totals[at->row * in->n_rings + at->ring],
                                             in->spared), at->micro, forward_s(in, at->micro), &h,
                            &t, t.level[at->level].backward_s, 1);
    track_close(&t);
    plan_close(&p);
    return st;
}

/* A row's smallest slots need least: what does not fit with these fits with none. Not always those
 * of the smallest ring: small units have a slot each in larger ones. */
static void need_row(plan *p, int64_t row, int64_t m, const track_bound *tracks, int64_t n,
                     int64_t *spilled, mt_needs *out, int64_t *lacks)
{
    const mt_search *in = p->in;
    const int64_t   *slots = p->totals + row * in->n_rings;
    int64_t          here = in->planes[row] + in->cached[m], states = 0, lack[3];
    int              ring = 0;

    *spilled = -1;
    for (int k = 1; k < in->n_rings; k++)
        ring = slots[k] < slots[ring] ? k : ring;
    here += slots[ring];
    for (int64_t u = 0; u < in->step.n_units; u++)
        states += in->homes[row * in->step.n_units + u] == MT_HOME_ARRIVE ? in->states[u] : 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t vram = here + top_of(&tracks[i].first, states);
        int64_t host = in->host[row] + tracks[i].t.away * in->gpus;

        if (i == 0) {
            lack[0] = vram > in->most_vram;
            lack[1] = most(vram - in->most_vram, 0) + most(in->host[row] - in->most_host, 0);
            lack[2] = vram;
        }
        if (tracks[i].t.spilled > in->room[row])
            continue;
        if (host <= in->most_host && (out->vram < 0 || vram < out->vram))
            out->vram = vram;
        if (vram <= in->most_vram && (out->host < 0 || host < out->host))
            out->host = host;
        if (host <= in->most_host && vram <= in->most_vram &&
            (*spilled < 0 || tracks[i].t.spilled < *spilled))
            *spilled = tracks[i].t.spilled;
    }
    for (int k = 0; n > 0 && k < 3 && lack[k] <= lacks[k]; k++)
        if (lack[k] < lacks[k]) {
            memcpy(lacks, lack, sizeof lack);
            out->least = (mt_choice){ .row = (int)row, .ring = ring, .micro = (int)m };
        }
}

mt_status mt_search_needs(const mt_search *in, int64_t *spilled, mt_needs *out)
{
    plan         p;
    track_bound *tracks = NULL;
    int64_t      lacks[3] = { INT64_MAX, INT64_MAX, INT64_MAX }, n = 0;
    mt_status    st = plan_open(&p, in);

    *out = (mt_needs){ .vram = -1, .host = -1 };
    if (st == MT_OK)
        st = find_totals(&p);
    for (int64_t m = 0; m < in->n_micro && st == MT_OK; m++) {
        st = tracks_open(&p, m, &tracks, &n);
        for (int64_t row = 0; row < in->n_rows && st == MT_OK; row++) {
            spilled[row * in->n_micro + m] = -1;
            if (in->several[row] == (in->micro[m] > 1))
                need_row(&p, row, m, tracks, n, &spilled[row * in->n_micro + m], out, lacks);
        }
        tracks_close(tracks, n);
        tracks = NULL;
    }
    plan_close(&p);
    return st;
}
