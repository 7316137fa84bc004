/* home.h — where a unit's planes are between steps: a table that the unit points to.
 *
 * Nouns:
 *   home     ram: host memory. vram: the device. arrive: as vram, with states that are there around
 *            their update alone. through: ram, updated on the device. disk: states, or weights too,
 *            are in a file
 *   job      what an update of a unit takes, whichever home the unit has
 *   update   a job on its way
 *
 *     mt_store_move(s, unit, &mt_home_vram, residents);   // nothing of the unit is under way
 *     mt_store_home(s, unit, &of)->update(of, u);
 *
 * A unit has one home, so homes are not combined. It comes to each from one other, and goes back to
 * that; mt_store_move alone decides whether it may. A home is a table and its functions: nobody but
 * who moves units asks which one it is.
 */
#ifndef MT_HOME_H
#define MT_HOME_H

#include "pieces.h"
#include "worker.h"

#include <stdlib.h>

/* What all ranks have to ask alike of an update: name, in words. MT_ALIKE_BITS of each go into one
 * number where they do not. */
#define MT_ALIKE_MAP(X)                                                                            \
    X(PARAMS, "parameters with a gradient") X(NORM, "max_grad_norm")                              \
    X(GRADS, "gradients that were written, or set, by hand")                                       \
    X(LR, "lr") X(BETAS, "betas") X(EPS, "eps") X(DECAY, "weight_decay") X(STEP, "step number")    \
    X(MAXIMIZE, "maximize") X(STATES, "states")
#define MT_ALIKE_ENUM(name, words) MT_ALIKE_##name,
typedef enum mt_alike { MT_ALIKE_MAP(MT_ALIKE_ENUM) MT_ALIKES } mt_alike;
#undef MT_ALIKE_ENUM
#define MT_ALIKE_BITS 6

static inline uint64_t mt_alike_mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);        /* as splitmix64: Steele 2014 */
    hash = (hash ^ hash >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    return hash ^ hash >> 31;
}

typedef struct mt_update_job {
    int        unit;             /* its gradients are whole when it is carried out */
    int        n_params;
    const int *params;           /* [n_params] parameters of the unit that have a gradient */
    /* Sum of squares of params[i]'s gradient when the offloaded one does not count (the user
     * changed p.grad): computed on the pool by the updater. NULL: never. chunks, of a unit that has
     * several owners: the sums of its own chunks are asked for, in place of the whole's; of a unit
     * that has one: NULL. */
    double (*sumsq)(void *arg, mt_pool *pool, int i, double *chunks, int *use);
    mt_status (*run)(void *arg, mt_pool *pool, float clip);   /* the update itself, on the host */
    mt_status (*put)(void *arg, mt_queue *q, float clip);     /* a settled unit's: see resident.h */
    /* An update that goes through the device. gradient: where a parameter's is in host memory, and
     * of which plane its bytes are. compute: puts the update of parts in q; on the device are their
     * weights, gradients and states. */
    mt_status (*gradient)(void *arg, int param, const void **at, mt_plane *plane);
    mt_status (*compute)(void *arg, mt_queue *q, const mt_part *parts, int n, float clip);
    /* A unit's on disk: updates these parts in place, but for those of parameters that are not in
     * params. */
    mt_status (*pieces)(void *arg, mt_pool *pool, const mt_part *parts, int n, float clip);
    /* Adds hashes of what it asks, once its gradients are whole and measured. NULL: nothing. */
    void     (*alike)(const void *arg, uint64_t hash[MT_ALIKES]);
    uint64_t  bytes;             /* that run reads and writes, for the timeline */
    void    (*free)(void *arg);  /* called once, run or skipped; may be NULL */
    void     *arg;
    mt_event *asked;             /* the updater's: on run, behind compute that may read the weights
                                  * of a slot as they are; NULL: none may */
} mt_update_job;

/* A job on its way, which the updater has made, and the home it is handed to ends. */
typedef struct mt_update {
    mt_job        node;          /* of the home's worker */
    mt_update_job j;
    float         clip;
    uint64_t      number;        /* these two are the home's */
    mt_status     st;
    int           params[];      /* the job's, copied */
} mt_update;

