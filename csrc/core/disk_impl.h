/* disk_impl.h — what disk.c, ring.c and feed.c share; nobody else includes it.
 *
 * A piece has two sections, weights and states, each a request with sums of its own: so a fetch
 * reads the one without the other. They lie one after the other, in the file and in a buffer.
 */
#ifndef MT_DISK_IMPL_H
#define MT_DISK_IMPL_H

#include "arena.h"
#include "disk.h"
#include "worker.h"

enum { MT__WEIGHTS, MT__STATES, MT__SECTIONS };

typedef struct mt__section {
    size_t    from, bytes;               /* in the piece: whole pages. bytes 0: there is none */
    uint64_t *sums;                      /* by whom has a request for it under way */
} mt__section;

typedef struct mt__piece {
    int         first, n;                /* its parts in the layout's */
    mt__section section[MT__SECTIONS];
    uint64_t    at;                      /* in the file */
    size_t      hi_at, hi_bytes;         /* the stretch of plane HI that its weights are, as it lies
                                          * there */
} mt__piece;

/* How a unit's planes lie in the file. Made once, then read by anyone. */
typedef struct mt__layout {
    mt_pieces *cut;
    mt__piece *pieces;                   /* [n_pieces] of cut's */
    int        n_pieces;
    unsigned  *planes;                   /* [parameters of the unit] in the file, a bit each */
} mt__layout;

typedef struct mt__disk_unit {
    int         on;         /* it is ours */
    mt__layout *lay;        /* NULL before its planes are first used. mu */
    int         next;       /* the unit that followed it last; -1: none yet. mu */
    int         held;       /* it is being written from outside: none of it is read ahead. mu */
} mt__disk_unit;

/* Who wants the bounce buffer, in a list while it waits. mu */
typedef struct mt__guest {
    mt_disk          *d;
    int               unit;
    int               patient;           /* a save: lets others go first */
    uint64_t          number;
    struct mt__guest *next;
} mt__guest;

/* A buffer's way round; what was dropped meanwhile, or the disk failed, is FREE sooner.
 *
 *   FREE -> READING -> READY -> TAKEN -> WRITING -> FREE    by whom computes with it
 *                                     -> COPYING -> FREE    by the mover, to a slot */
typedef enum mt__at {
    MT__FREE, MT__READING, MT__READY, MT__TAKEN, MT__WRITING, MT__COPYING
} mt__at;

typedef struct mt__buffer {
    struct mt__ring *ring;
    char            *mem;
    mt_request       r[MT__SECTIONS];    /* under way when READING or WRITING */
    int              left;               /* of these. mu, as all below */
    mt__at           at;
    int              unit, piece;
    int              dropped;            /* READING: nobody wants it any more */
    mt_post          post;               /* of the requests */
    uint64_t         turn;               /* reads are put in turn */
    uint64_t         begun_ns;
    mt_event        *copied;             /* the feed's: recorded on h2d behind the copy */
} mt__buffer;

typedef struct mt__ring {
    mt_disk    *disk;
    mt__buffer *buffers;                 /* [n] */
    int         n;
    unsigned    sections;                /* that are read and written, a bit each */
    const char *reads;                   /* what, for the watchdog */
} mt__ring;

/* Of a piece's section to or from the bounce buffer. */
typedef struct mt__way {
    mt_disk *d;
    int      unit, number, section, write;
} mt__way;

struct mt_disk {
    mt_context     *cx;
    mt_store       *store;
    mt_blocks      *file;
    mt_pool        *pool;
    mt_timeline    *timeline;
    mt_feed        *feed;                /* NULL: nobody fetches weights from here. Written by
                                          * mt_feed_open, under mu */
    size_t          bytes;               /* of a buffer */
    mt__ring        ring;
    mt_arena        memory;              /* its buffers', and one more: the bounce buffer's */
    char           *bounce;              /* bring and push, a section at a time. Who made it
                                          * taken */
    int             taken;               /* mu, as the next three */
    mt__guest      *guests;
    uint64_t        n_guests;            /* so far */
    mt_request      errand;              /* with the bounce buffer. These two: mu, and the file's
                                          * while it is away */
    mt__way         sent;
    mt_post         post;                /* of it. mu */
    int             away;                /* its unit plus 1; 0: it is back. mu */
    /* it has, as the file does; unit -1: none. mu */
    int             bounced_unit, bounced_piece, bounced_section;
    uint64_t        need;                /* written by add, as the next */
    size_t          most_weights;        /* bytes in a piece */
    mt__disk_unit  *units;               /* [n_units] of the store's, as far as added; grown by
                                          * add */
    int             n_units;
    int             last_added, first_added;     /* -1: none */

    mt_mutex        mu;
    pthread_cond_t  changed;             /* a request ended, or what is taken is free */
    mt_worker       worker;              /* updates */
    int             next_unit, next_piece;   /* to be read; next_unit -1: nobody knows. mu */
    int             before;              /* the unit updated last; -1: none. mu */
    int             failed;              /* the ledger has the fault. mu */
    uint64_t        turns;               /* mu */
    uint64_t        recorded_ns;         /* the lane's records reach up to here. mu */
    mt_disk_stats   stats;               /* mu */
};

/* disk.c. The request for a section of a piece that is, or will be, in mem. */
mt_request mt__disk_request(const mt_disk *d, int unit, int piece, int section, int write,
                            char *mem);
/* A request ended, mu not held: a failure is told to the ledger. */
void mt__disk_tell(mt_disk *d, int unit, int piece, const mt_request *r);
/* And then under mu: counted, and recorded. */
void mt__disk_note(mt_disk *d, int unit, const mt_request *r, uint64_t begun_ns);
/* Under mu. Reads as far ahead as there are free buffers, the feed's too. */
void mt__disk_ahead(mt_disk *d);

/* ring.c, all under mu but open. */
mt_status   mt__ring_open(mt__ring *r, mt_disk *d, int n, char *mem, size_t each,
                          unsigned sections, const char *reads);
int         mt__may_follow(mt__at from, mt__at to);
void        mt__buffer_to (mt__buffer *b, mt__at at);    /* one that may follow: an assertion */
/* One in one of the states, 1u << state each, with that piece; -1: any. */
mt__buffer *mt__ring_find(const mt__ring *r, unsigned states, int unit, int piece);
/* Under mu. What moves has requests, and what is not free a piece. */
void        mt__ring_assert(const mt__ring *r);
void        mt__ring_put (mt__buffer *b, int unit, int piece, int write);
/* What was read, or is being read, of a unit (-1: of any), up to a turn, is not used. */
void        mt__ring_drop(mt__ring *r, int unit, uint64_t turn);

/* feed.c, all under mu. */
void mt__feed_ahead(mt_feed *f);                    /* a buffer, or a piece, may have come free */
void mt__feed_drop (mt_feed *f, int unit);          /* what was read of the unit is not used */
int  mt__feed_reads(const mt_feed *f, int unit);    /* a read of it is under way */

#endif
