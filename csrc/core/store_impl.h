/* store_impl.h — what the files of a store share; nobody else includes it.
 *
 * A file calls those before it, and of its own floor none:
 *
 *     ledger.c     what is under way on a unit; calls up by two hooks alone
 *     store.c      units, planes, addresses
 *     lend.c       GRAD planes of gradients that pass
 *     mirror.c     copies of planes at home elsewhere, and what other ranks have of them
 *     spread.c     what every rank writes in place
 *     relay.c      what other machines are told
 *     peers.c      a store is opened, moves units, and ends; in a share it has two threads
 *
 * Locks (lock.h has their order):
 *   serving     another rank is served, or a unit moves (peers.c)
 *   making      a plane's: it is being mapped, touched, registered or given back, which takes
 *               seconds a gigabyte. Whoever asks for another plane, or for an address that is
 *               there, does not wait
 *   map_mu      the map: units, planes and their arenas. Held for moments (store.c, lend.c)
 *   fetched_mu  each unit's `fetched` event: its making and its records (ledger.c)
 *   mirror_mu   copies, claims and doors (mirror.c)
 *   ledger.mu   counts, versions, the fault                    (ledger.c)
 */
#ifndef MT_STORE_IMPL_H
#define MT_STORE_IMPL_H

#include "arena.h"
#include "mirror.h"

#include <pthread.h>
#include <stdatomic.h>

/* One plane of one unit. Its fields are read under `making` or map_mu, and written under both. */
typedef struct mt__plane {
    mt_mutex   making;
    uintptr_t *at;           /* [n] each parameter's address; 0: it has none. NULL: not made */
    mt_arena   arena;
    mt_arena  *own;          /* [n] of parameters that have an arena of their own: those that became
                              * trainable after the plane was made, and in a share all, but of HI,
                              * each a part of `arena`. NULL: none has */
    mt_arena   view;         /* in a share: the arena's range again, for user code (spread.c) */
} mt__plane;

#define MT__ABSENT SIZE_MAX              /* as an offset: the plane has nothing of it */

/* The side that a plane's memory is on. A plane whose home is the device may have both: then the
 * host's is a copy. */
enum { MT__HOST, MT__DEVICE, MT__SIDES };

/* Copies of a unit's planes. All under mirror_mu. */
typedef struct mt__mirror {
    unsigned char *copies;           /* [MT_PLANE_COUNT * n] an mt_mirror_state each. NULL: the home
                                      * keeps no planes, or has ended */
    unsigned       pages;            /* planes whose memory on the host may be committed */
    unsigned       claimed;          /* planes to which somebody has a claim */
    int            busy;             /* a thread is behind the door */
    int            all_evict;        /* in a share: all ranks are at the unit's evict */
    _Atomic(unsigned char *) aloft;  /* [n] in a share: weights that are aloft (mirror.c). NULL:
                                      * none. Written while all ranks evict, or move, the unit */
} mt__mirror;

typedef struct mt__unit {
    char          *name;             /* these ten: written by add, before the unit is published */
    mt_shape       shape;            /* but desc's `trainable`, an atomic: see trains */
    int            number;
    int            shared;           /* it is in a share */
    size_t         align;            /* bytes; where a parameter may begin in a plane */
    mt_portion     own;              /* this process's: of all, or in a share its rank's */
    mt_range       range[MT_PLANE_COUNT];        /* these three: in a share */
    mt_board       board;
    size_t        *chunk;            /* [n] its first chunk's number on the board */
    atomic_uchar  *unfiled;          /* [n] in a share: not in the file that the unit's states are
                                      * in; written by mt_store_in_arena */

    mt__plane      plane[MT__SIDES][MT_PLANE_COUNT];
    atomic_int     states;           /* an mt_states; set under map_mu, before a plane of them is
                                      * made */
    /* Where the unit lives, and what that home's functions get. The thread that moves the unit
     * writes home_of first; any thread reads both. */
    _Atomic(const mt_home *) home;
    void          *home_of;
    atomic_int     passing;          /* its GRAD plane is lent. Set under map_mu; read by anyone */
    /* What is under way on it. Written under ledger.mu; atomics are read by anyone. */
    struct mt__account {
        _Atomic uint64_t version, writes;    /* from 1: a slot that says 0 holds nothing. writes: of
                                              * these, those from outside */
        _Atomic int64_t  updates, grads, fetches, saves;     /* announced and not finished */
        uint64_t         begun[MT_UNIT_COUNTS];      /* announced here so far */
        mt_event        *fetched;    /* made at the first fetch, then stays. fetched_mu */
        mt_post          copying;    /* of the queue that `fetched` was recorded in. fetched_mu */
    } account;
    mt__mirror     mirror;
} mt__unit;

