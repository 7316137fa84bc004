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
    int          n_units, n_slots;
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

mt_status mt_schedule_build(const int *trace, int64_t n_trace,
                            const size_t *unit_bytes, int n_units,
                            const size_t *slot_bytes, int n_slots, mt_schedule **out)
{
    walk      w = { .use = trace, .n_uses = n_trace, .n_units = n_units, .n_slots = n_slots };
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

typedef struct label { char text[24]; } label;

static const char *name_of(const char *const *names, int unit, label *own)
{
    if (names != NULL)
        return names[unit];
    snprintf(own->text, sizeof own->text, "unit %d", unit);
    return own->text;
}

size_t mt_schedule_print(const mt_schedule *s, const char *const *names, char *text, size_t cap)
{
    size_t len = 0, width = 18;      /* of "verb name", so that the slots stand in a column */
    label  own;

    for (int64_t i = 0; i < s->n; i++) {
        size_t one = strlen("compute ") + strlen(name_of(names, s->steps[i].unit, &own));

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
                                    (int)(width - strlen(verb)) - 1, name_of(names, e->unit, &own),
                                    e->kind == MT_FETCH ? "->" : "in", e->slot);

        len += n > 0 ? (size_t)n : 0;
    }
    return len;
}
