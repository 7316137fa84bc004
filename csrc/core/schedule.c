/* schedule.c — walks a trace once with pretended slots and writes down the copies it needs.
 *
 * At every COMPUTE k the walk knows which unit each slot holds and when that unit is next needed.
 * `need` is the first COMPUTE whose unit no slot holds. It gets the slot whose unit is needed
 * last, if that is after `need`; then the next one, until none can be placed: it is tried again
 * behind the next COMPUTE. So fetches stand in the order of need, which is the order in which the
 * H2D queue will do them, and `need` only grows: n COMPUTEs and s slots take n*s steps. */
#include "schedule.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NEVER INT64_MAX

typedef struct slot_state {
    size_t  bytes;
    int     unit;            /* -1: empty */
    int64_t last_use;        /* number of the last COMPUTE in it; -1: none */
} slot_state;

typedef struct walk {
    const int   *use;        /* [n_uses] the trace */
    int64_t     *next;       /* [n_uses] the next COMPUTE of the same unit, or NEVER */
    int64_t      n_uses, need;
    int64_t     *soon;       /* [n_units] the unit's first COMPUTE not yet passed, or NEVER */
    int         *slot_of;    /* [n_units] -1: in none */
    size_t      *class_bytes;/* [n_units] bytes of the slots that it may use; those in the trace */
    slot_state  *slot;       /* [n_slots] */
    int          n_slots;
    mt_schedule *out;        /* steps has room for all */
} walk;

static void put(walk *w, mt_step_kind kind, int unit, int slot)
{
    w->out->steps[w->out->n++] = (mt_step){ kind, unit, slot };
}

/* ---- what goes in ----------------------------------------------------------------------- */

/* The smallest slots that hold the unit. Larger ones are left to those that need them. */
static mt_status find_class(int unit, size_t unit_bytes, const size_t *slot_bytes, int n_slots,
                            size_t *class_bytes)
{
    size_t best = SIZE_MAX, largest = 0;
    int    found = 0;

    for (int i = 0; i < n_slots; i++) {
        largest = slot_bytes[i] > largest ? slot_bytes[i] : largest;
        if (slot_bytes[i] >= unit_bytes && slot_bytes[i] <= best) {
            best = slot_bytes[i];
            found = 1;
        }
    }
    if (!found)
        return MT_FAIL(MT_EINVAL, "unit %d: its %zu bytes fit none of the %d slots, the largest "
                       "of which holds %zu; make one larger or the unit smaller",
                       unit, unit_bytes, n_slots, largest);
    *class_bytes = best;
    return MT_OK;
}

/* ---- who gives way ---------------------------------------------------------------------- */

static int64_t needed_at(const walk *w, const slot_state *s)
{
    return s->unit < 0 ? NEVER : w->soon[s->unit];
}

static void fetch(walk *w, int unit, int slot)
{
    slot_state *s = &w->slot[slot];

    if (s->unit >= 0)
        w->slot_of[s->unit] = -1;
    put(w, MT_FETCH, unit, slot);
    s->unit = unit;
    w->slot_of[unit] = slot;
}

/* Every fetch that can stand here: of the slots that fit use[need] and hold what is not needed
 * until after it, into the one needed last; of equals, the one idle for longest. It may be the slot
 * of the COMPUTE just passed, and where all units are of one class it is: only there did something
 * change. The copy then waits on the device for that COMPUTE's kernels. */
static void prefetch(walk *w)
{
    for (int best;; fetch(w, w->use[w->need], best)) {
        while (w->need < w->n_uses && w->slot_of[w->use[w->need]] >= 0)
            w->need++;
        if (w->need == w->n_uses)
            return;
        best = -1;
        for (int i = 0; i < w->n_slots; i++) {
            const slot_state *s = &w->slot[i];
            int64_t           at = needed_at(w, s);

            if (s->bytes != w->class_bytes[w->use[w->need]] || at <= w->need)
                continue;
            if (best < 0 || at > needed_at(w, &w->slot[best]) ||
                (at == needed_at(w, &w->slot[best]) && s->last_use < w->slot[best].last_use))
                best = i;
        }
        if (best < 0)                    /* every unit there is needed sooner */
            return;
    }
}

/* ---- the walk --------------------------------------------------------------------------- */