typedef struct mt__ledger {
    mt_mutex        mu;
    pthread_cond_t  changed;         /* monotonic clock; broadcast at every change but a begin */
    atomic_int      wanted;          /* unit plus 1 whose save was waited for last; 0: none. Written
                                      * under mu */
    uint64_t        meets[MT_COUNTS];        /* to where a thread here waits for ranks to come; 0:
                                              * none does. mu */
    char            meeting[160];    /* what this rank does in a meeting; "": it is in none. mu */
    int             bringing;        /* threads here wait for what another one brings. mu */
    int             asking;          /* a thread here asks other ranks; one at a time. mu */
    uint64_t        asked;           /* the request that it waits for; 0: none. mu */
    atomic_int      fault;           /* an mt_status; MT_OK until the first. Written under mu */
    char            text[1024];      /* written once, before fault */
    /* Hooks of the floors above, set before the first unit. update_over: before the end of a unit's
     * update is told. touched: some of the host's weights were written. */
    void          (*update_over)(mt_store *s, int unit);
    void          (*touched)(mt_store *s, int unit);
} mt__ledger;

/* A thread of ours, in a share. */
typedef struct mt__thread {
    pthread_t  thread;
    int        runs;                 /* who opens and closes the store */
    unsigned   forks;                /* mt_forks() of the process that has the thread */
    atomic_int stop;
} mt__thread;

/* Units live in segments that never move, so that readers need no lock. */
#define MT__SEG_UNITS 256
#define MT__SEGS      256

struct mt_store {
    mt_dev         *dev;
    mt_pool        *pool;
    mt_share       *share;                   /* NULL: this process is alone */
    mt_mutex        serving, map_mu, fetched_mu, mirror_mu;
    pthread_cond_t  mirror_changed;          /* broadcast when a door is open again */
    mt__unit      **seg[MT__SEGS];           /* written under map_mu before n_units covers them */
    _Atomic int     n_units;                 /* release after a unit is whole; read by anyone */
    _Atomic size_t  mapped[MT_PLANE_COUNT];  /* host bytes; written under map_mu, read by anyone */
    _Atomic size_t  on_device;               /* the device's bytes, likewise */
    /* Buffers that are some unit's GRAD plane for a while. Under map_mu; who makes a buffer holds
     * that plane's `making`. */
    struct mt__lent {
        mt_arena    arena;                   /* of registered host memory, or of the device's */
        int         unit;                    /* that has it; -1: it is free */
        uint64_t    number;                  /* of the lending, the first is 1 */
    } *lent;                                 /* [n_lent] */
    int64_t         lent_room;
    int             n_lent, most_lent;       /* most_lent: buffers of one size on one side;
                                              * constant once anything is lent */
    uint64_t        lendings;                /* buffers lent so far. map_mu */
    mt__ledger      ledger;
    mt_watch        watch;
    mt__thread      peers, serves;           /* serves: begins under `serving` */
    atomic_int      served;                  /* requests */
};

/* NULL when there is none. */
static inline mt__unit *mt__unit_at(const mt_store *s, int unit)
{
    if (unit < 0 || unit >= atomic_load(&s->n_units))
        return NULL;
    return s->seg[unit / MT__SEG_UNITS][unit % MT__SEG_UNITS];
}

/* One of no parameters where there is none: for who asks for a fact that it lacks as well. */
static inline const mt__unit *mt__unit_or_none(const mt_store *s, int unit)
{
    static const mt__unit none = { .name = (char *)(uintptr_t)"?", .align = MT_PART_ALIGN,
                                   .home = &mt_home_ram };
    const mt__unit *u = mt__unit_at(s, unit);

    return u != NULL ? u : &none;
}

