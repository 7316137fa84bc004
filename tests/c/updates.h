/* updates.h — a job as the updater hands it to a home. */
#ifndef MT_TEST_UPDATES_H
#define MT_TEST_UPDATES_H

#include "../../csrc/core/home.h"

#include <string.h>

/* The home ends it. */
static inline mt_update *update_of(const mt_update_job *j, float clip)
{
    mt_update *u = calloc(1, sizeof *u);
    int       *params = calloc((size_t)j->n_params + 1, sizeof *params);

    if (u == NULL || params == NULL)
        abort();
    if (j->n_params > 0)
        memcpy(params, j->params, (size_t)j->n_params * sizeof *params);
    *u = (mt_update){ .j = *j, .clip = clip };
    u->j.params = params;
    return u;
}

#endif
