/* disk_impl.h — what disk.c and feed.c share; nobody else includes it.
 *
 * A piece has two sections, weights and states, each a request with sums of its own: so a fetch
 * reads the one without the other. They lie one after the other, in the file and in a buffer.
 */
#ifndef MT_DISK_IMPL_H
#define MT_DISK_IMPL_H

#include "arena.h"
#include "disk.h"
#include "worker.h"

typedef struct mt__place {
    int     param;
    int64_t from, n;
    size_t  offset[MT_PLANE_COUNT];      /* in the buffer, or SIZE_MAX */
} mt__place;

enum { MT__WEIGHTS, MT__STATES, MT__SECTIONS };

typedef struct mt__section {
    size_t    from, bytes;               /* in the piece: whole pages. bytes 0: there is none */
    uint64_t *sums;                      /* by whom has a request for it under way */
} mt__section;

typedef struct mt__piece {
    int         first, n;                /* its places in the layout's */
    mt__section section[MT__SECTIONS];
    uint64_t    at;                      /* in the file */
    size_t      hi_at, hi_bytes;         /* the stretch of plane HI that its weights are, as it lies
                                          * there */
} mt__piece;

/* How a unit's planes lie in the file. Made once, then read by anyone. */
typedef struct mt__layout {
    mt__place *places;
    mt__piece *pieces;
    int        n_places, n_pieces, most; /* most: places in one piece */
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

typedef struct mt__buffer {
    mt_disk    *disk;
    char       *mem;
    mt_request  r[MT__SECTIONS];         /* under way when READING or WRITING */
    int         left;                    /* of these. mu, as all below */
    enum { MT__FREE, MT__READING, MT__READY, MT__TAKEN, MT__WRITING } at;
    int         unit, piece;
    int         dropped;                 /* READING: nobody wants it any more */
    mt_post     post;                    /* of the requests */
    uint64_t    turn;                    /* reads are put in turn */
    uint64_t    begun_ns;
} mt__buffer;

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
    int             n_buffers;
    mt__buffer     *buffers;             /* [n_buffers] */
    mt_arena        memory;              /* theirs, and one more: the bounce buffer's */
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

    mt_mutex mu;
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
/* Under mu. Some buffer still writes the piece. */
int  mt__disk_writing(const mt_disk *d, int unit, int piece);

/* feed.c, all under mu. */
void mt__feed_ahead(mt_feed *f);                    /* a buffer, or a piece, may have come free */
void mt__feed_drop (mt_feed *f, int unit);          /* what was read of the unit is not used */
int  mt__feed_reads(const mt_feed *f, int unit);    /* a read of it is under way */

#endif