/* Of a parameter's weights in plane HI: bytes until another's may begin. */
static inline size_t mt__weight_room(const mt__unit *u, int i)
{
    const mt_param_desc *d = &u->shape.desc[i];

    return mt_round_up((size_t)d->numel * mt_dtype_bytes(d->dtype), u->align);
}

static inline mt_status mt__no_unit(const mt_store *s, int unit)
{
    return MT_FAIL(MT_EINVAL, "there is no unit %d; the store has %d", unit,
                   atomic_load(&s->n_units));
}

/* As MT_UNTIL, under ledger.mu, or for a fault. unit: its name, or NULL. */
#define MT__LEDGER_UNTIL(s, over, unit, awaits)                                                    \
    __extension__({                                                                                \
        mt_status until_ = MT_UNTIL(&(s)->watch, &(s)->ledger.changed, &(s)->ledger.mu,            \
                                    (s)->ledger.fault != MT_OK || (over), unit, awaits);           \
        mt_status fault_ = mt_ledger_check(s);                                                     \
        fault_ != MT_OK ? fault_ : until_;                                                         \
    })
void mt__version_grows(mt_store *s, int unit);          /* weights were written from outside */
/* For peers.c. stirred: some rank has said something. fault_of: another's fault, or its end, is
 * this one's too. awaits: something of a rank is awaited here: what, in words. crossed: the rank
 * does in another order what all do in one: what, in words. */
void mt__ledger_stirred (mt_store *s);
void mt__ledger_fault_of(mt_store *s, const char *text);
int  mt__ledger_awaits  (mt_store *s, int rank, char *out, size_t cap);
int  mt__ledger_crossed (mt_store *s, int rank, char *out, size_t cap);

/* store.c. lay_out: where each parameter starts in a plane, as parameters are trained now,
 * malloc'd, and the bytes of all; side: in a share the host's is laid out for all that may come. */
mt_status mt__lay_out(const mt__unit *u, int side, mt_plane p, size_t **offset, size_t *bytes);
mt_status mt__find   (const mt_store *s, int unit, int param, mt__unit **out);   /* or MT_EINVAL */
void      mt__unbind (mt_store *s, mt__unit *u);        /* both locks: it has no GRAD plane now */
void      mt__unit_close  (mt_store *s, mt__unit *u);
/* Weights (params: [n]) have no memory on the host any more; what is left is registered. */
void      mt__thin        (mt_store *s, mt__unit *u, const unsigned char *params);
void      mt__device_close(mt_store *s, mt__unit *u);   /* map_mu: it has no device plane now */
/* A unit may come to this home, and the host has what it needs then; it is there. */
mt_status mt__home_ready(mt_store *s, int unit, const mt_home *to);
void      mt__home_set  (mt_store *s, int unit, const mt_home *to, void *of);
/* Chunks [from, from + n) of its board are of what is in the portion. */
void      mt__chunks_of (const mt__unit *u, const mt_portion *p, size_t *from, size_t *n);

/* lend.c. take_back: a hook of the ledger's. close: behind the units. */
void mt__take_back (mt_store *s, int unit);
void mt__lent_close(mt_store *s);

/* mirror.c. move: the unit comes to this home, for which the host is ready. touched: a hook of the
 * ledger's. lacks: ranks of other machines have other values of these planes than came from them.
 * serve: this rank's portion of the planes that a request is about is in host memory; *gone: its
 * home has ended. What is announced is not waited for: who asks has done so, and may be awaited
 * himself by what was announced here since. asked: what a request is about. */
mt_status mt__mirror_move   (mt_store *s, int unit, const mt_home *to, void *of);
void      mt__mirror_touched(mt_store *s, int unit);
void      mt__mirror_lacks  (mt_store *s, int unit, unsigned planes);
mt_status mt__mirror_serve  (mt_store *s, uint64_t about, int *gone);
/* Under serving: the unit's, as long as host memory mirrors its planes; else NULL. */
const mt_home *mt__home_kept(mt_store *s, int unit, void **of);
void      mt__asked         (uint64_t about, int *unit, unsigned *planes, int *claims);

#endif
