/* states.c — the list of what states may be as a table. */
#include "states.h"

const char *mt_states_name(mt_states s)
{
#define NAME(name, text, low) text,
    static const char *const table[] = { MT_STATES_MAP(NAME) };
#undef NAME

    return (unsigned)s < MT_STATES_COUNT ? table[s] : "?";
}
