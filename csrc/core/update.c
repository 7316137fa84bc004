/* update.c — one thread that takes submits in order, and what became of the latest of them.
 *
 * Every unit announced by submit is ended in the ledger by the updater, whatever happens in
 * between: a fetch or a reader may be waiting for it.
 */
#include "update.h"

#include "worker.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RESULTS 128          /* results kept */
#define AHEAD   64           /* submits that may wait for the updater; then submit waits */

typedef struct job {
    mt_update     *up;       /* NULL: it is over, or its home has it */
    unsigned char *counted;  /* [n_params] at submit, the offload had, or was about to have, the sum
                              * of squares, or the sums of this rank's chunks */
    double        *sums;     /* [n_params] of squares, of all ranks' chunks. The updater's; NULL:
                              * this process is alone */
    const mt_home *home;     /* of its unit, at submit */
    void          *of;       /* what that home's functions get */
} job;

typedef struct work {
    mt_job       node;
    uint64_t     ticket;
    double       max_norm;
    job         *jobs;
    int          n;
    mt_event    *asked;      /* recorded on run at submit; NULL: no unit is settled */
} work;

typedef struct result {
    double norm;             /* of all gradients; NaN when some sum was not made */
    int    skipped;          /* so many units were */
    int    normed;           /* norm and, with a max_norm, skipped are final */
} result;

struct mt_updater {
    const mt_context *cx;
    mt_store       *store;
    mt_offload     *grads;

    mt_mutex        mu;
    mt_worker       worker;             /* the work of ticket n is its job n; news: a result too */
    result          results[RESULTS];   /* ticket t at t % RESULTS; mu */
    uint64_t        busy_ns;            /* in jobs' run; mu */
};

/* Under mu, at each door: steps end in order, and of each that is kept the norm is known then. */
static void assert_state(const mt_updater *u)
{
    uint64_t submitted = u->worker.submitted, ended = u->worker.ended;

    if (!MT_IS_CHECKED)
        return;
    MT_ASSERT(mt_holds(&u->mu));
    MT_ASSERT(ended <= submitted && submitted - ended <= AHEAD);
    for (uint64_t t = ended; t > 0 && submitted - t < RESULTS; t--)
        MT_ASSERT(u->results[t % RESULTS].normed);
}

/* ---- work: made by submit, freed by the updater ----------------------------------------- */

static void work_free(work *w)
{
    if (w == NULL)
        return;
    for (int i = 0; w->jobs != NULL && i < w->n; i++) {
        free(w->jobs[i].up);
        free(w->jobs[i].counted);
        free(w->jobs[i].sums);
    }
    if (w->asked != NULL)
        w->asked->dev->ops->event_close(w->asked);
    free(w->jobs);
    free(w);
}

MT_CLOSER(work_free, work)

static mt_status work_make(const mt_updater *u, const mt_update_job *jobs, int n, double max_norm,
                           mt_queue *run, work **out)
{
    const mt_dev_ops *v = u->cx->dev->ops;
    int               settled = 0, params, has[4];
    const char       *name;
    int64_t           first;
    job              *to;
    work             *w MT_CLOSED(work_free) = NULL;

    MT_DO(MT_MAKE(w, 1, "update"));
    *w = (work){ .max_norm = max_norm, .n = n };
    MT_DO(MT_MAKE(w->jobs, n, "update"));
    for (int i = 0; i < n; i++) {
        if (jobs[i].unit < 0 || jobs[i].unit >= mt_store_units(u->store) || jobs[i].n_params < 0)
            return MT_FAIL(MT_EINVAL, "update: job %d has %d parameters of unit %d; the store has "
                           "%d units", i, jobs[i].n_params, jobs[i].unit, mt_store_units(u->store));
        to = &w->jobs[i];
        params = jobs[i].n_params;
        name = mt_store_name(u->store, jobs[i].unit);
        if ((to->up = calloc(1, sizeof *to->up + (size_t)params * sizeof *to->up->params)) == NULL)
            return MT_FAIL(MT_ENOMEM, "%s: no memory for its update", name);
        to->up->j = jobs[i];
        to->up->j.params = to->up->params;
        MT_DO(MT_MAKE(to->counted, params, name));
        if (u->cx->share != NULL)
            MT_DO(MT_MAKE(to->sums, params, name));
        to->home = mt_store_home(u->store, jobs[i].unit, &to->of);
        has[MT_BY_RUN] = jobs[i].run != NULL;
        has[MT_BY_PUT] = jobs[i].put != NULL;
        has[MT_BY_COMPUTE] = jobs[i].gradient != NULL && jobs[i].compute != NULL;
        has[MT_BY_PIECES] = jobs[i].pieces != NULL;
        if (!has[to->home->by] || (to->home->update != NULL && to->of == NULL))
            return MT_FAIL(MT_ESTATE, "unit %s %s, and its job cannot update it there, or nothing "
                           "is open that could", name, to->home->lives);
        for (int k = 0; k < params; k++) {
            int p = to->up->params[k] = jobs[i].params[k];

            to->counted[k] = (unsigned char)(u->cx->share == NULL
                ? mt_offload_has(u->grads, jobs[i].unit, p, MT_GRAD_COUNTED)
                : mt_store_owned(u->store, jobs[i].unit, p, &first) == 0 ||
                  mt_offload_has(u->grads, jobs[i].unit, p, MT_GRAD_CHUNKED));
        }
        settled |= to->home->later != 0;
    }
    /* What run was given up to now may read the weights that settled units' updates overwrite. */
    if (settled)
        MT_DO(v->event_open(u->cx->dev, &w->asked));
    for (int i = 0; i < n; i++)
        w->jobs[i].up->j.asked = w->asked;
    if (settled)
        MT_DO(v->record(run, w->asked));
    *out = MT_KEEP(w);
    return MT_OK;
}

