/* search.h — the placement of least time, of all that fit.
 *
 * Nouns, in the order they appear below:
 *   home     where a unit's weights and states are, by the words of base/modes.py
 *   search   a model on a machine: units, costs of windows by what they keep, what may be chosen
 *   row      homes of all units with what they leave of each memory; every ring size may go with it
 *   track    windows that keep something away from the device; the others keep ever more on it from
 *            level to level, what saves most seconds per byte first
 *   choice   a row, a ring, a number of micro-batches, a track and a level
 *
 * Every choice that fits gets a lower bound of its time, each resource of the walk by itself; those
 * below the best time found are walked (walk.h), the lowest bound first. A bound has two parts: one
 * of homes, made once for a row, and one of what windows keep, made once for a level. So millions
 * of pairs cost a few operations each.
 *
 * What may be chosen does not depend on the limits, so more memory is never slower.
 *
 *     mt_search_best(&search, INFINITY, 20000, &choice, &found, &any);
 *
 * Threads: any; nothing is shared.
 * Errors:  MT_EINVAL where the walk finds numbers that contradict each other, MT_ENOMEM. Places in
 *          tables (kinds, modes, homes) are the caller's to have right: plans/search.py fills them.
 */
#ifndef MT_SEARCH_H
#define MT_SEARCH_H

#include "walk.h"

/* In RAM or in a file only states, or weights too, are away; THROUGH: in RAM, updated by way of the
 * device. On VRAM and ARRIVE weights stay on the device; of ARRIVE states come for an update. */
enum { MT_HOME_RAM, MT_HOME_VRAM, MT_HOME_ARRIVE, MT_HOME_THROUGH, MT_HOME_DISK,
       MT_HOME_DISK_WEIGHTS };

/* What a window keeps, least first; LINKED: in place of its input what the layer before makes.
 * Modes behind it keep the same elsewhere. */
enum { MT_KEEP_REPLAY, MT_KEEP_ATTENTION, MT_KEEP_SAVED = 3, MT_KEEP_LINKED };

enum { MT_TRACK_FIXED = 1, MT_TRACK_PAIR = 2 };   /* bits of `flags` */

typedef struct mt_search {
    mt_walk step;                /* what no choice changes; the arrays of the others are NULL */
    int64_t n_kinds, n_modes;    /* of windows that cost the same; of what one may keep */
    int64_t n_micro, n_rings, n_rows;

    /* [n_units] */
    const double  *host_s, *pool_s;      /* of an update on all threads, and on those of a file's */
    const double  *passing_s;            /* by way of the device; INFINITY: there is no such way */
    const double  *drive_s, *drive_weights_s;   /* of a file for an update; with weights */
    const double  *fetch_s;              /* of the file for a fetch */
    const double  *streamed, *settled, *passing; /* bytes beside updates on the host: in RAM or a
                                          * file, on the device, and of one that passes through */
    const int64_t *bytes;                /* of weights; `step.weights`: what crosses, on average */
    const int64_t *states;               /* that arrive */
    const double  *device_s;             /* [n_micro][n_units] of an update on the device */
    mt_walk_list   pieces;               /* bytes of what is fetched at once; of FETCHED units */

    /* [n_windows] */
    const int64_t *kind, *learns;        /* learns: 0 where nothing of it is kept */
    const int64_t *flying;               /* bytes of gradients on the device in its backward */

    /* [n_micro][n_kinds], then by mode too; NAN where a window has no such mode */
    const double  *forward_s, *forward_host_s, *backward_s, *backward_host_s;
    const int64_t *kept, *work, *away;   /* bytes on the device, beside in backward, elsewhere */
    const int64_t *on_disk, *is_linked;  /* [n_modes] */

    const int64_t *micro;                /* [n_micro] numbers of micro-batches, fastest first */
    const int64_t *cached;               /* [n_micro] bytes on the device beside, all the time */
    const int64_t *rings;                /* [n_rings] slots of a size, fewest first */

    /* [n_micro + 1] where each number's tracks begin; [tracks][n_windows] */
    const int64_t *tracks;
    const uint8_t *modes, *flags;        /* PAIR: the next window may be linked to it */

    /* [n_rows] in the order in which equals are preferred; [n_rows][n_units] homes */
    const uint8_t *homes;
    const int64_t *several;              /* 1: of more than one micro-batch */
    const int64_t *planes, *host;        /* bytes on the device and in host memory, slots and
                                          * activations left out */
    const int64_t *room;                 /* bytes that are left for activations in a file */
    const double  *memory_s;             /* [n_rows][n_micro], see walk.h */

    int64_t whole;               /* 1: experts come a few at a time; the walk has them as a whole */
    int64_t spared;              /* bytes that slots spare a pass at least */
    int64_t lends, keeps;        /* buffers of a size for gradients kept nowhere; 1: kept */
    int64_t early;               /* windows that may keep something while states are there */
    int64_t padding;             /* bytes of a file between bundles */
    int64_t most_vram, most_host;        /* bytes that there are */
    int64_t gpus;                /* that share host memory and the drive */
    double  cache;               /* what torch's allocator holds beyond activations, as a share */
    double  byte_s;              /* by which a byte that is copied holds up AdamW on the host */
    double  worth;               /* by so much THROUGH has to be faster than all else */
} mt_search;

