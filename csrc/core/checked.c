#include "checked.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

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
