/* walk.h — how long a training step takes: the engine's rules, with seconds for work.
 *
 * Nouns, in the order they appear below:
 *   list     for each window, units
 *   walk     what a step is made of: seconds and bytes by window and by unit, rates, limits
 *   row      what can be busy, or be waited for: a lane of timeline.h, or Python, which launches
 *   event    work of one kind on a row, with its times
 *   walked   what came of it
 *
 * Queues are first in, first out, and all work waits only for what stands before
 * it in the order in which they are handed over. So one pass through the step in that order, taking
 * the later of what is waited for, gives every time; there is no clock to advance. Fetches are
 * those of the schedule that the engine would follow (schedule.h). A step begins when all gradients
 * of the one before have landed, which nothing of it outlasts; so one step from there to there is
 * the steady state. Time 0 is when the norm is known.
 *
 *     mt_walk_schedule(&walk, &sch);
 *     mt_walk_run(&walk, sch->steps, sch->n, INFINITY, NULL, &found, &under);
 *     printf("%g s; compute waits %g s for weights\n", found.seconds, found.idle[MT_LANE_H2D]);
 *
 * Nothing here knows a device, memory or Python: numbers come in, numbers go out.
 *
 * Threads: any; nothing is shared.
 * Errors:  MT_EINVAL where the numbers contradict each other, MT_ENOMEM.
 */
#ifndef MT_WALK_H
#define MT_WALK_H

#include "../core/schedule.h"
#include "../core/timeline.h"

/* Rows are lanes, and behind them Python's own work; then what several GPUs share: links between
 * those of a machine, the network between machines, and the memory of a machine's host. */
enum { MT_WALK_OWN = MT_LANE_COUNT, MT_WALK_EXCHANGE, MT_WALK_NETWORK, MT_WALK_MEMORY,
       MT_WALK_ROWS };

typedef struct mt_walk_list {
    const int64_t *begin;        /* [n_windows + 1] where in item a window's units begin */
    const int64_t *item;
} mt_walk_list;

typedef struct mt_walk {
    int64_t n_windows, n_units;

    /* [n_windows], of one micro-batch. `host` is what Python takes to launch it. No backward where
     * backward_s is 0. */
    const double  *forward_s, *backward_s, *forward_host_s, *backward_host_s;
    const int64_t *away;         /* bytes that it keeps in host memory until its backward */
    const int64_t *spilled;      /* 1: they go on to a file */
    mt_walk_list   units;        /* whose weights a window binds in forward */
    mt_walk_list   again;        /* and in backward */
    mt_walk_list   leaving;      /* whose gradients are handed over at the end of its backward */

    /* [n_units] */
    const int64_t *updated_on;   /* lane HOST, DISK, THROUGH; DEVICE: at home, nothing crosses */
    const int64_t *weights, *gradients;    /* bytes that cross */
    const int64_t *visiting;     /* bytes of a settled unit's states that arrive for its update */
    const double  *update_s;     /* on the device where at home there, else on the host */
    const double  *add_s;        /* to add up a further micro-batch's gradient on the host */
    const double  *disk_s;       /* on DISK: in which the drive moves what its update needs */
    const double  *through_s;    /* on THROUGH: of its update by way of the device */
    const double  *read_s;       /* in which the drive reads its weights; 0: they are in memory */

    /* [n_units], of one of several GPUs, which are taken to do the same at the same time; zeros of
     * one alone. Gradients leave for their owners behind compute, and go home from there. */
    const double  *exchange_s;   /* in which they are exchanged within the machine, and added */
    const double  *network_s;    /* and between machines, behind that */
    const double  *lost_s;       /* by which it holds up what is computed beside it */
    const double  *gather_s;     /* in which GPUs give each other the parts that each has fetched */
    const double  *held_s;       /* by which that holds up what is computed beside it */
    const double  *spread_s;     /* in which new weights go to the other machines */
    const int64_t *lowered, *raised;     /* bytes of new weights of a unit at home on the devices:
                                          * down to the host behind its update, and up before its
                                          * first use, from there or from the other devices */

    /* Bytes of the buffers that gradients pass through where they are kept nowhere, largest first.
     * Updates then follow their gradients, in backward. None: gradients are kept. */
    const int64_t *lent;
    int64_t        n_lent;
    const int64_t *slots;        /* bytes of each */
    int64_t        n_slots;

    int64_t micro, shown;        /* micro-batches; those walked through: all, or at least 3 */
    int64_t depth;               /* units whose gradients may be on their way from the device */
    int64_t stagings;            /* buffers on the host for gradients that are to be added */
    int64_t bays;                /* of host memory that carry activations to the file */
    int64_t ahead;               /* hand-overs by which states that arrive are asked for early */
    int64_t stay;                /* the window of a forward by which they are gone */
    double  h2d, d2h, both;      /* bytes/s: alone; of each, beside each other */
    double  busy;                /* beside AdamW on the host */
    double  stretch;             /* of update_s on the host, by what crosses beside it */
    double  write, read;         /* of the drive */
    double  rest_s;              /* between two steps: the clip factor */
    int64_t parts;               /* a fetch brings one of so many of a unit's weights; 1: all */
    double  peers;               /* bytes/s from other devices; 0: new weights come from the host */
    int64_t on_link;             /* 1: what GPUs exchange takes their links to the host */
    double  memory;              /* bytes/s of the host's memory for this GPU's copies; 0: enough */
    double  memory_s;            /* in which a step's updates and sums have that memory */
} mt_walk;

typedef struct mt_walk_event {
    int64_t row;
    int64_t of;                  /* a window on COMPUTE, OUT, BACK and SPILL, else a unit */
    double  begin, end;
} mt_walk_event;

typedef struct mt_walk_events {
    mt_walk_event *event;
    int64_t        n, cap;       /* n may exceed cap: what has no place is counted */
} mt_walk_events;

typedef struct mt_walked {
    double seconds, forward_s;   /* of a step; of its forwards */
    double busy[MT_WALK_ROWS];   /* seconds of work */
    double idle[MT_WALK_ROWS];   /* in which compute stands still, by what it waits for */
} mt_walked;

/* The schedule that the engine makes of the step: its COMPUTEs are the uses of units that are not
 * at home on the device, in the order in which `shown` micro-batches ask for them. It depends on
 * these and on weights and slots alone. */
mt_status mt_walk_schedule(const mt_walk *in, mt_schedule **out);

/* steps: of that schedule. *under: 0 where a step takes `than` seconds or more,
 * which is known sooner; *out is untouched then. events may be NULL. */
mt_status mt_walk_run(const mt_walk *in, const mt_step *steps, int64_t n_steps, double than,
                      mt_walk_events *events, mt_walked *out, int *under);

#endif