/* Functions get what was given to mt_store_move. Planes: a bit 1u << plane each. */
struct mt_home {
    const char    *lives;        /* behind the unit's name, for messages */
    const mt_home *from;         /* where units come from, and go back to; NULL: this is ram */
    unsigned       away;         /* planes that it keeps: host memory mirrors them (mirror.h) */
    unsigned       later;        /* of those: planes in a slot, stored when that is used next. In a
                                  * share what is not aloft (mirror.c) stays in host memory, and is
                                  * registered: the ferry keeps it current */
    unsigned       stays;        /* of those: planes whose host memory is never given back */
    unsigned       visit;        /* planes that the host keeps, and the device has around an
                                  * update */
    unsigned       device;       /* planes for which the store has memory on the device */
    unsigned       registered;   /* planes whose host memory copy engines look at */
    unsigned       fresh;        /* planes that a unit may not have yet when it comes */
    int            fed;          /* its weights are fetched by way of a feed (disk.h). In a share
                                  * they are fresh too: one plane of all ranks', of which each keeps
                                  * its portion in its file */

    /* Host memory as a mirror. wait: until planes of `visit` may be read; may be NULL. load: copies
     * of these planes that are LOADING, or STALE by now, are on the host when it returns; their
     * memory is committed. store: when it returns the home has the values of the parameter's host
     * planes (param -1: of all parameters'). Both are called behind the unit's door. */
    mt_status (*wait) (void *of, int unit, unsigned planes);
    mt_status (*load) (void *of, int unit, unsigned planes);
    mt_status (*store)(void *of, int unit, int param, unsigned planes);
    /* The home stores what the host has ahead, and the memory of the unit's copies but GRAD's is
     * given back, claimed or not, when it returns; behind updates that are announced, and a save.
     * run: what computes on the weights. NULL: mt_mirror_evict does that. */
    mt_status (*take) (void *of, int unit, mt_queue *run);
    /* Between machines. slot: where the unit's weights are on the device, those of other machines'
     * ranks too, which are sent from there to there; NULL: they go by way of host memory. own: NULL
     * too where host memory has newer ones of this rank's, written from outside. lower: bytes
     * [from, to) of them, which came there, are in host memory when it returns. NULL: so is all. */
    void     *(*slot) (void *of, int unit, int own);
    mt_status (*lower)(void *of, int unit, size_t from, size_t to);

    /* Gradients. at: the address of a plane of theirs; NULL: they are in host memory. come: what
     * d2h is given from now on may write them; NULL: it may anyway. */
    mt_status (*at)  (void *of, int unit, int param, mt_plane p, void **out);
    mt_status (*come)(void *of, int unit, const int *params, int n, mt_queue *d2h);

    /* Updates. by: which of the job's functions makes them. update: its gradients are whole; the
     * home ends it, also on failure, by mt_update_over. NULL: the updater does all that. stepped:
     * waits until updates of this step are over; drain: until all are; either may be NULL. turn:
     * where a norm is known before, jobs of a smaller one go first. */
    enum { MT_BY_RUN, MT_BY_PUT, MT_BY_COMPUTE, MT_BY_PIECES } by;
    mt_status (*update) (void *of, mt_update *u);
    int         turn;
    mt_status (*stepped)(void *of);
    mt_status (*drain)  (void *of);
};

/* In the ledger with its failure, since the next fetch of the unit must fail, not read. */
static inline void mt_update_over(mt_store *s, mt_update *u, mt_status st)
{
    if (st != MT_OK)
        mt_ledger_fault(s, st, mt_last_error());
    mt_ledger_update_end(s, u->j.unit);
    if (u->j.free != NULL)
        u->j.free(u->j.arg);
    free(u);
}

/* through.c: updates of units that live on the host, made on the device. n_buffers of so many
 * bytes, at least MT_THROUGH_LEAST, whose memory is made with the first job. close finishes what
 * was put. */
#define MT_THROUGH_LEAST 8192
typedef struct mt_through mt_through;
mt_status mt_through_open (mt_context *cx, int n_buffers, size_t bytes, mt_through **out);
void      mt_through_close(mt_through *t);
typedef struct mt_through_stats {
    uint64_t h2d_bytes, d2h_bytes;       /* since open */
    size_t   device_bytes;               /* of the buffers, now */
} mt_through_stats;
mt_through_stats mt_through_stats_get(mt_through *t);

extern const mt_home mt_home_ram, mt_home_through;       /* store.c, through.c */
extern const mt_home mt_home_vram, mt_home_arrive;       /* resident.c */
extern const mt_home mt_home_disk, mt_home_disk_weights; /* disk.c */

#endif