/* ---- the updater ------------------------------------------------------------------------ */

static void publish(mt_updater *u, const work *w, const result *r)
{
    MT_HOLD(&u->mu);
    assert_state(u);
    u->results[w->ticket % RESULTS] = *r;
    pthread_cond_broadcast(&u->worker.news);
}

static mt_status uncounted(const mt_updater *u, const job *b)
{
    return MT_FAIL(MT_ESTATE, "unit %s: a gradient came without its sum of squares; offload it, or "
                   "give the job a sumsq", mt_store_name(u->store, b->up->j.unit));
}

/* ---- with other ranks --------------------------------------------------------------------- */

/* What differs: some bits of each hash, in the place of CLEAR, to which nobody comes any more. */
static mt_status name_differences(mt_updater *u, const work *w, const uint64_t hash[MT_ALIKES])
{
#define NAME(name, words) words,
    static const char *const names[MT_ALIKES] = { MT_ALIKE_MAP(NAME) };
#undef NAME
    const mt_share *h = u->cx->share;
    char            what[200] = "";
    uint64_t        bits = 0, other;
    int             rank;

    for (int k = 0; k < MT_ALIKES; k++)
        bits |= mt_alike_mix(7, hash[k]) >> (64 - MT_ALIKE_BITS) << (k * MT_ALIKE_BITS);
    mt_ledger_say(u->store, MT_COUNT_CLEAR, w->ticket, bits);
    MT_DO(mt_ledger_meet(u->store, MT_COUNT_CLEAR, w->ticket, 0));
    if ((rank = mt_board_differs(mt_share_board(h), MT_COUNT_CLEAR, bits)) == mt_share_ranks(h))
        return MT_FAIL(MT_EPEER, "update: in step %" PRIu64 " ranks ask for other updates",
                       w->ticket);
    other = mt_share_about(h, MT_COUNT_CLEAR, rank) ^ bits;
    for (int k = 0; k < MT_ALIKES; k++)
        if (other >> (k * MT_ALIKE_BITS) & ((1 << MT_ALIKE_BITS) - 1))
            snprintf(what + strlen(what), sizeof what - strlen(what), "%s%s",
                     what[0] != '\0' ? ", " : "", names[k]);
    return MT_FAIL(MT_EPEER, "update: step %" PRIu64 " is another one on rank %d than on rank %d: "
                   "these differ: %s; all processes have to ask for the same", w->ticket, rank,
                   mt_share_rank(h), what);
}

/* All ranks' gradients, whole and measured, before anybody's sum of them is made: the next submit's
 * are not measured before all ranks are through with these. */
