/* lock.c — what this thread holds, in the order in which it took them; for checked builds. */
#include "lock.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 16

static _Thread_local struct {
    const mt_mutex *at[MOST];
    int             n;
} held;

void mt__broken(const char *file, int line, const char *fmt, ...)
{
    char    text[1024];
    va_list args;

    va_start(args, fmt);
    (void)vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    fprintf(stderr, "broken: %s [%s:%d]\n", text, file, line);
    abort();
}

const char *mt_rank_name(mt_rank rank)
{
#define NAMED(name, what) #name " (" what ")",
    static const char *const names[] = { "a lock that was never opened", MT_RANK_MAP(NAMED) };
#undef NAMED

    return rank > MT_RANK_NONE && rank < MT_RANK_COUNT ? names[rank] : names[0];
}

/* Where m is among what is held; -1: nowhere. */
static int find(const mt_mutex *m)
{
    int i = held.n - 1;

    while (i >= 0 && held.at[i] != m)
        i--;
    return i;
}

int mt_holds(const mt_mutex *m)
{
    return find(m) >= 0;
}

/* What is held is in order, so the last is the one to look at. */
void mt__rank_take(const mt_mutex *m, const char *file, int line)
{
    const mt_mutex *last = held.n > 0 ? held.at[held.n - 1] : NULL;

    if (m->rank <= MT_RANK_NONE || m->rank >= MT_RANK_COUNT)
        mt__broken(file, line, "%s is taken", mt_rank_name(m->rank));
    if (find(m) >= 0)
        mt__broken(file, line, "%s is taken by the thread that holds it", mt_rank_name(m->rank));
    if (last != NULL && m->rank <= last->rank)
        mt__broken(file, line, "%s is taken under %s, which comes behind it (lock.h)",
                   mt_rank_name(m->rank), mt_rank_name(last->rank));
    if (held.n == MOST)
        mt__broken(file, line, "%s is one lock too many: %d are held", mt_rank_name(m->rank), MOST);
    held.at[held.n++] = m;
}

void mt__rank_give(const mt_mutex *m, const char *file, int line)
{
    int i = find(m);

    if (i < 0)
        mt__broken(file, line, "%s is given back by a thread that does not hold it",
                   mt_rank_name(m->rank));
    held.n--;
    memmove(&held.at[i], &held.at[i + 1], sizeof held.at[0] * (size_t)(held.n - i));
}

/* It is given back, and taken again behind what was taken since: out of turn. */
void mt__rank_wait(const mt_mutex *m, const char *file, int line)
{
    int i = find(m);

    if (i < 0)
        mt__broken(file, line, "%s is waited with by a thread that does not hold it",
                   mt_rank_name(m->rank));
    if (i != held.n - 1)
        mt__broken(file, line, "%s is waited with under %s, which was taken since",
                   mt_rank_name(m->rank), mt_rank_name(held.at[held.n - 1]->rank));
}
