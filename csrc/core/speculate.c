/* speculate.c — one guess a unit, and how it ends.
 *
 * A guess goes NONE -> WAITING -> BUSY -> MADE -> BUSY -> NONE. Whoever makes it BUSY works on the
 * unit's states outside of the lock, and is the only one to; the others wait for the next change.
 */
#include "speculate.h"

#include "clock.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef enum stage { NONE, WAITING, BUSY, MADE } stage;

typedef struct entry {
    stage    at;
    mt_guess g;              /* params: our copy; while not NONE */
    uint64_t number;         /* of its put: the oldest runs first */
    uint64_t written;        /* by the ledger, when it ran */
} entry;

struct mt_speculation {
    mt_store       *store;
    mt_offload     *grads;
    mt_pool        *pool;
    mt_timeline    *timeline;    /* written before the first put */

    pthread_mutex_t mu;
    pthread_cond_t  changed;     /* broadcast whenever some stage changes */
    entry          *units;       /* [n_units] moves when it grows; mu */
    int             n_units;     /* mu */
    uint64_t        puts;        /* mu */
    mt_speculation_stats stats;  /* mu */
};

/* ---- open and close --------------------------------------------------------------------- */

mt_status mt_speculation_open(mt_store *store, mt_offload *grads, mt_pool *pool, mt_speculation **out)
{
    mt_speculation *s = calloc(1, sizeof *s);

    if (s == NULL)
        return MT_FAIL(MT_ENOMEM, "speculation: calloc(%zu)", sizeof *s);
    s->store = store;
    s->grads = grads;
    s->pool = pool;
    pthread_mutex_init(&s->mu, NULL);
    pthread_cond_init(&s->changed, NULL);
    *out = s;
    return MT_OK;
}

void mt_speculation_close(mt_speculation *s)
{
    if (s == NULL)
        return;
    for (int u = 0; u < s->n_units; u++)
        (void)mt_speculation_undo(s, u);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->mu);
    free(s->units);
    free(s);
}

void mt_speculation_timeline(mt_speculation *s, mt_timeline *t)
{
    s->timeline = t;
}

/* ---- stages ----------------------------------------------------------------------------- */

static void guess_free(mt_guess *g)
{
    free((void *)(uintptr_t)g->params);
    if (g->free != NULL)
        g->free(g->arg);
}

/* Under mu; waits while another works on it. NULL: the unit has none. The entry may move. */
static entry *find_idle(mt_speculation *s, int unit)
{
    if (unit < 0)
        return NULL;
    while (unit < s->n_units && s->units[unit].at == BUSY)
        pthread_cond_wait(&s->changed, &s->mu);
    return unit < s->n_units && s->units[unit].at != NONE ? &s->units[unit] : NULL;
}

static void go_to(mt_speculation *s, int unit, stage at)
{
    s->units[unit].at = at;
    pthread_cond_broadcast(&s->changed);
}

/* Ends the unit's guess, if there is one; keep: only one that was made can be. 1: it was kept. */
static int end_guess(mt_speculation *s, int unit, const void *job, int keep, mt_status *st)
{
    entry   *e;
    mt_guess g;
    int      made;

    *st = MT_OK;
    pthread_mutex_lock(&s->mu);
    if ((e = find_idle(s, unit)) == NULL) {
        pthread_mutex_unlock(&s->mu);
        return 0;
    }
    g = e->g;
    made = e->at == MADE;
    keep = keep && made && e->written == mt_ledger_written(s->store, unit) && g.same(g.arg, job);
    go_to(s, unit, BUSY);
    pthread_mutex_unlock(&s->mu);

    if (made)
        *st = keep ? g.keep(g.arg, s->pool) : g.undo(g.arg, s->pool);
    guess_free(&g);
    if (*st != MT_OK)                            /* the states are neither the old ones nor the new */
        mt_ledger_fault(s->store, *st, mt_last_error());

    pthread_mutex_lock(&s->mu);
    s->stats.committed += made && keep && *st == MT_OK;
    s->stats.undone += made && !keep && *st == MT_OK;
    go_to(s, unit, NONE);
    pthread_mutex_unlock(&s->mu);
    return keep;
}

int mt_speculation_keep(mt_speculation *s, int unit, const void *job, float clip, mt_status *st)
{
    return end_guess(s, unit, job, clip == 1.0f, st);
}

mt_status mt_speculation_undo(mt_speculation *s, int unit)
{
    mt_status st;

    (void)end_guess(s, unit, NULL, 0, &st);
    return st;
}

/* ---- put -------------------------------------------------------------------------------- */

/* Under mu. */
static mt_status grow(mt_speculation *s, int n)
{
    entry *grown;

    if (n <= s->n_units)
        return MT_OK;
    if ((grown = realloc(s->units, (size_t)n * sizeof *grown)) == NULL)
        return MT_FAIL(MT_ENOMEM, "speculation: no memory for %d units", n);
    memset(grown + s->n_units, 0, (size_t)(n - s->n_units) * sizeof *grown);
    s->units = grown;
    s->n_units = n;
    return MT_OK;
}

static mt_status check(const mt_speculation *s, const mt_guess *g)
{
    if (g->unit < 0 || g->unit >= mt_store_units(s->store) || g->n_params < 0)
        return MT_FAIL(MT_EINVAL, "speculation: %d parameters of unit %d; the store has %d units",
                       g->n_params, g->unit, mt_store_units(s->store));
    if (mt_store_settled(s->store, g->unit) || mt_store_goes_through(s->store, g->unit) ||
        mt_store_on_disk(s->store, g->unit))
        return MT_FAIL(MT_ESTATE, "unit %s is updated on the device, or its states are on disk; only updates in "
                       "host memory can begin early", mt_store_name(s->store, g->unit));
    return mt_ledger_check(s->store);
}

