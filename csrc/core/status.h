/* status.h — how every function of the core says what went wrong.
 *
 * A function that can fail returns mt_status. On failure its outputs are untouched and
 * mt_last_error() holds, for this thread, a sentence with the value, the limit and what to
 * do next. The core never prints, exits, or aborts on a caller's mistake.
 */
#ifndef MT_STATUS_H
#define MT_STATUS_H

#include <stddef.h>
#include <stdint.h>

/* name, value, meaning: the one list from which the enum and the texts are made. */
#define MT_STATUS_MAP(X)                                                                  \
    X(OK,       0, "ok")                                                                  \
    X(EINVAL,  -1, "invalid argument")       /* caller's mistake; nothing happened */     \
    X(ENOMEM,  -2, "out of host memory")                                                  \
    X(EDEVMEM, -3, "out of device memory")                                                \
    X(EDEVICE, -4, "device error")           /* sticky: close and reopen */               \
    X(ESTATE,  -5, "call out of order")                                                   \
    X(ENOTSUP, -6, "not in this build")                                                   \
    X(ESTUCK,  -7, "a wait outlasted the watchdog")                                       \
    X(EDISK,   -8, "disk error")                                                          \
    X(EINTR,   -9, "interrupted")            /* nothing happened: it may be called again */   \
    X(EPEER,  -10, "another process failed")

#define MT_STATUS_ENUM(name, value, text) MT_##name = (value),
typedef enum mt_status { MT_STATUS_MAP(MT_STATUS_ENUM) } mt_status;
#undef MT_STATUS_ENUM

const char *mt_status_text(mt_status st);

/* This thread's message; "" before the first failure. Valid until the next failure here. */
const char *mt_last_error(void);

/* Sets this thread's message ("text [file:line]") and yields st. */
#define MT_FAIL(st, ...) (mt_fail_((st), __FILE__, __LINE__, __VA_ARGS__), (st))
mt_status mt_fail_(mt_status st, const char *file, int line, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Carries a worker's failure to the thread that asks: copies text into this thread's message. */
mt_status mt_fail_again(mt_status st, const char *text);

/* The only macro that jumps, where something is to be undone. Needs `mt_status st` and a `fail:`
 * label. */
#define MT_TRY(expr) do { st = (expr); if (st != MT_OK) goto fail; } while (0)

/* The same where nothing is: the failure is the function's own. */
#define MT_DO(expr) do { mt_status st_ = (expr); if (st_ != MT_OK) return st_; } while (0)

/* Of a pointer: what it points to is closed where its block ends, however that is left, unless
 * MT_KEEP(p) has given it to somebody else. MT_CLOSER makes of a function one that can do so. */
#define MT_CLOSED(close) __attribute__((cleanup(close##_at)))
#define MT_FREED         MT_CLOSED(mt_free)
#define MT_CLOSER(close, type) static inline void close##_at(type **p) { close(*p); }
#define MT_KEEP(p) __extension__({ __typeof__(p) kept_ = (p); (p) = NULL; kept_; })
void mt_free_at(void *pointer);

/* Zeroed memory for n of what p is to point to, for one where n is 0; MT_ENOMEM, and p NULL, where
 * there is none. what: the room's or the unit's name, for the message. */
#define MT_MAKE(p, n, what) \
    mt_make_(__FILE__, __LINE__, &(p), (n), sizeof *(p), (what))
mt_status mt_make_(const char *file, int line, void *at, int64_t n, size_t each, const char *what);

/* An array of `room` gets room for n at least, with zeros behind what it has; twice as much as it
 * had where that is more. As it was on failure. Begins as NULL with room 0. */
#define MT_GROW(p, room, n, what) \
    mt_grow_(__FILE__, __LINE__, &(p), &(room), (n), sizeof *(p), (what))
mt_status mt_grow_(const char *file, int line, void *at, int64_t *room, int64_t n, size_t each,
                   const char *what);

/* A function that yields the name of an enumeration's value, of all names in order; "?": none. */
#define MT_NAMES(function, type, ...)                                                     \
    const char *function(type value)                                                      \
    {                                                                                     \
        static const char *const names[] = { __VA_ARGS__ };                               \
        return (unsigned)value < sizeof names / sizeof *names ? names[value] : "?";       \
    }

/* The first multiple of `to` from n on. */
static inline size_t mt_round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

#endif
