/* store_impl.h — what store.c, lend.c, ledger.c and mirror.c share; nobody else includes it.
 *
 * Locks (lock.h has their order):
 *   making      a plane's: it is being mapped, touched, registered or given back, which takes
 *               seconds a gigabyte. Whoever asks for another plane, or for an address that is
 *               there, does not wait
 *   map_mu      the map: units, planes and their arenas. Held for moments (store.c, lend.c)
 *   ledger.mu   counts, versions, the fault                    (ledger.c)
 *   fetched_mu  each unit's `fetched` event: its making and its records (ledger.c)
 *   mirror_mu   copies, claims and doors (mirror.c)
 */
#ifndef MT_STORE_IMPL_H
#define MT_STORE_IMPL_H

#include "arena.h"
#include "mirror.h"
#include "portion.h"

#include <pthread.h>
#include <stdatomic.h>

/* One plane of one unit. Its fields are read under `making` or map_mu, and written under both. */
typedef struct mt__plane {
    mt_mutex        making;
    size_t   *offset;        /* [n_params] bytes into the arena, or MT__ABSENT; NULL: not made */
    mt_arena  arena;
    mt_arena *late;          /* [n_params] arenas of parameters that became trainable afterwards;
                              * NULL: none did */
    size_t   *place;         /* [n_params] in a share, but of HI: bytes into the arena. All lie
                              * there as late ones, each made when it is asked for; offset has
                              * MT__ABSENT */
    mt_arena  view;          /* in a share: the arena's range again, for user code (view.c) */
} mt__plane;

#define MT__ABSENT SIZE_MAX

/* The side that a plane's memory is on. A plane whose home is the device may have both: then the
 * host's is a copy. */
enum { MT__HOST, MT__DEVICE, MT__SIDES };

/* Copies of a unit's planes. All under mirror_mu. */
typedef struct mt__mirror {
    const mt_home *home;             /* as the unit's; NULL: the unit is in ram */
    void          *of;               /* what that home's functions get */
    unsigned char *copies;           /* [MT_PLANE_COUNT * n_params] an mt_mirror_state each */
    unsigned       planes;           /* whose true values the home keeps, a bit each */
    unsigned       visit;            /* that the host keeps, and the device has around an update */
    unsigned       pages;            /* planes whose memory on the host may be committed */
    unsigned       claimed;          /* planes to which somebody has a claim */
    unsigned       whole;            /* in a share: planes of which the other ranks' portions are in
                                      * host memory too, since they changed last */
    uint64_t       changes;          /* so often did copies become old */
    int            busy;             /* a thread is behind the door */
    int            all_evict;        /* in a share: all ranks are at the unit's evict */
} mt__mirror;

typedef struct mt__unit {
    char          *name;             /* these five: written by add, before the unit is published */
    int            n_params;
    size_t        *hi_offset;        /* [n_params] bytes */
    size_t         hi_bytes;
    mt_param_desc *desc;             /* [n_params]; `trainable`, an atomic, later too: see
                                      * mt_store_trainable */

    mt__plane      plane[MT__SIDES][MT_PLANE_COUNT];
    mt_portion     own;              /* this process's, as one of so many owners. Set before a plane
                                      * but HI is made */
    int            owners;
    int            shared;           /* it is in a share. These six are written by add too */
    size_t         align;            /* bytes; where a parameter may begin in a plane */
    mt_range       range[MT_PLANE_COUNT];    /* these three: in a share */
    mt_board       board;
    size_t        *chunk;            /* [n_params] its first chunk's number on the board */
    atomic_uchar  *unfiled;          /* [n_params] in a share: not in the file that the unit's
                                      * states are in; written by mt_store_in_arena */
    atomic_int     states;           /* an mt_states; set under map_mu, before a plane of them is
                                      * made */
    /* Where the unit lives, and what that home's functions get. The thread that moves the unit
     * writes home_of first; any thread reads both. */
    _Atomic(const mt_home *) home;
    void          *home_of;
    atomic_int     passing;          /* its GRAD plane is lent. Set under map_mu; read by anyone */

    uint64_t       version, writes;  /* from 1: a slot that says 0 holds nothing. writes: of these,
                                      * those from outside. ledger.mu */
    mt__mirror     mirror;
    int64_t        updates, grads, fetches, saves;   /* announced and not finished. ledger.mu */
    uint64_t       begun[MT_UNIT_COUNTS];    /* announced here so far. ledger.mu */
    mt_event      *fetched;          /* made at the first fetch, then stays. fetched_mu */
    mt_post        copying;          /* of the queue that `fetched` was recorded in. fetched_mu */
} mt__unit;

/* A buffer that is some unit's GRAD plane for a while. Its fields are under map_mu; who makes its
 * memory holds that plane's `making`. */
typedef struct mt__lent {
    mt_arena arena;          /* of registered host memory, or of the device's */
    int      unit;           /* that has it; -1: it is free */
    uint64_t number;         /* of the lending, the first is 1 */
} mt__lent;