/* params: malloc'd, owned. */
static mt_status put_entry(mt_speculation *s, const mt_guess *g, int *params)
{
    entry    *e;
    mt_status st;

    pthread_mutex_lock(&s->mu);
    MT_TRY(grow(s, mt_store_units(s->store)));
    if (find_idle(s, g->unit) != NULL) {         /* another thread put one since */
        st = MT_FAIL(MT_ESTATE, "unit %s: two guesses at a time", mt_store_name(s->store, g->unit));
        goto fail;
    }
    e = &s->units[g->unit];
    e->g = *g;
    e->g.params = params;
    e->number = ++s->puts;
    go_to(s, g->unit, WAITING);
fail:
    pthread_mutex_unlock(&s->mu);
    return st;
}

mt_status mt_speculation_put(mt_speculation *s, const mt_guess *g)
{
    int      *params = NULL;
    mt_status st;

    MT_TRY(check(s, g));
    MT_TRY(mt_speculation_undo(s, g->unit));
    if ((params = calloc((size_t)g->n_params + 1, sizeof *params)) == NULL) {
        st = MT_FAIL(MT_ENOMEM, "unit %s: no memory for %d parameters",
                     mt_store_name(s->store, g->unit), g->n_params);
        goto fail;
    }
    for (int i = 0; i < g->n_params; i++)
        params[i] = g->params[i];
    MT_TRY(put_entry(s, g, params));
    return MT_OK;

fail:
    free(params);
    if (g->free != NULL)
        g->free(g->arg);
    return st;
}

/* ---- run -------------------------------------------------------------------------------- */

/* Under mu. NULL: none waits. */
static entry *oldest(mt_speculation *s)
{
    entry *found = NULL;

    for (int u = 0; u < s->n_units; u++)
        if (s->units[u].at == WAITING && (found == NULL || s->units[u].number < found->number))
            found = &s->units[u];
    return found;
}

int mt_speculation_waiting(mt_speculation *s)
{
    int waiting;

    pthread_mutex_lock(&s->mu);
    waiting = oldest(s) != NULL;
    pthread_mutex_unlock(&s->mu);
    return waiting;
}

/* Of gradients that are home: what is not finite, or was not summed, is not begun with. */
static int is_finite(const mt_speculation *s, const mt_guess *g)
{
    for (int i = 0; i < g->n_params; i++) {
        int    valid;
        double sum = mt_offload_sumsq(s->grads, g->unit, g->params[i], &valid);

        if (!valid || !isfinite(sum))
            return 0;
    }
    return 1;
}

/* The unit is BUSY, its states ours. *made: they have changed. */
static mt_status make(mt_speculation *s, const mt_guess *g, int asked, int *made, uint64_t *ns)
{
    uint64_t  begun;
    mt_span   span;
    mt_status st;

    *made = 0;
    MT_TRY(mt_ledger_wait_grads(s->store, g->unit));
    /* While the unit is being saved its states are to stay; its update will wait in its turn. */
    if ((asked && !mt_ledger_grads_due(s->store)) || !is_finite(s, g) || mt_ledger_saving(s->store, g->unit))
        return MT_OK;
    begun = mt_now_ns();
    mt_timeline_begin(s->timeline, &span, MT_LANE_HOST, MT_WORK_GUESS, g->unit, NULL);
    MT_TRY(g->run(g->arg, s->pool));
    mt_timeline_end(s->timeline, &span, g->bytes, NULL);
    *ns = mt_now_ns() - begun;
    *made = 1;
fail:
    return st;
}

void mt_speculation_run(mt_speculation *s, int asked)
{
    uint64_t  written, ns = 0;
    entry    *e;
    mt_guess  g;
    int       made;
    mt_status st;

    pthread_mutex_lock(&s->mu);
    if ((e = oldest(s)) == NULL) {
        pthread_mutex_unlock(&s->mu);
        return;
    }
    g = e->g;
    /* Before it reads the weights: one who writes them meanwhile makes the number grow. */
    written = mt_ledger_written(s->store, g.unit);
    go_to(s, g.unit, BUSY);
    pthread_mutex_unlock(&s->mu);

    if ((st = make(s, &g, asked, &made, &ns)) != MT_OK)
        mt_ledger_fault(s->store, st, mt_last_error());
    if (!made)
        guess_free(&g);

    pthread_mutex_lock(&s->mu);
    s->units[g.unit].written = written;
    s->stats.speculated += made;
    s->stats.busy_ns += ns;
    go_to(s, g.unit, made ? MADE : NONE);
    pthread_mutex_unlock(&s->mu);
}

/* ---- looking in ------------------------------------------------------------------------- */

/* Under mu. */
static int is_settled(const mt_speculation *s)
{
    for (int u = 0; u < s->n_units; u++)
        if (s->units[u].at == WAITING || s->units[u].at == BUSY)
            return 0;
    return 1;
}

void mt_speculation_settle(mt_speculation *s)
{
    pthread_mutex_lock(&s->mu);
    while (!is_settled(s))
        pthread_cond_wait(&s->changed, &s->mu);
    pthread_mutex_unlock(&s->mu);
}

mt_speculation_stats mt_speculation_stats_get(mt_speculation *s)
{
    mt_speculation_stats stats;

    pthread_mutex_lock(&s->mu);
    stats = s->stats;
    pthread_mutex_unlock(&s->mu);
    return stats;
}
