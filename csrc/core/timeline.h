/* timeline.h — what each queue did when.
 *
 * Nouns, in the order they appear below:
 *   lane     a resource that does one thing at a time: a queue, or a thread of ours
 *   work     what it did
 *   record   some work on a lane: its unit, its bytes, when it began and ended
 *   span     a record in the making: it has begun
 *   stack    the computing thread's spans: a replay interrupts the backward that needs it
 *
 *     mt_span span;
 *     mt_timeline_begin(t, &span, MT_LANE_H2D, MT_WORK_FETCH, unit, h2d);
 *     dev->ops->copy(h2d, ...);
 *     mt_timeline_end(t, &span, bytes, h2d);
 *     ...
 *     n = mt_timeline_read(t, records, cap);           // those whose times are known by now
 *
 * A queue's times are stamps in that queue (dev.h); a thread's are the clock's. All are on the
 * clock of lock.h. Off, as at first, begin and end look at one flag. On, a record costs two
 * stamps. The latest MT_TIMELINE_KEPT records are kept until they are read; older ones are lost and
 * counted.
 *
 * Threads: any, but a span and the stack belong to one thread at a time.
 * Errors:  recording never fails the work recorded: a stamp that cannot be put loses the record.
 */
#ifndef MT_TIMELINE_H
#define MT_TIMELINE_H

#include "dev.h"

#define MT_LANE_MAP(X)                                                                          \
    X(COMPUTE, "compute",     "the stream that torch computes on")                              \
    X(H2D,     "h2d",         "weights to the device")                                          \
    X(D2H,     "d2h",         "gradients to the host, and their sums of squares")               \
    X(HAND,    "hand-over",   "who hands gradients over, and launches windows: waits for the "  \
                              "unit's update, which gives a buffer back; with no unit: for "    \
                              "earlier gradients to reach the host")                            \
    X(SUM,     "host sum",    "the collector: gradients of further micro-batches added up")     \
    X(HOST,    "host update", "the updater: AdamW on the host, and its waits")                  \
    X(DEVICE,  "device update", "AdamW on the device")                                          \
    X(THROUGH, "through",     "AdamW on the device for units on the host: up, updated and "     \
                              "down; guests' states")                                           \
    X(EXCHANGE, "exchange",   "gradients between processes: until the parts of all have come")  \
    X(GATHER,  "gather",      "weights from other processes' devices")                          \
    X(DISK,    "disk",        "states of units on disk: pieces read and written")               \
    X(DISK_UPDATE, "disk update", "AdamW on those states, beside the updater; and its waits "   \
                                  "for the disk")                                               \
    X(OUT,     "swap out",    "activations to the host")                                        \
    X(BACK,    "swap back",   "and back to the device")                                         \
    X(SPILL,   "swap disk",   "and on to a file: written and read")
#define MT_LANE_ENUM(name, text, what) MT_LANE_##name,
typedef enum mt_lane { MT_LANE_MAP(MT_LANE_ENUM) MT_LANE_COUNT } mt_lane;
#undef MT_LANE_ENUM
const char *mt_lane_name(mt_lane lane);

#define MT_WORK_MAP(X)                                                                          \
    X(STEP,     "step",     "a root forward starts: a point on COMPUTE; unit: its number")      \
    X(FORWARD,  "forward",  "a window's forward")                                               \
    X(REPLAY,   "replay",   "a window's forward again, in backward")                            \
    X(BACKWARD, "backward", "a window's backward")                                              \
    X(FETCH,    "fetch",    "a unit's weights, or a guest's states; bytes: copied")             \
    X(OFFLOAD,  "offload",  "gradients of a hand-over, or a guest's states; bytes: copied")     \
    X(ADD,      "add",      "a micro-batch's gradients added; bytes: added")                    \
    X(UPDATE,   "update",   "a unit's update; bytes: read and written")                         \
    X(SWAP,     "swap",     "what a window keeps; bytes: copied")                               \
    X(READ,     "read",     "a piece of a unit's states from the disk; bytes: read")            \
    X(WRITE,    "write",    "a piece back; bytes: written")                                     \
    X(WAIT,     "wait",     "for gradients, for copies that still read the weights, for the "   \
                            "disk; HAND: see there")
#define MT_WORK_ENUM(name, text, what) MT_WORK_##name,
typedef enum mt_work { MT_WORK_MAP(MT_WORK_ENUM) MT_WORK_COUNT } mt_work;
#undef MT_WORK_ENUM
const char *mt_work_name(mt_work work);

typedef struct mt_record {
    mt_lane  lane;
    mt_work  work;
    int      unit;               /* -1: none */
    uint64_t bytes;
    uint64_t begin_ns, end_ns;
} mt_record;

typedef struct mt_span {
    mt_record r;
    int       at;                /* its entry */
    int       open;              /* 0: nothing is recorded */
} mt_span;

typedef struct mt_timeline mt_timeline;

#define MT_TIMELINE_KEPT 16384

mt_status mt_timeline_open (mt_dev *dev, mt_timeline **out);
void      mt_timeline_close(mt_timeline *t);             /* after the queues it has stamps in */
mt_status mt_timeline_on   (mt_timeline *t, int on);     /* MT_ENOMEM the first time, at most */

/* t NULL is a timeline that is off. q NULL: the work is the calling thread's. A span that began is
 * ended in the same queue, or its record is never read. */
void mt_timeline_begin(mt_timeline *t, mt_span *s, mt_lane lane, mt_work work, int unit,
                       mt_queue *q);
void mt_timeline_end  (mt_timeline *t, mt_span *s, uint64_t bytes, mt_queue *q);

/* A record of what is over now and began then, on a lane whose records follow each other: it begins
 * where the one before ended, at the earliest, which *reached_ns says. Nothing for no bytes. */
void mt_timeline_over (mt_timeline *t, mt_lane lane, mt_work work, int unit, uint64_t begun_ns,
                       uint64_t bytes, uint64_t *reached_ns);

/* The computing thread's. enter interrupts the span that is open, leave lets it go on. wait: run is
 * about to wait for the unit's weights; 1 when that is the open span's first wait, and it goes on
 * with waited: so the wait is in no record. step: a root forward starts, and spans that a failure
 * left open are over; number: the caller's, kept as the record's unit. */
void mt_timeline_enter(mt_timeline *t, mt_work work, int unit, mt_queue *run);
void mt_timeline_leave(mt_timeline *t, mt_queue *run);
int  mt_timeline_wait (mt_timeline *t, int unit, mt_queue *run);
void mt_timeline_waited(mt_timeline *t, mt_queue *run);
void mt_timeline_step (mt_timeline *t, int number, mt_queue *run);

/* Up to cap records whose times are known, each once; those of work that the queues have not done
 * yet come with a later call, so sort by time what is to be in order. */
int64_t  mt_timeline_read(mt_timeline *t, mt_record *out, int64_t cap);
uint64_t mt_timeline_lost(mt_timeline *t);

#endif