typedef struct mt_choice {
    int row, ring, micro, track, level;  /* places in the arrays; track: of its micro's */
} mt_choice;

enum { MT_THROUGH_NONE, MT_THROUGH_FASTER, MT_THROUGH_ALL };

/* What rows are made of: homes with all that host memory lacks still in it. */
typedef struct mt_placing {
    int64_t n_units, n_order, n_base, n_several;
    const int64_t *order;        /* [n_order] units by first use */
    const int64_t *trained;      /* [n_units] parameters */
    const int64_t *states, *weights;     /* bytes: that arrive; of weights */
    const int64_t *files;        /* [2][n_units] bytes in a file, with at most so many between
                                  * them: of one whose states are there; weights too */
    const int64_t *padding;      /* [n_units] of the first, between them */
    const uint8_t *base;         /* [n_base][n_units] */
    const int64_t *several;      /* [n_several] 1: of more than one micro-batch */
    const int64_t *lack;         /* [n_base][n_several] bytes that host memory lacks */
    int64_t through, to_disk;    /* who goes through the device; a home on disk that is asked for,
                                  * or MT_HOME_RAM */
    int64_t room;                /* bytes of the file; -1: there is none */
    int64_t memory, feed;        /* bytes of host memory of a disk's buffers; of one with weights */
    int64_t keeps, apart;        /* gradients are kept; 1: several machines, no weights in files */
    double  both, through_rate, host_rate;   /* bytes/s; parameters/s, 0: there is no such way */
} mt_placing;

/* Rows, in the order in which equals are preferred. homes: [4 * n_base][n_units]; several:
 * [4 * n_base]; scratch: [2 * n_order + n_units]. Returns how many. */
int64_t mt_search_homes(const mt_placing *in, uint8_t *homes, uint8_t *several, int64_t *scratch);

/* Tracks of micro[m]: with nothing away, then with first layers, in growing number. asked: a mode
 * for all windows that have it, -1: there are all tracks. files: some may keep what they keep in
 * one; is_long: attention is most of a layer. Reads no tracks. modes, flags: [MT_TRACKS_MOST]
 * [n_windows]; scratch: [2][n_windows]. Returns how many. */
enum { MT_TRACKS_MOST = 1024 };
int64_t mt_search_tracks(const mt_search *in, int64_t m, int64_t asked, int files, int is_long,
                         uint8_t *modes, uint8_t *flags, int64_t *scratch);

/* Choices whose time is below `than`; at most so many are walked. *any: 0, there is none. modes:
 * [n_windows] of the best. */
mt_status mt_search_best(const mt_search *in, double than, int64_t most, mt_choice *best,
                         uint8_t *modes, mt_walked *found, int *any);
/* One choice that may be none of the rows or tracks. */
mt_status mt_search_time(const mt_search *in, int64_t micro, const uint8_t *homes, double memory_s,
                         int64_t ring, const uint8_t *modes, double than, mt_walked *found,
                         int *under);

typedef struct mt_memory_of {    /* bytes that windows take which keep what `modes` say */
    int64_t kept, work, flying;  /* on the device, where their sum is largest in a backward */
    int64_t peak, early;         /* with torch's cache; while states that arrive are there */
    int64_t away, spilled;       /* in host memory, with the bays of those in a file */
} mt_memory_of;
mt_status mt_search_memory(const mt_search *in, int64_t micro, const uint8_t *modes,
                           mt_memory_of *out);

typedef struct mt_level {
    int64_t peak, early;         /* bytes on the device; while states that arrive are there */
    double  backward_s;
} mt_level;

typedef struct mt_track {
    int64_t away, out, spilled;  /* bytes in host memory; that cross; in a file */
    double  least_s;             /* of a backward and of what it waits for, whatever is kept */
    int64_t n_levels;
} mt_track;

/* One track of micro[m]. levels: [n_levels], and modes [n_levels][n_windows]; NULL: nobody asks. */
mt_status mt_search_track(const mt_search *in, int64_t m, int64_t track, mt_track *out,
                          mt_level *levels, uint8_t *modes);
/* A lower bound of a choice's time. */
mt_status mt_search_bound(const mt_search *in, const mt_choice *choice, double *seconds);

/* What fits, or would. spilled: [n_rows][n_micro] the fewest bytes in a file with which a row fits,
 * -1: with none. vram, host: the least of each within the other's limit, -1: with none. least: the
 * choice that lacks the fewest bytes with nothing away, of those that the device can hold. */
typedef struct mt_needs {
    int64_t   vram, host;
    mt_choice least;
} mt_needs;
mt_status mt_search_needs(const mt_search *in, int64_t *spilled, mt_needs *out);

/* Bytes of the slots for units of these sizes, largest first: units of which the largest is at most
 * twice the smallest share a class, of `ring` slots. Where the classes that are left are small
 * altogether, each unit has its own. out: [n]. Returns how many. Sorts `sizes`. */
int64_t mt_plan_slots(int64_t *sizes, int64_t n, int64_t ring, int64_t *out);

#endif
