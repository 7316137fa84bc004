/* schedule.h — which slot holds which unit when, as data.
 *
 * A trace is what a step did: the units whose windows opened, in order. A schedule is the same step
 * with its copies put in: a list of
 *
 *     FETCH   u -> slot    put in the H2D queue: as early as a slot allows
 *     COMPUTE u in slot    the window's work, or a part of backward that needs u's weights
 *
 *     mt_schedule_build(trace, n, unit_bytes, n_units, slot_bytes, n_slots, &sch);
 *     mt_schedule_print(sch, names, text, sizeof text);
 *     fetch embed        -> slot 3
 *     fetch layers.0     -> slot 0
 *     compute embed      in slot 3
 *     ...
 *
 * A step starts with empty slots: the update has changed all weights. FETCHes stand in the order
 * in which their units are needed, as the H2D queue will do them. A FETCH right behind COMPUTE k
 * may name k's own slot, and often does: it is to be handed over once k's kernels are in their
 * queue, which is when the next COMPUTE begins. That next COMPUTE is the one that needs it only
 * where the unit's class has a single slot; nothing hides such a copy.
 *
 * Rules, which tests hold for random traces:
 *   each COMPUTE is preceded by a FETCH of that unit into that slot with no other FETCH into it
 *   between; no slot is fetched over while a later COMPUTE of its unit precedes the next use of the
 *   newcomer.
 */
#ifndef MT_SCHEDULE_H
#define MT_SCHEDULE_H

#include "status.h"
#include <stdint.h>

typedef enum mt_step_kind { MT_FETCH, MT_COMPUTE } mt_step_kind;

typedef struct mt_step {
    mt_step_kind kind;
    int          unit, slot;
} mt_step;

typedef struct mt_schedule {
    mt_step *steps;
    int64_t  n;
} mt_schedule;

/* Farthest next use decides which slot gives way (Belady 1966), of equals the one idle for longest;
 * a fetch is put as early as the rules allow and never displaces a unit needed sooner. A slot fits
 * a unit when its bytes do; the smallest class of slot that fits is used. Several units of one
 * window are several COMPUTEs in the trace, each of which stays until its own. MT_EINVAL: a unit of
 * the trace fits no slot; named are its number, its bytes and the largest slot. */
mt_status mt_schedule_build(const int *trace, int64_t n_trace, const size_t *unit_bytes,
                            int n_units, const size_t *slot_bytes, int n_slots, mt_schedule **out);
void      mt_schedule_free (mt_schedule *s);
/* names: of the units. Writes at most cap bytes, NUL included; returns the length of the whole. */
size_t    mt_schedule_print(const mt_schedule *s, const char *const *names, char *text, size_t cap);

/* ---- following one --------------------------------------------------------------------------
 * The half of the stream that moves no bytes: the acquiring thread's, private to stream.c. The
 * trace is what happened since begin; the cursor is the first step of the schedule in force that
 * was not handed over yet; up to four schedules are kept, each with its trace, so that training and
 * evaluation in turn build none anew. */

#define MT__COURSE_KEPT  4
#define MT__COURSE_MARKS ((int64_t)1 << 20)   /* 4 MiB; a longer trace is not worth a schedule */

typedef struct mt__kept {
    int         *trace;
    int64_t      n_trace;
    mt_schedule *sch;        /* NULL: this entry is free */
    uint64_t     begun;      /* number of the begin that chose it last: the oldest gives way */
} mt__kept;

typedef struct mt__course {
    int      *trace;         /* units whose windows opened since begin */
    int64_t   n_trace, room;
    mt__kept  kept[MT__COURSE_KEPT];
    mt__kept *cur;           /* of kept: the schedule in force; NULL: there is none yet */
    int64_t   at;            /* the cursor, an index into its steps */
    uint64_t  begins;
    int64_t   rebuilds;
} mt__course;

void mt__course_close(mt__course *c);        /* it begins as zeros, and ends so */

/* The trace has ended: chooses the schedule for the next, building one when none fits.
 * The trace is forgotten and the cursor at the start, also on failure. */
mt_status mt__course_begin(mt__course *c, const size_t *unit_bytes, int n_units,
                           const size_t *slot_bytes, int n_slots);

/* A window of `unit` opens. *step: its COMPUTE in the schedule, -1 when there is none; *from: the
 * steps [*from, *step) are to be looked through for FETCHes; the cursor stands behind *step.
 * MT_ENOMEM when the trace cannot grow; nothing changes then. */
mt_status mt__course_compute(mt__course *c, int unit, int64_t *from, int64_t *step);

const mt_schedule *mt__course_schedule(const mt__course *c);     /* in force; NULL: none */
/* No COMPUTE is left. */
int mt__course_over(const mt__course *c);
/* Step i is a FETCH, and what it brings is used at or after step `now`, not fetched over before. */
int mt__course_wants(const mt__course *c, int64_t i, int64_t now);
/* A copy of FETCH i's unit that is in `slot` stays there until the COMPUTE that FETCH i is for. */
int mt__course_keeps(const mt__course *c, int64_t i, int slot);

#endif