mt_status mt_schedule_build(const int *trace, int64_t n_trace, const size_t *unit_bytes,
                            int n_units, const size_t *slot_bytes, int n_slots, mt_schedule **out)
{
    walk      w = { .use = trace, .n_uses = n_trace, .n_slots = n_slots };
    mt_status st;

    if (n_trace < 0 || n_units < 0 || n_slots < 0)
        return MT_FAIL(MT_EINVAL, "schedule: %lld windows, %d units, %d slots",
                       (long long)n_trace, n_units, n_slots);
    for (int64_t i = 0; i < n_trace; i++)
        if (trace[i] < 0 || trace[i] >= n_units)
            return MT_FAIL(MT_EINVAL, "entry %lld of the trace names unit %d of %d", (long long)i,
                           trace[i], n_units);
    MT_TRY(MT_MAKE(w.next, n_trace, "schedule"));
    MT_TRY(MT_MAKE(w.soon, n_units, "schedule"));
    MT_TRY(MT_MAKE(w.slot_of, n_units, "schedule"));
    MT_TRY(MT_MAKE(w.class_bytes, n_units, "schedule"));
    MT_TRY(MT_MAKE(w.slot, n_slots, "schedule"));
    MT_TRY(MT_MAKE(w.out, 1, "schedule"));
    MT_TRY(MT_MAKE(w.out->steps, 2 * n_trace, "schedule"));      /* each with a FETCH at most */
    for (int i = 0; i < n_slots; i++)
        w.slot[i] = (slot_state){ slot_bytes[i], -1, -1 };
    for (int u = 0; u < n_units; u++) {
        w.soon[u] = NEVER;
        w.slot_of[u] = -1;
    }
    for (int64_t k = n_trace - 1; k >= 0; k--) {         /* from the last COMPUTE to the first */
        w.next[k] = w.soon[trace[k]];
        w.soon[trace[k]] = k;
    }
    for (int u = 0; u < n_units; u++)
        if (w.soon[u] != NEVER)
            MT_TRY(find_class(u, unit_bytes[u], slot_bytes, n_slots, &w.class_bytes[u]));
    prefetch(&w);
    for (int64_t k = 0; k < n_trace; k++) {
        int unit = trace[k], slot = w.slot_of[unit];

        put(&w, MT_COMPUTE, unit, slot);
        w.slot[slot].last_use = k;
        w.soon[unit] = w.next[k];
        prefetch(&w);
    }
    *out = MT_KEEP(w.out);
fail:
    free(w.next);
    free(w.soon);
    free(w.slot_of);
    free(w.class_bytes);
    free(w.slot);
    mt_schedule_free(w.out);
    return st;
}

void mt_schedule_free(mt_schedule *s)
{
    if (s != NULL)
        free(s->steps);
    free(s);
}

/* ---- as text ---------------------------------------------------------------------------- */

size_t mt_schedule_print(const mt_schedule *s, const char *const *names, char *text, size_t cap)
{
    size_t len = 0, width = 18;      /* of "verb name", so that the slots stand in a column */

    for (int64_t i = 0; i < s->n; i++) {
        size_t one = strlen("compute ") + strlen(names[s->steps[i].unit]);

        width = one > width ? one : width;
    }
    if (cap > 0)
        text[0] = '\0';
    for (int64_t i = 0; i < s->n; i++) {
        const mt_step *e = &s->steps[i];
        const char    *verb = e->kind == MT_FETCH ? "fetch" : "compute";
        char          *at = len < cap ? text + len : NULL;
        size_t         room = len < cap ? cap - len : 0;
        int            n = snprintf(at, room, "%s %-*s %s slot %d\n", verb,
                                    (int)(width - strlen(verb)) - 1, names[e->unit],
                                    e->kind == MT_FETCH ? "->" : "in", e->slot);

        len += n > 0 ? (size_t)n : 0;
    }
    return len;
}

/* ---- following one ------------------------------------------------------------------------ */

static void kept_close(mt__kept *k)
{
    mt_schedule_free(k->sch);
    free(k->trace);
    memset(k, 0, sizeof *k);
}

void mt__course_close(mt__course *c)
{
    for (int i = 0; i < MT__COURSE_KEPT; i++)
        kept_close(&c->kept[i]);
    free(c->trace);
    memset(c, 0, sizeof *c);
}

const mt_schedule *mt__course_schedule(const mt__course *c)
{
    return c->cur != NULL ? c->cur->sch : NULL;
}

/* The trace so far is how k's begins. */
static int begins_like(const mt__course *c, const mt__kept *k)
{
    if (k->sch == NULL || c->n_trace > k->n_trace || c->n_trace == MT__COURSE_MARKS)
        return 0;
    return c->n_trace == 0 ||
           memcmp(c->trace, k->trace, (size_t)c->n_trace * sizeof *c->trace) == 0;
}