static mt_status measure_all(mt_updater *u, const work *w)
{
    double   max_norm = w->max_norm > 0 ? w->max_norm : 0;
    uint64_t hash[MT_ALIKES] = { 0 }, sum = 0;   /* of what is asked, in whatever order of units */
    int64_t  n;
    mt_span  span;

    mt_timeline_begin(u->cx->timeline, &span, MT_LANE_HOST, MT_WORK_WAIT, -1, NULL);
    memcpy(&hash[MT_ALIKE_NORM], &max_norm, sizeof max_norm);
    for (int i = 0; i < w->n; i++) {
        const job           *b = &w->jobs[i];
        const mt_update_job *j = &b->up->j;
        uint64_t             params = mt_alike_mix(1, (uint64_t)j->unit);

        MT_DO(mt_ledger_wait_grads(u->store, j->unit));
        for (int k = 0; k < j->n_params; k++) {      /* sums of this rank's chunks: to the board */
            double *to = mt_store_sums(u->store, j->unit, j->params[k], 1, &n);
            int     use = to == NULL;

            if (!use && j->sumsq != NULL)
                (void)j->sumsq(j->arg, u->cx->pool, k, to, &use);
            if (!use && !b->counted[k])
                return uncounted(u, b);
            if (!use) {
                const double *sums = mt_offload_chunks(u->grads, j->unit, j->params[k], &n);

                memcpy(to, sums, (size_t)n * sizeof *to);
            }
            params = mt_alike_mix(params, (uint64_t)j->params[k]);
        }
        hash[MT_ALIKE_PARAMS] += params;
        if (j->alike != NULL)
            j->alike(j->arg, hash);
        mt_store_summed(u->store, j->unit);
    }
    for (int k = 0; k < MT_ALIKES; k++)
        sum = mt_alike_mix(sum, hash[k]);
    mt_ledger_say(u->store, MT_COUNT_MEASURED, w->ticket, sum);
    MT_DO(mt_ledger_meet(u->store, MT_COUNT_MEASURED, w->ticket, 0));
    if (mt_board_differs(mt_share_board(u->cx->share), MT_COUNT_MEASURED, sum) <
        mt_share_ranks(u->cx->share))
        return name_differences(u, w, hash);
    for (int i = 0; i < w->n; i++)
        for (int k = 0; k < w->jobs[i].up->j.n_params; k++) {
            const job    *b = &w->jobs[i];
            const double *sums = mt_store_sums(u->store, b->up->j.unit, b->up->j.params[k], 0, &n);

            b->sums[k] = sums != NULL ? mt_offload_fold(u->grads, sums, n) : 0.0;
        }
    mt_timeline_end(u->cx->timeline, &span, 0, NULL);
    return MT_OK;
}

/* ---- norms, and jobs ---------------------------------------------------------------------- */

/* Waits for the unit's gradients and adds their sums of squares to *total in parameter order; NaN
 * where nobody took one. *finite: what could be judged is; *known: all could. */
static mt_status weigh(mt_updater *u, const job *b, double *total, int *finite, int *known)
{
    const mt_update_job *j = &b->up->j;

    MT_DO(mt_ledger_wait_grads(u->store, j->unit));
    *finite = *known = 1;
    for (int i = 0; i < j->n_params; i++) {
        int    use = b->sums != NULL;
        double sum = use ? b->sums[i] : 0;

        if (!use && j->sumsq != NULL)
            sum = j->sumsq(j->arg, u->cx->pool, i, NULL, &use);
        if (!use)
            sum = mt_offload_sumsq(u->grads, j->unit, j->params[i]);
        if (!use && !b->counted[i]) {
            sum = (double)NAN;
            *known = 0;
        } else if (!isfinite(sum))
            *finite = 0;
        *total += sum;
    }
    return MT_OK;
}

/* With max_norm: the norm of all, before anything is touched. */
static mt_status weigh_all(mt_updater *u, const work *w, result *r, float *clip)
{
    double   total = 0, ratio;
    uint64_t bits;
    int      finite, known;
    mt_span  span;

    mt_timeline_begin(u->cx->timeline, &span, MT_LANE_HOST, MT_WORK_WAIT, -1, NULL);
    for (int i = 0; i < w->n; i++) {
        MT_DO(weigh(u, &w->jobs[i], &total, &finite, &known));
        if (!known)
            return uncounted(u, &w->jobs[i]);
    }
    if (u->cx->share != NULL) {          /* which may add in other orders: rank 0's sum is taken */
        memcpy(&bits, &total, sizeof bits);
        if (mt_share_rank(u->cx->share) == 0)
            mt_ledger_say(u->store, MT_COUNT_NORMED, w->ticket, bits);
        MT_DO(mt_ledger_meet(u->store, MT_COUNT_NORMED, w->ticket, 0));
        bits = mt_share_about(u->cx->share, MT_COUNT_NORMED, 0);
        memcpy(&total, &bits, sizeof total);
    }
    mt_timeline_end(u->cx->timeline, &span, 0, NULL);
    r->norm = sqrt(total);
    r->skipped = isfinite(r->norm) ? 0 : w->n;
    r->normed = 1;
    ratio = w->max_norm / (r->norm + 1e-6);
    *clip = ratio < 1.0 ? (float)ratio : 1.0f;
    publish(u, w, r);
    return MT_OK;
}

