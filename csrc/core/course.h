/* course.h — where a step is in its schedule: the half of the stream that moves no bytes.
 *
 * Nouns: the trace is what happened since begin; the cursor is the first step of the schedule in
 * force that was not handed over yet; up to four schedules are kept, each with its trace, so
 * that training and evaluation in turn build none anew.
 *
 * Threads: the acquiring thread only. Private to stream.c and its tests.
 */
#ifndef MT_COURSE_H
#define MT_COURSE_H

#include "schedule.h"

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