mt_status mt__course_begin(mt__course *c, const size_t *unit_bytes, int n_units,
                           const size_t *slot_bytes, int n_slots)
{
    int          fits = c->n_trace == 0 || c->n_trace == MT__COURSE_MARKS, at = 0;
    mt_schedule *sch;
    mt_status    st = MT_OK;

    /* A forward that was not followed by its backward is the beginning of what the schedule in
     * force was built from: that schedule stays. A trace met before gets its own back. */
    fits = fits || (c->cur != NULL && begins_like(c, c->cur));
    for (int i = 0; i < MT__COURSE_KEPT && !fits; i++)
        if (c->kept[i].n_trace == c->n_trace && begins_like(c, &c->kept[i])) {
            c->cur = &c->kept[i];
            fits = 1;
        }
    for (int i = 1; i < MT__COURSE_KEPT; i++)    /* the oldest gives way */
        if (c->kept[i].begun < c->kept[at].begun)
            at = i;
    if (!fits && (st = mt_schedule_build(c->trace, c->n_trace, unit_bytes, n_units, slot_bytes,
                                         n_slots, &sch)) == MT_OK) {
        kept_close(&c->kept[at]);
        c->kept[at] = (mt__kept){ .trace = MT_KEEP(c->trace), .n_trace = c->n_trace, .sch = sch };
        c->room = 0;                     /* the next trace has memory of its own */
        c->cur = &c->kept[at];
        c->rebuilds++;
    }
    c->begins++;
    if (c->cur != NULL)
        c->cur->begun = c->begins;
    c->n_trace = 0;
    c->at = 0;
    return st;
}

/* First COMPUTE at or after step i, of `unit` unless that is -1; -1: none. */
static int64_t next_compute(const mt_schedule *s, int64_t i, int unit)
{
    for (; i < s->n; i++)
        if (s->steps[i].kind == MT_COMPUTE && (unit < 0 || s->steps[i].unit == unit))
            return i;
    return -1;
}

int mt__course_over(const mt__course *c)
{
    const mt_schedule *s = mt__course_schedule(c);
    return s != NULL && next_compute(s, c->at, -1) < 0;
}

/* The order is not the one foreseen. Either another schedule foresaw it from the start, or the
 * schedule in force goes on from the unit's next COMPUTE, or this window is one of its own. */
static int64_t find_again(mt__course *c, int unit)
{
    int64_t step = -1;

    for (int i = 0; i < MT__COURSE_KEPT; i++)
        if (&c->kept[i] != c->cur && begins_like(c, &c->kept[i])) {
            c->cur = &c->kept[i];
            for (int64_t k = 0; k < c->n_trace; k++)     /* the newest of the trace's COMPUTEs */
                step = next_compute(c->kept[i].sch, step + 1, -1);
            return step;
        }
    return next_compute(mt__course_schedule(c), c->at, unit);
}

mt_status mt__course_compute(mt__course *c, int unit, int64_t *from, int64_t *step)
{
    const mt_schedule *s = mt__course_schedule(c);

    /* At the limit units are dropped: begin then builds nothing, all stays correct on demand. */
    if (c->n_trace < MT__COURSE_MARKS) {
        MT_DO(MT_GROW(c->trace, c->room, c->n_trace + 1, "stream"));
        c->trace[c->n_trace++] = unit;
    }
    *from = c->at;
    *step = s == NULL ? -1 : next_compute(s, c->at, -1);
    if (s != NULL && (*step < 0 || s->steps[*step].unit != unit)) {
        *from = 0;                  /* whatever the slots should hold by now is looked at again */
        *step = find_again(c, unit);
    }
    if (*step >= 0)
        c->at = *step + 1;
    return MT_OK;
}

int mt__course_wants(const mt__course *c, int64_t i, int64_t now)
{
    const mt_schedule *s = mt__course_schedule(c);
    int                slot = s->steps[i].slot;

    if (s->steps[i].kind != MT_FETCH)
        return 0;
    for (int64_t j = i + 1; j < s->n; j++) {
        if (s->steps[j].kind == MT_FETCH && s->steps[j].slot == slot)
            return 0;
        if (s->steps[j].kind == MT_COMPUTE && s->steps[j].slot == slot && j >= now)
            return 1;
    }
    return 0;
}

int mt__course_keeps(const mt__course *c, int64_t i, int slot)
{
    const mt_schedule *s = mt__course_schedule(c);
    int64_t            until = next_compute(s, i, s->steps[i].unit);

    for (int64_t j = i + 1; j < until; j++)
        if (s->steps[j].kind == MT_FETCH && s->steps[j].slot == slot)
            return 0;
    return 1;
}