typedef struct mt__ledger {
    mt_mutex        mu;
    pthread_cond_t  changed;         /* monotonic clock; broadcast at every change but a begin */
    int             wanted;          /* unit plus 1 whose save was waited for last; 0: none. mu */
    uint64_t        meets[MT_COUNTS];        /* to where a thread here waits for ranks to come; 0:
                                              * none does. mu */
    char            meeting[160];    /* what this rank does in a meeting; "": it is in none. mu */
    int             apart;           /* threads here wait for planes that another one brings. mu */
    int             asking;          /* a thread here asks other ranks; one at a time. mu */
    uint64_t        asked;           /* the request that it waits for; 0: none. mu */
    mt_status       fault;           /* MT_OK until the first. mu */
    char            text[1024];      /* written once, before fault. mu */
} mt__ledger;

/* The thread that looks after the other ranks (peers.c). */
typedef struct mt__peers {
    pthread_t  thread;
    int        runs;                 /* who opens and closes the store */
    unsigned   forks;                /* mt_forks() of the process that has the thread */
    atomic_int stop;
} mt__peers;

/* The thread that does what other ranks ask for (asks.c). */
typedef struct mt__asks {
    pthread_t  thread;
    mt_mutex   serving;              /* held while one is served, and while a unit moves */
    int        runs;                 /* these two: under serving */
    unsigned   forks;                /* mt_forks() of the process that has the thread */
    atomic_int stop, served;         /* served: so often */
} mt__asks;

/* Units live in segments that never move, so that readers need no lock. */
#define MT__SEG_UNITS 256
#define MT__SEGS      256

struct mt_store {
    mt_dev         *dev;
    mt_pool        *pool;
    mt_share       *share;                   /* NULL: this process is alone */
    mt_mutex        map_mu, fetched_mu, mirror_mu;
    pthread_cond_t  mirror_changed;          /* broadcast when a door is open again */
    mt__unit      **seg[MT__SEGS];           /* written under map_mu before n_units covers them */
    _Atomic int     n_units;                 /* release after a unit is whole; read by anyone */
    _Atomic size_t  mapped[MT_PLANE_COUNT];  /* host bytes; written under map_mu, read by anyone */
    _Atomic size_t  on_device;               /* the device's bytes, likewise */
    mt__lent       *lent;                    /* [n_lent] map_mu */
    int             n_lent, most_lent;       /* most_lent: buffers of one size on one side;
                                              * constant once anything is lent */
    uint64_t        lendings;                /* buffers lent so far. map_mu */
    mt__ledger      ledger;
    mt_watch        watch;
    mt__peers       peers;                   /* these two: in a share */
    mt__asks        asks;
};

mt__unit *mt__unit_at(const mt_store *s, int unit);          /* NULL when there is none */

/* store.c. lay_out: offsets of a plane as parameters are trained now, malloc'd. side: in a share
 * the host's is laid out for all that may come. */
mt_status mt__lay_out(const mt__unit *u, int side, mt_plane p, size_t **offset, size_t *bytes);
mt_status mt__find   (const mt_store *s, int unit, int param, mt__unit **out);   /* or MT_EINVAL */
void      mt__unbind (mt_store *s, int unit);   /* both locks: it has no GRAD plane now */

/* view.c, of a unit in a share: its ranges and its board, before it is published. */
mt_status mt__share_unit(mt_store *s, mt__unit *u, int unit);
/* Chunks [from, from + n) of its board are of what is in the portion. */
void mt__chunks_of(const mt__unit *u, const mt_portion *p, size_t *from, size_t *n);

/* lend.c. take_back is called when a unit's update ends, before that is told; lent_close by the
 * store's close, behind its units'. */
void mt__take_back (mt_store *s, int unit);
void mt__lent_close(mt_store *s);
void mt__lent_device_close(mt_store *s);                /* map_mu; no device plane is left */

/* peers.c, in a share. open is the last of the store's open. */
mt_status mt__peers_open(mt_store *s);

/* asks.c, in a share. open: units will have planes elsewhere; nothing to do when it is. ask: the
 * other ranks' portions of these planes are in host memory when it returns. */
mt_status mt__asks_open(mt_store *s);
mt_status mt__ask      (mt_store *s, int unit, unsigned planes, int claims);

/* ledger.c, for peers.c. stirred: some rank has said something. fault_of: another's fault, or its
 * end, is this one's too. awaits: something of a rank is awaited here: what, in words. */
void mt__ledger_stirred (mt_store *s);
void mt__ledger_fault_of(mt_store *s, const char *text);
int  mt__ledger_awaits  (mt_store *s, int rank, char *out, size_t cap);
/* The rank does in another order what all do in one: what, in words. */
int  mt__ledger_crossed (mt_store *s, int rank, char *out, size_t cap);

/* ledger.c. version_grows: the unit's weights were written from outside. */
mt_status mt__ledger_open  (mt__ledger *l);
void      mt__ledger_close (mt__ledger *l);
void      mt__version_grows(mt_store *s, int unit);

/* mirror.c. move: the unit comes to this home. touched: some of the host's weights were written.
 * lacks: ranks of other machines have other values of these planes than came from them. serve: this
 * rank's portion of these planes is in host memory; *gone: its home has ended. What is
 * announced is not waited for: who asks has done so, and may be awaited himself by what was
 * announced here since. */
mt_status mt__mirror_move   (mt_store *s, int unit, const mt_home *to, void *of);
void      mt__mirror_touched(mt_store *s, int unit);
void      mt__mirror_lacks  (mt_store *s, int unit, unsigned planes);
mt_status mt__mirror_serve  (mt_store *s, int unit, unsigned planes, int claims, int *gone);

#endif
