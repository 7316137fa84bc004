/* checked.h — what builds that check themselves make sure of (MT_CHECKED: those of tests/c; for
 * the extension CFLAGS=-DMT_CHECKED). A release build has none of it.
 *
 *   MT_ASSERT   what must hold at this place, whoever called: where it does not, the mistake is
 *               ours. The build says which, and where, and aborts
 *   MT_IS_CHECKED   for what has to be looked up before it can be asserted
 */
#ifndef MT_CHECKED_H
#define MT_CHECKED_H

#ifdef __cplusplus
extern "C" {
#endif

#ifdef MT_CHECKED
#define MT_IS_CHECKED 1
#else
#define MT_IS_CHECKED 0
#endif

#define MT_ASSERT(cond) \
    (MT_IS_CHECKED && !(cond) ? mt__broken(__FILE__, __LINE__, "%s", #cond) : (void)0)

/* Says "text [file:line]" on stderr, and aborts. */
void mt__broken(const char *file, int line, const char *fmt, ...)
    __attribute__((noreturn, format(printf, 3, 4)));

#ifdef __cplusplus
}
#endif
#endif
