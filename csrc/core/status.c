/* status.c — texts of the codes, the sentence each thread keeps about its last failure, and what
 * fails everywhere alike: memory. */
#include "status.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Longer sentences are cut; names of units can be long, so there is room for a few of them. */
enum { MESSAGE_BYTES = 1024 };

static _Thread_local char message[MESSAGE_BYTES];

const char *mt_status_text(mt_status st)
{
    switch (st) {
#define MT_STATUS_CASE(name, value, text) case MT_##name: return text;
    MT_STATUS_MAP(MT_STATUS_CASE)
#undef MT_STATUS_CASE
    }
    return "unknown status";
}

const char *mt_last_error(void)
{
    return message;
}

mt_status mt_fail_(mt_status st, const char *file, int line, const char *fmt, ...)
{
    /* Not straight into `message`: an argument may be the previous message. */
    char        text[MESSAGE_BYTES];
    const char *slash = strrchr(file, '/');     /* wherever it was built, "store.c" */
    va_list     args;

    va_start(args, fmt);
    (void)vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    /* 64 bytes are left for file and line, which must survive a long sentence. */
    (void)snprintf(message, sizeof message, "%.*s [%s:%d]", MESSAGE_BYTES - 64, text,
                   slash != NULL ? slash + 1 : file, line);
    return st;
}

mt_status mt_fail_again(mt_status st, const char *text)
{
    size_t n = strnlen(text, sizeof message - 1);

    memmove(message, text, n);              /* text may be `message` itself */
    message[n] = '\0';
    return st;
}

void mt_free_at(void *pointer)
{
    void *p;

    memcpy(&p, pointer, sizeof p);          /* it points to a pointer of some other type */
    free(p);
}

mt_status mt_make_(const char *file, int line, void *at, int64_t n, size_t each, const char *what)
{
    void *made = calloc(n > 0 ? (size_t)n : 1, each);

    memcpy(at, &made, sizeof made);         /* at points to a pointer of some other type */
    if (made != NULL)
        return MT_OK;
    return mt_fail_(MT_ENOMEM, file, line, "%s: no memory for %" PRId64 " times %zu bytes", what, n,
                    each);
}

mt_status mt_grow_(const char *file, int line, void *at, int64_t *room, int64_t n, size_t each,
                   const char *what)
{
    int64_t wanted = n > 2 * *room ? n : 2 * *room;
    void   *old, *made;

    if (n <= *room)
        return MT_OK;
    MT_DO(mt_make_(file, line, &made, wanted, each, what));
    memcpy(&old, at, sizeof old);
    if (old != NULL)
        memcpy(made, old, (size_t)*room * each);
    free(old);
    memcpy(at, &made, sizeof made);
    *room = wanted;
    return MT_OK;
}