static mt_status run_job(mt_updater *u, job *b, float clip)
{
    uint64_t  begun;
    mt_watch *watch = mt_store_watch(u->store);
    mt_span   span;
    mt_post   post;
    mt_status st;

    if (b->home->update != NULL) {
        mt_update *up = b->up;

        MT_DO(mt_ledger_wait_grads(u->store, up->j.unit));
        up->clip = clip;
        b->up = NULL;
        return b->home->update(b->of, up);
    }
    /* The unit's weights are written here: copies that read them must be over. */
    mt_timeline_begin(u->cx->timeline, &span, MT_LANE_HOST, MT_WORK_WAIT, b->up->j.unit, NULL);
    MT_DO(mt_ledger_wait_grads(u->store, b->up->j.unit));
    MT_DO(mt_ledger_wait_fetch(u->store, b->up->j.unit));
    mt_timeline_end(u->cx->timeline, &span, 0, NULL);
    begun = mt_now_ns();
    mt_timeline_begin(u->cx->timeline, &span, MT_LANE_HOST, MT_WORK_UPDATE, b->up->j.unit, NULL);
    mt_watch_begin(watch, &post, NULL, mt_store_name(u->store, b->up->j.unit),
                   "the pool, which computes its update");
    st = b->up->j.run(b->up->j.arg, u->cx->pool, clip);
    mt_watch_end(watch, &post, st);
    MT_DO(st);
    mt_timeline_end(u->cx->timeline, &span, b->up->j.bytes, NULL);
    MT_HOLD(&u->mu);
    u->busy_ns += mt_now_ns() - begun;
    return MT_OK;
}

/* Runs the jobs in order; with a max_norm, first those that are only put, then those that are only
 * sent. Without, each is judged in turn, and their sums are added in that order. After a failure
 * the rest is only ended. */
static mt_status run_all(mt_updater *u, const work *w, mt_status st, float clip, result *r)
{
    double total = 0;
    int    clipped = w->max_norm > 0, skip_all = clipped && r->skipped > 0, finite, known;

    for (int turn = 0; turn < 3; turn++)     /* the device and the drive start before the pool */
        for (int i = 0; i < w->n; i++) {
            job *b = &w->jobs[i];

            if (turn != (clipped ? b->home->turn : 0))
                continue;
            /* Without max_norm the unit's own gradients decide, and the norm becomes known on the
             * way. */
            finite = 1;
            if (st == MT_OK && !clipped)
                st = weigh(u, b, &total, &finite, &known);
            r->skipped += !finite;
            if (st == MT_OK && finite && !skip_all)
                st = run_job(u, b, clip);
            if (b->up != NULL)
                mt_update_over(u->store, b->up, st);
            else if (st != MT_OK)
                mt_ledger_fault(u->store, st, mt_last_error());
            b->up = NULL;
        }
    if (!clipped)
        r->norm = sqrt(total);
    for (int i = 0; i < w->n; i++)
        if (w->jobs[i].home->stepped != NULL) {
            mt_status over = w->jobs[i].home->stepped(w->jobs[i].of);

            st = st != MT_OK ? st : over;
        }
    return st;
}

static mt_status carry_out(void *arg, mt_job *node)
{
    mt_updater *u = arg;
    work       *w = (work *)(void *)node;
    result      r = { .norm = (double)NAN };
    float       clip = 1.0f;
    mt_span     span;
    mt_status   st = MT_OK;

    mt_unlock(&u->mu);
    if (u->cx->share != NULL)
        st = measure_all(u, w);
    if (st == MT_OK && w->max_norm > 0)
        st = weigh_all(u, w, &r, &clip);
    if (st == MT_OK && u->cx->share != NULL) {
        mt_timeline_begin(u->cx->timeline, &span, MT_LANE_HOST, MT_WORK_WAIT, -1, NULL);
        /* CLEAR: nobody on any rank reads weights of these units as they are, but for saves, which
         * let go of each when it is copied. Of all before the first is written, since ranks may go
         * through them in other orders. */
        for (int i = 0; i < w->n && st == MT_OK; i++)
            st = mt_ledger_wait_fetched(u->store, w->jobs[i].up->j.unit);
        if (st == MT_OK) {
            mt_ledger_say(u->store, MT_COUNT_CLEAR, w->ticket, 0);
            st = mt_ledger_meet(u->store, MT_COUNT_CLEAR, w->ticket, 0);
        }
        mt_timeline_end(u->cx->timeline, &span, 0, NULL);
    }
    st = run_all(u, w, st, clip, &r);
    if (st != MT_OK)
        mt_ledger_fault(u->store, st, mt_last_error());
    r.normed = 1;
    publish(u, w, &r);
    work_free(w);
    mt_lock(&u->mu);
    return st;
}

