#include "course.h"

#include <stdlib.h>
#include <string.h>

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

/* ---- the trace -------------------------------------------------------------------------- */

/* The trace so far is how k's begins. */
static int begins_like(const mt__course *c, const mt__kept *k)
{
    if (k->sch == NULL || c->n_trace > k->n_trace || c->n_trace == MT__COURSE_MARKS)
        return 0;
    return c->n_trace == 0 ||
           memcmp(c->trace, k->trace, (size_t)c->n_trace * sizeof *c->trace) == 0;
}

/* ---- choosing a schedule ---------------------------------------------------------------- */

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

/* ---- the cursor ------------------------------------------------------------------------- */

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
