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

/* One plane of one unit. Read under either lock, written under both. */
typedef struct mt__plane {
    mt_mutex        making;
    size_t   *offset;        /* [n_params] bytes into the arena, or MT__ABSENT; NULL: not made */
    mt_arena  arena;
    mt_arena *late;          /* [n_params] of those that became trainable afterwards, or NULL */
} mt__plane;

#define MT__ABSENT SIZE_MAX

/* Where a plane is. One that is away on the device has both: the host's is a copy. */
enum { MT__HOST, MT__DEVICE, MT__PLACES };

/* A unit's copies. mirror_mu */
typedef struct mt__mirror {
    const mt_home *home;             /* NULL: none but the host. These as in the unit */
    void          *of;
    unsigned char *copies;          /* [MT_PLANE_COUNT * n_params] an mt_mirror_state each */
    unsigned       planes;           /* that are with the home, a bit each */
    unsigned       visit;            /* that are on the host */
    unsigned       pages;            /* of planes: whose memory on the host may be committed */
    unsigned       claimed;          /* of planes */
    int            busy;             /* somebody is behind the door */
} mt__mirror;

typedef struct mt__unit {
    char          *name;             /* these five: written by add, before the unit is published */
    int            n_params;
    size_t        *hi_offset;        /* [n_params] bytes */
    size_t         hi_bytes;
    mt_param_desc *desc;             /* [n_params]; `trainable`, an atomic, later too: see
                                      * mt_store_trainable */

    mt__plane      plane[MT__PLACES][MT_PLANE_COUNT];
    mt_portion     own;              /* this process's, as one of so many owners. Set before a plane
                                      * but HI is made */
    int            owners;
    atomic_int     states;           /* an mt_states; set under map_mu, before a plane of them is
                                      * made */
    /* Where it is, and what that one's functions get. Both: moved by one thread, the second first;
     * read by anyone. */
    _Atomic(const mt_home *) home;
    void          *home_of;
    atomic_int     passing;          /* its GRAD plane is lent. Set under map_mu; read by anyone */

    uint64_t       version;          /* from 1: a slot that says 0 holds nothing. ledger.mu */
    mt__mirror     mirror;
    int64_t        updates, grads, fetches, saves;   /* announced and not finished. ledger.mu */
    mt_event      *fetched;          /* made at the first fetch, then stays. fetched_mu */
    mt_post        copying;          /* of the queue that `fetched` was recorded in. fetched_mu */
} mt__unit;

/* A buffer that is some unit's GRAD plane for a while. Under map_mu; `making` is that plane's. */
typedef struct mt__lent {
    mt_arena arena;          /* registered, or on the device */
    int      unit;           /* -1: free */
    uint64_t number;         /* of the lending, from 1 */
} mt__lent;

typedef struct mt__ledger {
    mt_mutex        mu;
    pthread_cond_t  changed;         /* monotonic clock; broadcast at every change but a begin */
    int             wanted;          /* unit plus 1 whose save was waited for last; 0: none. mu */
    mt_status       fault;           /* MT_OK until the first. mu */
    char            text[1024];      /* written once, before fault. mu */
} mt__ledger;

/* Units live in segments that never move, so that readers need no lock. */
#define MT__SEG_UNITS 256
#define MT__SEGS      256

struct mt_store {
    mt_dev         *dev;
    mt_pool        *pool;
    mt_mutex        map_mu, fetched_mu, mirror_mu;
    pthread_cond_t  mirror_changed;          /* a door is open again */
    mt__unit      **seg[MT__SEGS];           /* written under map_mu before n_units covers them */
    _Atomic int     n_units;                 /* release after a unit is whole; read by anyone */
    _Atomic size_t  mapped[MT_PLANE_COUNT];  /* bytes; written under map_mu, read by anyone */
    _Atomic size_t  on_device;               /* the same */
    mt__lent       *lent;                    /* [n_lent] map_mu */
    int             n_lent, most_lent;       /* most: of a size in a place; constant once anything
                                              * is lent */
    uint64_t        lendings;                /* so far. map_mu */
    mt__ledger      ledger;
    mt_watch        watch;
};

mt__unit *mt__unit_at(const mt_store *s, int unit);          /* NULL when there is none */

/* store.c. Offsets of a plane as parameters are trained now, malloc'd;
 * and what is given back under map_mu. */
mt_status mt__lay_out(const mt__unit *u, mt_plane p, size_t **offset, size_t *bytes);
void      mt__unbind (mt_store *s, int unit);   /* both locks: the unit's GRAD plane is no more */

/* lend.c. Called when a unit's update ends, before it is told; and by close,
 * after all units are closed. */
void mt__take_back (mt_store *s, int unit);
void mt__lent_close(mt_store *s);
void mt__lent_device_close(mt_store *s);                /* map_mu, when no device plane is left */

/* ledger.c. The unit was written from outside. */
mt_status mt__ledger_open  (mt__ledger *l);
void      mt__ledger_close (mt__ledger *l);
void      mt__version_grows(mt_store *s, int unit);

/* mirror.c. The unit moves; some of the host's weights were written. */
mt_status mt__mirror_move   (mt_store *s, int unit, const mt_home *to, void *of);
void      mt__mirror_touched(mt_store *s, int unit);

#endif