/* ---- open and close --------------------------------------------------------------------- */

MT_CLOSER(mt_update_close, mt_updater)

mt_status mt_update_open(const mt_context *cx, mt_offload *grads, mt_updater **out)
{
    mt_updater *u MT_CLOSED(mt_update_close) = NULL;

    MT_DO(MT_MAKE(u, 1, "update"));
    *u = (mt_updater){ .cx = cx, .store = cx->store, .grads = grads };
    mt_mutex_open(&u->mu, MT_RANK_UPDATE);
    MT_DO(mt_worker_open(&u->worker, &u->mu, 1, "mt-updater", "host update", carry_out, u));
    *out = MT_KEEP(u);
    return MT_OK;
}

void mt_update_close(mt_updater *u)
{
    if (u == NULL)
        return;
    mt_worker_close(&u->worker);
    mt_mutex_close(&u->mu);
    free(u);
}

/* ---- submit, and what came of it -------------------------------------------------------- */

static uint64_t submits(mt_updater *u)
{
    return MT_LOCKED(&u->mu, (assert_state(u), u->worker.submitted));
}

mt_status mt_update_turn(mt_updater *u)
{
    uint64_t next = submits(u) + 1;

    return mt_worker_wait(&u->worker, mt_store_watch(u->store), next > AHEAD ? next - AHEAD : 0,
                          NULL, "a step before this one");
}

mt_status mt_update_submit(mt_updater *u, const mt_update_job *jobs, int n, double max_norm,
                           mt_queue *run, uint64_t *ticket)
{
    work     *w = NULL;
    mt_status st;

    MT_TRY(mt_ledger_check(u->store));
    MT_TRY(work_make(u, jobs, n, max_norm, run, &w));
    MT_TRY(mt_update_turn(u));
    for (int i = 0; i < n; i++)              /* before the updater has it, which ends all of them */
        mt_ledger_update_begin(u->store, jobs[i].unit);
    mt_lock(&u->mu);
    *ticket = w->ticket = mt_worker_submit(&u->worker, &w->node);
    u->results[*ticket % RESULTS] = (result){ 0 };
    assert_state(u);
    mt_unlock(&u->mu);
    if (u->cx->share != NULL)
        mt_ledger_say(u->store, MT_COUNT_SUBMITTED, *ticket, 0);
    return u->cx->debug.sync ? mt_update_drain(u) : MT_OK;

fail:
    work_free(w);
    for (int i = 0; i < n; i++)
        if (jobs[i].free != NULL)
            jobs[i].free(jobs[i].arg);
    return st;
}

mt_status mt_update_norm(mt_updater *u, uint64_t ticket, double *norm, int *skipped)
{
    result   r;
    uint64_t submitted = submits(u);

    if (ticket == 0 || ticket > submitted || submitted - ticket >= RESULTS)
        return MT_FAIL(MT_EINVAL, "update: there is no result of submit %" PRIu64 "; the latest "
                       "is %" PRIu64 ", and %d are kept", ticket, submitted, RESULTS);
    MT_DO(MT_UNTIL(mt_store_watch(u->store), &u->worker.news, &u->mu,
                   (r = u->results[ticket % RESULTS]).normed, NULL, "the gradients' norm"));
    MT_DO(mt_ledger_check(u->store));
    *norm = r.norm;
    *skipped = r.skipped;
    return MT_OK;
}

mt_status mt_update_drain(mt_updater *u)
{
    void *of, *last = NULL;

    MT_DO(mt_worker_wait(&u->worker, mt_store_watch(u->store), MT_WORKER_ALL, NULL,
                         "the steps that were asked for"));
    for (int unit = 0; unit < mt_store_units(u->store); unit++) {
        const mt_home *h = mt_store_home(u->store, unit, &of);

        if (h->drain != NULL && of != last)
            MT_DO(h->drain(last = of));
        if (u->cx->share != NULL)
            MT_DO(mt_ledger_wait_updates(u->store, unit));
    }
    return mt_ledger_check(u->store);
}

uint64_t mt_update_busy_ns(mt_updater *u)
{
    return MT_LOCKED(&u->mu, u->busy_ns);
}
