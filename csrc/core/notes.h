/* notes.h — what a rank says in its machine's share, noted for who tells other machines of it.
 *
 * Nouns, in the order they appear below:
 *   note    one thing that was said. Notes are taken in the order in which they were put
 *
 *     mt_notes_put(q, (mt_note){ .kind = MT_NOTE_LEFT });
 *     st = mt_notes_take(q, 100, &note, &some);       // another thread
 *
 * Threads: any.
 */
#ifndef MT_NOTES_H
#define MT_NOTES_H

#include "status.h"

#include <stdint.h>

/* Of a note, what it is about, by name: what else of it is set */
#define MT_NOTE_MAP(X)                                                                             \
    X(CAME,   "the rank is there: n is its process")                                               \
    X(SAID,   "a counter of a rank: what, n, about")                                               \
    X(DONE,   "a counter of a unit: unit, what, n")                                                \
    X(SUMS,   "sums of its chunks are on the unit's board: unit")                                  \
    X(SERVED, "what rank `what` asked for up to n; about: that request")                           \
    X(FAILED, "what ended its work")                                                               \
    X(PARTED, "it asks nothing from now on")                                                       \
    X(LEFT,   "it says nothing from now on: the last note")
#define MT_NOTE_ENUM(name, what) MT_NOTE_##name,
typedef enum mt_note_kind { MT_NOTE_MAP(MT_NOTE_ENUM) MT_NOTES } mt_note_kind;
#undef MT_NOTE_ENUM

typedef struct mt_note {
    mt_note_kind kind;
    int          unit, what;
    uint64_t     n, about;
} mt_note;

typedef struct mt_notes mt_notes;

mt_status mt_notes_open (mt_notes **out);
void      mt_notes_close(mt_notes *q);                   /* NULL is fine */
void      mt_notes_put  (mt_notes *q, mt_note note);     /* NULL: nobody is to be told */
/* The next one; *some = 0: there was none within ms. MT_ENOMEM: there was no memory for one. */
mt_status mt_notes_take (mt_notes *q, int ms, mt_note *out, int *some);

#endif
