/* ledger.h — what is under way on each unit of a store, and who must wait for it.
 *
 * Work on a unit is announced by the thread that asks for it and finished by the thread that
 * does it, so a reader never sees the gap between "step() returned" and "the update began".
 *
 *   updates   announced by step(), finished by the updater.   Fetch and host readers wait for 0.
 *   grads     announced by the hand-over, finished by the collector. The updater and readers
 *             of .grad wait for 0; the next hand-over waits for updates == 0.
 *   fetches   announced by the mover when updates are 0, finished when the copy is in the H2D
 *             queue, with an event behind it. Host writers, the updater too, wait for 0 and then
 *             for the event: no update begins between the mover's look and its copy.
 *   saves     announced by who saves the store, for all units at once and when nothing is under
 *             way; finished, a unit at a time, by whom has copied its planes. Host writers, updates
 *             of all kinds wait for 0; fetches and readers do not. A unit somebody waits for is
 *             `wanted`: copied next.
 *   version   grows with every announced update and every write from outside; a slot holds
 *             current weights exactly when its version is the unit's. Starts at 1.
 *
 * In a share an update is over when it is on every rank, and so are gradients: each writes its own
 * portion. So ranks announce the same updates, and hand-overs, in the same order; what one may do
 * alone is to read, and to fetch. A write from outside is told to every rank's ledger, whoever made
 * it. Who begins an update waits besides until no rank reads the weights as they are (update.h). A
 * save is over when it is on every rank that has begun it, since each copies what others own too:
 * so all begin before one announces an update again. A fault of one rank is every rank's, with its
 * name; so is the end of a process of which something is awaited.
 *
 * A fault (sticky) set by any worker ends every wait with that worker's message; finishing what
 * was not announced, or naming a unit that is not there, is such a fault. The wait for `fetched`
 * asks the device again and again; a device that fails, or the watchdog, ends it.
 * A wait during which nothing moves for the watchdog's time (default 600 s) returns MT_ESTUCK:
 * which unit, what is awaited, and all waits under way (watch.h); while compute has work, after six
 * times as long. Every end in the ledger moves, every begin but a save's or a fetch's, every block
 * of a save, every request of a disk and whatever else says mt_watch_moved.
 *
 * Threads: any.
 */
#ifndef MT_LEDGER_H
#define MT_LEDGER_H

#include "dev.h"
#include "share.h"
#include "watch.h"

typedef struct mt_store mt_store;        /* store.h */

uint64_t  mt_ledger_version(mt_store *s, int unit);
void      mt_ledger_touch  (mt_store *s, int unit);          /* weights were written from outside */
uint64_t  mt_ledger_writes (mt_store *s, int unit);          /* so often */

void      mt_ledger_update_begin(mt_store *s, int unit);     /* version grows; updates += 1 */
void      mt_ledger_update_end  (mt_store *s, int unit);
/* Of one that is announced: it is over on the device; a copy of its weights down follows. */
void      mt_ledger_update_stepped(mt_store *s, int unit);
void      mt_ledger_grads_begin (mt_store *s, int unit);
void      mt_ledger_grads_end   (mt_store *s, int unit);

mt_status mt_ledger_wait_updates(mt_store *s, int unit);     /* until updates == 0 */
/* Until no rank's update of the unit reads or writes device memory. */
mt_status mt_ledger_wait_stepped(mt_store *s, int unit);
mt_status mt_ledger_wait_grads  (mt_store *s, int unit);     /* until grads == 0 */
int       mt_ledger_updates_due (mt_store *s, int unit);     /* the unit's updates are not 0 */
/* Until updates == 0 (of a settled unit: until all have stepped); in the same breath fetches += 1.
 * *version: what a copy put from now brings. */
mt_status mt_ledger_fetch_begin (mt_store *s, int unit, uint64_t *version);
/* Records `fetched` on h2d (NULL: all is copied); fetches -= 1 if it was announced, also on
 * failure. */
mt_status mt_ledger_fetching    (mt_store *s, int unit, mt_queue *h2d);
/* until copies out of HI so far are over */
mt_status mt_ledger_wait_fetched(mt_store *s, int unit);
mt_status mt_ledger_wait_fetch  (mt_store *s, int unit);     /* the same, and saves == 0 */

/* No update of the unit is announced: MT_ESTATE when one is, or a save is. */
mt_status mt_ledger_save_begin (mt_store *s, int unit);
void      mt_ledger_save_end   (mt_store *s, int unit);
/* until saves == 0; the unit is wanted meanwhile */
mt_status mt_ledger_wait_saved (mt_store *s, int unit);
int       mt_ledger_saving     (mt_store *s, int unit);      /* the unit's saves are not 0 */
int       mt_ledger_all_saved  (mt_store *s, int unit);      /* they are, on all ranks */
int       mt_ledger_wanted     (mt_store *s);                /* a unit that is waited for, or -1 */

/* In a share. say: this rank has come to n, see mt_board_say. meet: waits until all ranks have, or
 * (NORMED) rank 0; MT_OK too when so many seconds are over (0: no end). */
void      mt_ledger_say (mt_store *s, mt_count what, uint64_t n, uint64_t about);
mt_status mt_ledger_meet(mt_store *s, mt_count what, uint64_t n, double seconds);

/* In a share: this rank comes to a meeting of all that somebody else holds; what it does there, in
 * words. NULL: it is over. Meetings, submits, spreads and evicts come in one order on all ranks:
 * each does them in one thread. A rank that sees that they do not is a fault (peers.c). */
void      mt_ledger_meeting(mt_store *s, const char *what);

void      mt_ledger_fault(mt_store *s, mt_status st, const char *text);   /* first one stays */
mt_status mt_ledger_check(mt_store *s);                      /* the fault, as this thread's error */
void      mt_ledger_watchdog(mt_store *s, double seconds);

#endif
