/* store.c — units, their planes, and the address of every parameter in each. */
#include "store_impl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MT__PLANE_NAME(name, what) #name,
static const char *const plane_names[MT_PLANE_COUNT] = { MT_PLANE_MAP(MT__PLANE_NAME) };
#undef MT__PLANE_NAME

static int plane_ok(mt_plane p)
{
    return (unsigned)p < MT_PLANE_COUNT;
}

const char *mt_plane_name(mt_plane p)
{
    return plane_ok(p) ? plane_names[p] : "?";
}

static mt_states states_of(const mt__unit *u)
{
    return (mt_states)atomic_load(&u->states);
}

static int can_train(mt_dtype dt)
{
    return dt == MT_F32 || dt == MT_BF16 || dt == MT_F16 || dt == MT_F64;
}

/* Of one element; SCALE: of a group. */
static size_t elem_bytes(mt_plane p, mt_dtype dt, mt_states st)
{
    int half = dt == MT_BF16 || dt == MT_F16, adam = half || dt == MT_F32;

    switch (p) {
    case MT_PLANE_HI:     return mt_dtype_bytes(dt);
    case MT_PLANE_GRAD:   return can_train(dt) ? mt_dtype_bytes(dt) : 0;
    case MT_PLANE_LO:     return dt == MT_BF16 ? mt_states_low_bytes(st) : 0;
    case MT_PLANE_MASTER: return dt == MT_F16 ? sizeof(float) : 0;
    case MT_PLANE_M:
    case MT_PLANE_V:      return !adam ? 0 : st == MT_STATES_FP32 ? sizeof(float) : 1;
    case MT_PLANE_SCALE:  return adam && st != MT_STATES_FP32 ? 2 * sizeof(float) : 0;
    case MT_PLANE_ACC:    return half ? sizeof(float) : 0;
    case MT_PLANE_COUNT:  break;
    }
    return 0;
}

size_t mt_plane_bytes(mt_plane p, mt_dtype dt, mt_states st, int64_t n)
{
    return (size_t)(p == MT_PLANE_SCALE ? mt_states_groups(n) : n) * elem_bytes(p, dt, st);
}

/* ---- offsets ---------------------------------------------------------------------------- */

#define ELEM_MOST 32             /* bytes that an element takes in a plane, at most */

static int trains(const mt_param_desc *d)
{
    return __atomic_load_n(&d->trainable, __ATOMIC_RELAXED);
}

/* all: in a share what is trained now, and how, moves nothing: others need not know of it then. */
static int has_now(const mt__unit *u, int all, mt_plane p, const mt_param_desc *d)
{
    int has = 0;

    if (p == MT_PLANE_HI)
        return 1;
    if (!all)
        return trains(d) && elem_bytes(p, d->dtype, states_of(u)) > 0;
    for (int st = 0; st < MT_STATES_COUNT; st++)
        has |= elem_bytes(p, d->dtype, (mt_states)st) > 0;
    return has;
}

/* Of a parameter in a plane; all: however its states are kept. */
static size_t bytes_in(const mt__unit *u, int all, mt_plane p, const mt_param_desc *d)
{
    size_t most = 0;

    if (!all)
        return mt_plane_bytes(p, d->dtype, states_of(u), d->numel);
    for (int st = 0; st < MT_STATES_COUNT; st++) {
        size_t bytes = mt_plane_bytes(p, d->dtype, (mt_states)st, d->numel);

        most = bytes > most ? bytes : most;
    }
    return most;
}

/* Where each parameter starts in a plane, and the bytes of all: multiples of the unit's align; on
 * the device, whose memory is nobody else's, of what parts take. */
static mt_status lay_out(const mt__unit *u, int side, mt_plane p, size_t *offset, size_t *bytes)
{
    int    all = u->shared && side == MT__HOST;
    size_t at = 0, align = side == MT__HOST ? u->align : MT_PART_ALIGN;

    for (int i = 0; i < u->n_params; i++) {
        const mt_param_desc *d = &u->desc[i];
        int                  has = has_now(u, all, p, d);
        size_t               len = has ? bytes_in(u, all, p, d) : 0;

        offset[i] = has ? at : MT__ABSENT;
        if ((has && (uint64_t)d->numel > SIZE_MAX / ELEM_MOST) ||
            __builtin_add_overflow(at, len, &at) || at > SIZE_MAX - align)
            return MT_FAIL(MT_EINVAL, "unit %s: parameter %d of %" PRId64 " x %s does not fit "
                           "an address space", u->name, i, d->numel, mt_dtype_name(d->dtype));
        at = (at + align - 1) / align * align;
    }
    *bytes = at;
    return MT_OK;
}

static mt_status check_desc(const char *name, const mt_param_desc *d, int i)
{
    if (mt_dtype_bytes(d->dtype) == 0)
        return MT_FAIL(MT_EINVAL, "unit %s: parameter %d has dtype %d, which is none of ours",
                       name, i, (int)d->dtype);
    if (d->numel < 0)
        return MT_FAIL(MT_EINVAL, "unit %s: parameter %d has %" PRId64 " elements",
                       name, i, d->numel);
    if (d->trainable && !can_train(d->dtype))
        return MT_FAIL(MT_EINVAL, "unit %s: parameter %d is %s, which cannot be trained; "
                       "F32, BF16, F16 and F64 can", name, i, mt_dtype_name(d->dtype));
    return MT_OK;
}

/* ---- the store and its units ------------------------------------------------------------ */

/* In a share. Where ranks are on several machines each has planes that others read. */
static mt_status open_threads(mt_store *s)
{
    mt_status st = mt__peers_open(s);

    if (st != MT_OK || !mt_share_is_apart(s->share))
        return st;
    mt_lock(&s->asks.serving);
    st = mt__asks_open(s);
    mt_unlock(&s->asks.serving);
    return st;
}

mt_status mt_store_open(const mt_context *cx, mt_store **out)
{
    mt_store *s;
    mt_status st;

    if (cx->dev == NULL)
        return MT_FAIL(MT_EINVAL, "a store needs a device; open one with mt_dev_cpu_open()");
    if ((s = calloc(1, sizeof *s)) == NULL)
        return MT_FAIL(MT_ENOMEM, "store: calloc(%zu)", sizeof *s);
    if ((st = mt__ledger_open(&s->ledger)) != MT_OK) {
        free(s);
        return st;
    }
    if ((st = mt_watch_cond(&s->mirror_changed)) != MT_OK) {
        mt__ledger_close(&s->ledger);
        free(s);
        return st;
    }
    mt_mutex_open(&s->map_mu, MT_RANK_MAP);
    mt_mutex_open(&s->fetched_mu, MT_RANK_FETCHED);
    mt_mutex_open(&s->mirror_mu, MT_RANK_MIRROR);
    mt_mutex_open(&s->asks.serving, MT_RANK_SERVING);
    mt_watch_open(&s->watch, cx->warn);
    s->dev = cx->dev;
    s->pool = cx->pool;
    s->share = cx->share;
    s->most_lent = MT_STORE_LENT;
    if (s->share != NULL && (st = open_threads(s)) != MT_OK) {
        mt_store_close(s);
        return st;
    }
    *out = s;
    return MT_OK;
}

/* Under both locks, or when nobody else is there. Yields the bytes of memory given back. */
static size_t plane_close(mt__plane *pl, int n_params)
{
    size_t bytes = pl->arena.reserved ? 0 : pl->arena.kept;

    for (int i = 0; pl->late != NULL && i < n_params; i++) {
        bytes += pl->late[i].reserved ? 0 : pl->late[i].kept;
        mt_arena_close(&pl->late[i]);
    }
    mt_arena_close(&pl->view);
    mt_arena_close(&pl->arena);
    free(pl->late);
    free(pl->offset);
    free(pl->place);
    pl->late = NULL;
    pl->offset = pl->place = NULL;
    return bytes;
}

static void unit_close(mt_store *s, mt__unit *u)
{
    if (u == NULL)
        return;
    for (int p = 0; p < MT_PLANE_COUNT; p++) {
        for (int side = 0; side < MT__SIDES; side++) {
            plane_close(&u->plane[side][p], u->n_params);
            mt_mutex_close(&u->plane[side][p].making);
        }
    }
    mt_watch_take(&s->watch, &u->copying);
    s->dev->ops->event_close(u->fetched);
    mt_board_close(&u->board);
    free(u->mirror.copies);
    free(u->chunk);
    free(u->unfiled);
    free(u->hi_offset);
    free(u->desc);
    free(u->name);
    free(u);
}

/* The caller has closed whoever worked on the store: stream, offload and updater come first. */
void mt_store_close(mt_store *s)
{
    if (s == NULL)
        return;
    mt_store_leave(s);
    for (int i = mt_store_units(s) - 1; i >= 0; i--)
        unit_close(s, mt__unit_at(s, i));
    for (int i = 0; i < MT__SEGS; i++)
        free(s->seg[i]);
    mt__lent_close(s);
    mt__ledger_close(&s->ledger);
    mt_watch_close(&s->watch);
    mt_mutex_close(&s->map_mu);
    mt_mutex_close(&s->fetched_mu);
    mt_mutex_close(&s->mirror_mu);
    mt_mutex_close(&s->asks.serving);
    pthread_cond_destroy(&s->mirror_changed);
    free(s);
}

/* A whole unit that nobody knows of yet. */
static mt_status unit_open(mt_store *s, const char *name, const mt_param_desc *d, int n,
                           mt__unit **out)
{
    size_t    slots = n > 0 ? (size_t)n : 1;
    mt__unit *u;
    mt_status st;

    if (name == NULL || n < 0 || (n > 0 && d == NULL))
        return MT_FAIL(MT_EINVAL, "unit %s: %d parameters at %p", name ? name : "without a name",
                       n, (const void *)d);
    if ((u = calloc(1, sizeof *u)) == NULL)
        return MT_FAIL(MT_ENOMEM, "unit %s: calloc(%zu)", name, sizeof *u);
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        for (int side = 0; side < MT__SIDES; side++)
            mt_mutex_open(&u->plane[side][p].making, MT_RANK_MAKING);
    u->n_params = n;
    u->own.end.param = n;
    u->owners = 1;
    u->shared = s->share != NULL;
    u->align = u->shared ? (size_t)sysconf(_SC_PAGESIZE) : MT_PART_ALIGN;
    u->version = 1;
    atomic_store(&u->home, &mt_home_ram);
    u->name = strdup(name);
    u->desc = calloc(slots, sizeof *u->desc);
    u->hi_offset = calloc(slots, sizeof *u->hi_offset);
    u->unfiled = calloc(slots, sizeof *u->unfiled);
    if (u->name == NULL || u->desc == NULL || u->hi_offset == NULL || u->unfiled == NULL) {
        st = MT_FAIL(MT_ENOMEM, "unit %s: no memory to describe %d parameters", name, n);
        goto fail;
    }
    for (int i = 0; i < n; i++) {
        MT_TRY(check_desc(name, &d[i], i));
        u->desc[i] = d[i];
    }
    MT_TRY(lay_out(u, MT__HOST, MT_PLANE_HI, u->hi_offset, &u->hi_bytes));
    *out = u;
    return MT_OK;

fail:
    unit_close(s, u);
    return st;
}

/* Under map_mu. n_units grows last, so whoever sees the number sees the unit. */
static mt_status publish(mt_store *s, mt__unit *u, int *unit)
{
    int        i = atomic_load(&s->n_units);
    mt__unit ***seg = &s->seg[i / MT__SEG_UNITS];   /* only looked at when i is in range */

    if (i >= MT__SEGS * MT__SEG_UNITS)
        return MT_FAIL(MT_EINVAL, "unit %s: a store holds at most %d units; stream larger ones",
                       u->name, MT__SEGS * MT__SEG_UNITS);
    if (*seg == NULL && (*seg = calloc(MT__SEG_UNITS, sizeof **seg)) == NULL)
        return MT_FAIL(MT_ENOMEM, "unit %s: no memory for another %d units",
                       u->name, MT__SEG_UNITS);
    (*seg)[i % MT__SEG_UNITS] = u;
    atomic_store(&s->n_units, i + 1);
    *unit = i;
    return MT_OK;
}

/* Under map_mu. One of these planes that is made; MT_PLANE_COUNT: none. */
static int made_of(const mt__unit *u, unsigned planes)
{
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        if ((planes >> p & 1) &&
            (u->plane[MT__HOST][p].offset != NULL || u->plane[MT__DEVICE][p].offset != NULL))
            return p;
    return MT_PLANE_COUNT;
}

static mt_status set_owner(mt_store *s, int unit, int owner, int owners)
{
    mt_portion own;
    mt__unit  *u;
    int        made;
    mt_status  st;

    MT_TRY(mt_portion_of(s, unit, owner, owners, &own));
    u = mt__unit_at(s, unit);
    mt_lock(&s->map_mu);
    made = made_of(u, ~(1u << MT_PLANE_HI));
    if (made != MT_PLANE_COUNT) {
        st = MT_FAIL(MT_ESTATE, "unit %s has its plane %s already; its owners are named before",
                     u->name, mt_plane_name((mt_plane)made));
    } else {
        u->own = own;
        u->owners = owners;
    }
    mt_unlock(&s->map_mu);
fail:
    return st;
}

mt_status mt_store_add(mt_store *s, const char *name, const mt_param_desc *p, int n, int *unit)
{
    mt__unit *u = NULL;
    mt_status st = unit_open(s, name, p, n, &u);

    if (st != MT_OK)
        return st;
    mt_lock(&s->map_mu);
    if (s->share != NULL)
        st = mt__share_unit(s, u, atomic_load(&s->n_units));
    if (st == MT_OK)
        st = publish(s, u, unit);
    mt_unlock(&s->map_mu);
    if (st != MT_OK)
        unit_close(s, u);
    else if (s->share != NULL)
        st = set_owner(s, *unit, mt_share_rank(s->share), mt_share_ranks(s->share));
    return st;
}

mt__unit *mt__unit_at(const mt_store *s, int unit)
{
    if (unit < 0 || unit >= atomic_load(&s->n_units))
        return NULL;
    return s->seg[unit / MT__SEG_UNITS][unit % MT__SEG_UNITS];
}

/* The unit, or MT_EINVAL for a unit or parameter that is not there. */
mt_status mt__find(const mt_store *s, int unit, int param, mt__unit **out)
{
    mt__unit *u = mt__unit_at(s, unit);

    if (u == NULL)
        return MT_FAIL(MT_EINVAL, "there is no unit %d; the store has %d",
                       unit, mt_store_units(s));
    if (param < 0 || param >= u->n_params)
        return MT_FAIL(MT_EINVAL, "unit %s has no parameter %d; it has %d",
                       u->name, param, u->n_params);
    *out = u;
    return MT_OK;
}

mt_status mt_store_set_trainable(mt_store *s, int unit, int param, int on)
{
    mt_param_desc d;
    mt__unit     *u;
    mt_status     st = mt__find(s, unit, param, &u);

    if (st != MT_OK)
        return st;
    mt_lock(&s->map_mu);
    d = u->desc[param];
    d.trainable = on != 0;
    if ((st = check_desc(u->name, &d, param)) == MT_OK)
        __atomic_store_n(&u->desc[param].trainable, d.trainable, __ATOMIC_RELAXED);
    mt_unlock(&s->map_mu);
    return st;
}

int mt_store_trainable(const mt_store *s, int unit, int param)
{
    const mt_param_desc *d = mt_store_desc(s, unit, param);
    return d != NULL && trains(d);
}

int mt_store_units(const mt_store *s)
{
    return atomic_load(&s->n_units);
}

int mt_store_params(const mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    return u != NULL ? u->n_params : 0;
}

const char *mt_store_name(const mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    return u != NULL ? u->name : "?";
}

const mt_param_desc *mt_store_desc(const mt_store *s, int unit, int param)
{
    const mt__unit *u = mt__unit_at(s, unit);
    return u != NULL && param >= 0 && param < u->n_params ? &u->desc[param] : NULL;
}

size_t mt_store_hi_bytes(const mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    return u != NULL ? u->hi_bytes : 0;
}

size_t mt_store_plane_bytes(const mt_store *s, int unit, int param, mt_plane p, int64_t n)
{
    const mt_param_desc *d = mt_store_desc(s, unit, param);
    return d != NULL ? mt_plane_bytes(p, d->dtype, mt_store_states(s, unit), n) : 0;
}

mt_states mt_store_states(const mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    return u != NULL ? states_of(u) : MT_STATES_FP32;
}

mt_status mt_store_set_states(mt_store *s, int unit, mt_states states)
{
    mt__unit *u = mt__unit_at(s, unit);
    mt_status st = MT_OK;
    int       made;

    if (u == NULL || (unsigned)states >= MT_STATES_COUNT)
        return MT_FAIL(MT_EINVAL,
                       "states %d of unit %d; the store has %d units, and states are 0 to %d",
                       (int)states, unit, mt_store_units(s), MT_STATES_COUNT - 1);
    mt_lock(&s->map_mu);
    made = states_of(u) != states ? made_of(u, MT_STATE_PLANES) : MT_PLANE_COUNT;
    if (made != MT_PLANE_COUNT)
        st = MT_FAIL(MT_ESTATE, "unit %s has %s states already (plane %s); %s ones need a store "
                     "without them",
                     u->name, mt_states_name(states_of(u)), mt_plane_name((mt_plane)made),
                     mt_states_name(states));
    else
        atomic_store(&u->states, (int)states);
    mt_unlock(&s->map_mu);
    return st;
}

mt_status mt_store_own(mt_store *s, int unit, int owner, int owners)
{
    if (s->share != NULL)
        return MT_FAIL(MT_ESTATE, "unit %s: its owners are those that share it",
                       mt_store_name(s, unit));
    return set_owner(s, unit, owner, owners);
}

int mt_store_owners(const mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);
    return u != NULL ? u->owners : 1;
}

int64_t mt_store_owned(const mt_store *s, int unit, int param, int64_t *from)
{
    const mt__unit *u = mt__unit_at(s, unit);

    *from = 0;
    if (u == NULL || param < 0 || param >= u->n_params)
        return 0;
    return mt_portion_part(&u->own, param, u->desc[param].numel, from);
}

size_t mt_store_align(const mt_store *s, int unit)
{
    const mt__unit *u = mt__unit_at(s, unit);

    return u != NULL ? u->align : MT_PART_ALIGN;
}

size_t mt_store_offset(const mt_store *s, int unit, int param)
{
    const mt__unit *u = mt__unit_at(s, unit);
    return u != NULL && param >= 0 && param < u->n_params ? u->hi_offset[param] : 0;
}

size_t mt_store_bytes(const mt_store *s, mt_plane p)
{
    size_t sum = 0;

    if (plane_ok(p))
        return atomic_load(&s->mapped[p]);
    for (int i = 0; i < MT_PLANE_COUNT; i++)
        sum += atomic_load(&s->mapped[i]);
    return sum;
}

/* ---- planes ----------------------------------------------------------------------------- */

static unsigned registered(const mt__unit *u, const mt_home *h)
{
    return h->registered | (u->shared ? h->later : 0);
}

/* With whom a plane's host memory is registered: those that a copy engine looks at. */
static mt_dev *registrar(const mt_store *s, const mt__unit *u, mt_plane p)
{
    return registered(u, atomic_load(&u->home)) >> p & 1 ? s->dev : NULL;
}

/* An arena on the host is no more than addresses: the plane's. */
static int is_copy(const mt__unit *u, mt_plane p)
{
    const mt_home *h = atomic_load(&u->home);

    return (int)((h->away & ~h->later) >> p & 1);
}

/* That of a parameter that came after the others, whose planes are on the host unless the store has
 * them on the device. In a share all did; there those of a file's that came after its layout. */
static int is_late_copy(const mt__unit *u, mt_plane p, int param)
{
    int there = (int)(atomic_load(&u->home)->device >> p & 1);

    return is_copy(u, p) && (there || (u->shared && !atomic_load(&u->unfiled[param])));
}

static int is_whole(const mt__unit *u)
{
    return u->own.begin.param == 0 && u->own.begin.from == 0 && u->own.end.param == u->n_params;
}

/* An arena of a plane, to be made: of n parameters, the first of which is `first`. */
typedef struct layout {
    int    first, n;
    int    late;                     /* the parameter came after the others */
    size_t bytes;
    size_t from, kept;               /* of these, what is this process's */
} layout;

/* Of weights all of it: they are fetched, and read, as a whole. But where each process keeps its
 * portion in a file: of copies in a share each makes, and gives back, the pages of its own. */
static void keep_own(const mt__unit *u, int side, mt_plane p, const size_t *offset, layout *l)
{
    int whole = p == MT_PLANE_HI && !(u->shared && side == MT__HOST && is_copy(u, p));
    int shares = u->shared && side == MT__HOST && p != MT_PLANE_HI && !l->late;     /* parameters
                                                                 * keep, being late */

    l->from = 0;
    l->kept = shares ? 0 : l->bytes;
    if (whole || is_whole(u) || shares)
        return;
    l->kept = 0;
    for (int i = 0; i < l->n; i++) {
        const mt_param_desc *d = &u->desc[l->first + i];
        int64_t              from, n = mt_portion_part(&u->own, l->first + i, d->numel, &from);
        size_t               at = offset[i] + mt_plane_bytes(p, d->dtype, states_of(u), from);

        if (n == 0 || offset[i] == MT__ABSENT)
            continue;
        l->from = l->kept == 0 ? at : l->from;
        l->kept = at + mt_plane_bytes(p, d->dtype, states_of(u), n) - l->from;
    }
}

/* Host addresses, of a plane or of a late arena. */
static mt_status reserve(mt_store *s, const mt__unit *u, mt_plane p, const layout *l,
                         const char *what, mt_arena *a)
{
    const mt__plane *pl = &u->plane[MT__HOST][p];
    size_t           mapped = mt_store_bytes(s, MT_PLANE_COUNT);

    if (!u->shared)
        return mt_arena_reserve(a, l->bytes, what, mapped);
    if (!l->late)
        return mt_arena_range(a, &u->range[p], 0, what, mapped);
    mt_arena_part(a, &pl->arena, pl->place[l->first], l->bytes);
    return MT_OK;
}

/* Host memory: addresses for all of it, pages for what is this process's. */
static mt_status map_own(mt_store *s, const mt__unit *u, mt_plane p, const layout *l, int copy,
                         const char *what, mt_arena *a)
{
    mt_arena  made = { 0 };
    mt_status st;

    MT_TRY(reserve(s, u, p, l, what, &made));
    mt_arena_keep(&made, l->from, l->kept);
    if (!copy)
        MT_TRY(mt_arena_commit(&made, s->pool, registrar(s, u, p)));
    *a = made;
    return MT_OK;

fail:
    mt_arena_close(&made);
    return st;
}

/* Under making, also while the pool touches the pages: another thread's first `at` waits for it.
 * No chunk of the pool's asks for addresses, so the pool's turn comes. */
static mt_status map(mt_store *s, const mt__unit *u, int side, mt_plane p, const layout *l,
                     mt_arena *a)
{
    int       copy = side == MT__HOST && (l->late ? is_late_copy(u, p, l->first) : is_copy(u, p));
    char      what[256];
    mt_status st;

    snprintf(what, sizeof what, "unit %s, plane %s", u->name, mt_plane_name(p));
    if (side == MT__DEVICE)
        st = mt_arena_device(a, l->from, l->kept, s->dev, what);
    else if (copy || l->kept < l->bytes || u->shared)
        st = map_own(s, u, p, l, copy, what, a);
    else
        st = mt_arena_open(a, l->bytes, s->pool, registrar(s, u, p), what,
                           mt_store_bytes(s, MT_PLANE_COUNT));
    if (st == MT_OK && !copy)
        atomic_fetch_add(side == MT__DEVICE ? &s->on_device : &s->mapped[p], a->kept);
    return st;
}

mt_status mt__lay_out(const mt__unit *u, int side, mt_plane p, size_t **offset, size_t *bytes)
{
    size_t   *made = calloc(u->n_params > 0 ? (size_t)u->n_params : 1, sizeof *made);
    mt_status st;

    if (made == NULL)
        return MT_FAIL(MT_ENOMEM, "unit %s: no memory for %d offsets", u->name, u->n_params);
    if ((st = lay_out(u, side, p, made, bytes)) != MT_OK) {
        free(made);
        return st;
    }
    *offset = made;
    return MT_OK;
}

void mt__unbind(mt_store *s, int unit)
{
    mt__unit *u = mt__unit_at(s, unit);

    atomic_fetch_sub(&s->mapped[MT_PLANE_GRAD],
                     plane_close(&u->plane[MT__HOST][MT_PLANE_GRAD], u->n_params));
    atomic_fetch_sub(&s->on_device, plane_close(&u->plane[MT__DEVICE][MT_PLANE_GRAD], u->n_params));
}

/* Under making. What became of an arena is known to all from here on. */
static void publish_arena(mt_store *s, mt_arena *a, mt_arena made)
{
    mt_lock(&s->map_mu);
    *a = made;
    mt_unlock(&s->map_mu);
}

/* The offsets become places; the offsets of late parameters are left. */
static mt_status all_late(const mt__unit *u, size_t **offset, size_t **place)
{
    size_t   *absent;
    mt_status st = MT_MAKE(absent, u->n_params, u->name);

    if (st != MT_OK)
        return st;
    for (int i = 0; i < u->n_params; i++)
        absent[i] = MT__ABSENT;
    *place = *offset;
    *offset = absent;
    return MT_OK;
}

/* Under making. Nothing to do when the plane is there. */
static mt_status plane_make(mt_store *s, mt__unit *u, int side, mt_plane p)
{
    mt__plane *pl = &u->plane[side][p];
    size_t    *offset = NULL, *place = NULL;
    layout     l = { .n = u->n_params };
    mt_arena   made = { 0 };
    mt_status  st;

    if (pl->offset != NULL)
        return MT_OK;
    MT_TRY(mt__lay_out(u, side, p, &offset, &l.bytes));
    if (u->shared && side == MT__HOST && p != MT_PLANE_HI)
        MT_TRY(all_late(u, &offset, &place));
    keep_own(u, side, p, offset, &l);
    MT_TRY(map(s, u, side, p, &l, &made));
    mt_lock(&s->map_mu);
    pl->arena = made;
    pl->offset = offset;
    pl->place = place;
    mt_unlock(&s->map_mu);
    return MT_OK;

fail:
    free(offset);
    free(place);
    return st;
}

/* Under making. Room for arenas of parameters that were not trainable when their plane was made. */
static mt_status late_room(mt_store *s, const mt__unit *u, mt__plane *pl)
{
    mt_arena *made;

    if (pl->late != NULL)
        return MT_OK;
    if ((made = calloc((size_t)u->n_params, sizeof *made)) == NULL)
        return MT_FAIL(MT_ENOMEM, "unit %s: no memory for %d arenas", u->name, u->n_params);
    mt_lock(&s->map_mu);
    pl->late = made;
    mt_unlock(&s->map_mu);
    return MT_OK;
}

/* Of a parameter that is not trained now too: its states may be on their way here. */
static size_t late_bytes(const mt__unit *u, int param, mt_plane p)
{
    const mt_param_desc *d = &u->desc[param];
    size_t               bytes = mt_plane_bytes(p, d->dtype, states_of(u), d->numel);

    return (bytes + MT_PART_ALIGN - 1) / MT_PART_ALIGN * MT_PART_ALIGN;
}

/* Under making. The arena of one of these. */
static mt_status late_make(mt_store *s, mt__unit *u, int param, int side, mt_plane p)
{
    mt__plane *pl = &u->plane[side][p];
    mt_arena   made = { 0 };
    layout     l = { .first = param, .n = 1, .late = 1, .bytes = late_bytes(u, param, p) };
    size_t     offset = 0;
    mt_status  st;

    MT_TRY(late_room(s, u, pl));
    if (pl->late[param].base != NULL)
        return MT_OK;
    keep_own(u, side, p, &offset, &l);
    MT_TRY(map(s, u, side, p, &l, &made));
    publish_arena(s, &pl->late[param], made);
    return MT_OK;
fail:
    return st;
}

/* Under making, or map_mu. NULL: it has none yet. */
static void *address_of(const mt__plane *pl, int param)
{
    if (pl->offset != NULL && pl->offset[param] != MT__ABSENT)
        return (char *)pl->arena.base + pl->offset[param];
    return pl->late != NULL ? pl->late[param].base : NULL;
}

static void *find_at(mt_store *s, const mt__plane *pl, int param)
{
    void *found;

    mt_lock(&s->map_mu);
    found = address_of(pl, param);
    mt_unlock(&s->map_mu);
    return found;
}

/* Under making. Has the parameter an address in this plane already, or a right to one? One that is
 * not trained any more may have its states moved. */
static mt_status check_at(mt_store *s, const mt__unit *u, int param, int side, mt_plane p)
{
    const mt_param_desc *d = &u->desc[param];
    const mt__plane     *pl = &u->plane[side][p];
    int                  other = side == MT__HOST ? MT__DEVICE : MT__HOST;

    if (elem_bytes(p, d->dtype, states_of(u)) == 0)
        return MT_FAIL(MT_EINVAL,
                       "unit %s: plane %s has nothing for parameter %d, which is %s with %s "
                       "states", u->name, mt_plane_name(p), param, mt_dtype_name(d->dtype),
                       mt_states_name(states_of(u)));
    if (p == MT_PLANE_GRAD && pl->offset == NULL && atomic_load(&u->passing))
        return MT_FAIL(MT_ESTATE,
                       "unit %s: its gradients pass; there are none between an update and the next "
                       "hand-over", u->name);
    if (p != MT_PLANE_HI && !trains(d) && address_of(pl, param) == NULL &&
        find_at(s, &u->plane[other][p], param) == NULL)
        return MT_FAIL(MT_EINVAL, "unit %s: parameter %d is not trainable, so plane %s leaves it "
                       "out; call mt_store_set_trainable() first",
                       u->name, param, mt_plane_name(p));
    return MT_OK;
}

/* Under making. */
static mt_status make_at(mt_store *s, mt__unit *u, int param, int side, mt_plane p, void **out)
{
    mt__plane *pl = &u->plane[side][p];
    mt_status  st;

    MT_TRY(check_at(s, u, param, side, p));
    MT_TRY(plane_make(s, u, side, p));
    if (address_of(pl, param) == NULL)
        MT_TRY(late_make(s, u, param, side, p));
    *out = address_of(pl, param);
fail:
    return st;
}

static mt_status at(mt_store *s, int unit, int param, int side, mt_plane p, void **out)
{
    mt__plane *pl;
    mt__unit  *u;
    void      *found;
    mt_status  st;

    if (!plane_ok(p))
        return MT_FAIL(MT_EINVAL, "there is no plane %d", (int)p);
    MT_TRY(mt__find(s, unit, param, &u));
    pl = &u->plane[side][p];
    if (side == MT__DEVICE && !(atomic_load(&u->home)->device >> p & 1))
        return MT_FAIL(MT_EINVAL, "unit %s: the store has no plane %s of it on the device; settled "
                       "units have those other than HI there", u->name, mt_plane_name(p));
    if ((found = find_at(s, pl, param)) != NULL) {
        *out = found;
        return MT_OK;
    }
    mt_lock(&pl->making);
    st = make_at(s, u, param, side, p, out);
    mt_unlock(&pl->making);
fail:
    return st;
}

mt_status mt_store_at(mt_store *s, int unit, int param, mt_plane p, void **out)
{
    return at(s, unit, param, MT__HOST, p, out);
}

mt_status mt_store_device_at(mt_store *s, int unit, int param, mt_plane p, void **out)
{
    return at(s, unit, param, MT__DEVICE, p, out);
}

mt_status mt_store_hi(mt_store *s, int unit, void **out)
{
    mt__unit  *u = mt__unit_at(s, unit);
    mt__plane *pl;
    mt_status  st;

    if (u == NULL)
        return MT_FAIL(MT_EINVAL, "there is no unit %d; the store has %d",
                       unit, mt_store_units(s));
    pl = &u->plane[MT__HOST][MT_PLANE_HI];
    mt_lock(&pl->making);
    if ((st = plane_make(s, u, MT__HOST, MT_PLANE_HI)) == MT_OK)
        *out = pl->arena.base;
    mt_unlock(&pl->making);
    return st;
}

/* ---- memory of planes ------------------------------------------------------------------- */

/* Under making. */
static mt_status register_one(mt_store *s, mt_arena *a)
{
    mt_arena  made = *a;
    mt_status st = mt_arena_register(&made, s->dev);

    if (st == MT_OK)
        publish_arena(s, a, made);
    return st;
}

/* Those that are made, and not reserved. */
static mt_status register_plane(mt_store *s, const mt__unit *u, mt__plane *pl)
{
    mt_status st = MT_OK;

    mt_lock(&pl->making);
    if (pl->arena.base != NULL && !pl->arena.reserved)
        MT_TRY(register_one(s, &pl->arena));
    for (int i = 0; pl->late != NULL && i < u->n_params; i++)
        if (pl->late[i].base != NULL && !pl->late[i].reserved)
            MT_TRY(register_one(s, &pl->late[i]));
fail:
    mt_unlock(&pl->making);
    return st;
}

/* Under making. */
static mt_status commit(mt_store *s, const mt__unit *u, mt_arena *a, mt_plane p)
{
    mt_arena  made = *a;
    mt_status st = mt_arena_commit(&made, s->pool, registrar(s, u, p));

    if (st == MT_OK && a->reserved) {
        publish_arena(s, a, made);
        atomic_fetch_add(&s->mapped[p], made.kept);
    }
    return st;
}

/* Under making. In a share each parameter's copy has an arena of its own. */
static mt_status make_copies(mt_store *s, mt__unit *u, mt_plane p)
{
    mt_status st = MT_OK;

    for (int i = 0; u->shared && p != MT_PLANE_HI && i < u->n_params; i++)
        if (find_at(s, &u->plane[MT__DEVICE][p], i) != NULL)
            MT_TRY(late_make(s, u, i, MT__HOST, p));
fail:
    return st;
}

mt_status mt_store_commit(mt_store *s, int unit, mt_plane p)
{
    mt__unit  *u = mt__unit_at(s, unit);
    mt__plane *pl;
    mt_status  st;

    if (u == NULL || !plane_ok(p))
        return MT_FAIL(MT_EINVAL, "there is no plane %d of unit %d; the store has %d units", (int)p,
                       unit, mt_store_units(s));
    pl = &u->plane[MT__HOST][p];
    mt_lock(&pl->making);
    MT_TRY(plane_make(s, u, MT__HOST, p));
    MT_TRY(make_copies(s, u, p));
    MT_TRY(commit(s, u, &pl->arena, p));
    for (int i = 0; pl->late != NULL && i < u->n_params; i++)
        MT_TRY(commit(s, u, &pl->late[i], p));
fail:
    mt_unlock(&pl->making);
    return st;
}

int mt_store_made(mt_store *s, int unit, int param, mt_plane p, int on_device)
{
    mt__unit *u = mt__unit_at(s, unit);

    return u != NULL && plane_ok(p) && param >= 0 && param < u->n_params &&
           find_at(s, &u->plane[on_device ? MT__DEVICE : MT__HOST][p], param) != NULL;
}

/* Under making. */
static void decommit(mt_store *s, mt_arena *a, mt_plane p)
{
    mt_arena made = *a;

    if (made.base == NULL)
        return;
    atomic_fetch_sub(&s->mapped[p], made.reserved ? 0 : made.kept);
    mt_arena_decommit(&made);
    publish_arena(s, a, made);
}

void mt_store_decommit(mt_store *s, int unit, mt_plane p)
{
    mt__unit  *u = mt__unit_at(s, unit);
    mt__plane *pl;

    if (u == NULL || !plane_ok(p))
        return;
    pl = &u->plane[MT__HOST][p];
    mt_lock(&pl->making);
    decommit(s, &pl->arena, p);
    for (int i = 0; pl->late != NULL && i < u->n_params; i++)
        if (is_late_copy(u, p, i))
            decommit(s, &pl->late[i], p);
    mt_unlock(&pl->making);
}

size_t mt_store_device_bytes(const mt_store *s)
{
    return atomic_load(&s->on_device);
}

/* ---- homes ------------------------------------------------------------------------------ */

static int home_fits(const mt_update_job *j)
{
    return j->run != NULL;
}

const mt_home mt_home_ram = {
    .lives = "lives in host memory", .registered = 1u << MT_PLANE_HI | 1u << MT_PLANE_GRAD,
    .fits = home_fits, .turn = 2,
};

const mt_home *mt_store_home(const mt_store *s, int unit, void **of)
{
    const mt__unit *u = mt__unit_at(s, unit);
    const mt_home  *h = u != NULL ? atomic_load(&u->home) : &mt_home_ram;

    if (of != NULL)
        *of = u != NULL ? u->home_of : NULL;
    return h;
}

/* Under map_mu. A plane of these that is made on the host; MT_PLANE_COUNT: none. */
static mt_plane first_made(const mt__unit *u, unsigned planes)
{
    mt_plane p = 0;

    while (p < MT_PLANE_COUNT && (!(planes >> p & 1) || u->plane[MT__HOST][p].offset == NULL))
        p++;
    return p;
}

/* All that there is to know of what may be combined. */
static mt_status may_move(mt_store *s, const mt__unit *u, const mt_home *from, const mt_home *to)
{
    mt_plane made;

    if (to->from != from && from->from != to)
        return MT_FAIL(MT_ESTATE, "unit %s %s; it cannot be one that %s too", u->name, from->lives,
                       to->lives);
    if (atomic_load(&u->passing) && ((from->device ^ to->device) >> MT_PLANE_GRAD & 1))
        return MT_FAIL(MT_ESTATE, "unit %s: its gradients pass; it cannot become one that %s",
                       u->name, to->lives);
    mt_lock(&s->map_mu);
    made = first_made(u, to->fresh | (u->shared && to->fed ? 1u << MT_PLANE_HI : 0));
    mt_unlock(&s->map_mu);
    if (made != MT_PLANE_COUNT)
        return MT_FAIL(MT_ESTATE, "unit %s has its plane %s in memory already; one that %s goes "
                       "there before that is asked for", u->name, mt_plane_name(made), to->lives);
    return MT_OK;
}

/* The host's memory is there before anything has changed: all of it, where the device's goes, and
 * registered. */
static mt_status host_ready(mt_store *s, int unit, mt__unit *u, const mt_home *to)
{
    int       all = atomic_load(&u->home)->device && !to->device;
    mt_status st = MT_OK;

    for (int p = 0; p < MT_PLANE_COUNT; p++) {
        if (all && u->plane[MT__HOST][p].offset != NULL)
            MT_TRY(mt_store_commit(s, unit, (mt_plane)p));
        if (registered(u, to) >> p & 1)
            MT_TRY(register_plane(s, u, &u->plane[MT__HOST][p]));
    }
fail:
    return st;
}

/* Under map_mu. */
static void device_close(mt_store *s, mt__unit *u)
{
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        atomic_fetch_sub(&s->on_device, plane_close(&u->plane[MT__DEVICE][p], u->n_params));
}

/* At the door: what is not made has no memory, and the device has planes of its own alone. */
static void assert_unit(const mt_store *s, const mt__unit *u)
{
    if (!MT_IS_CHECKED)
        return;
    MT_ASSERT(mt_holds(&s->map_mu));
    for (int p = 0; p < MT_PLANE_COUNT; p++) {
        const mt__plane *host = &u->plane[MT__HOST][p];

        MT_ASSERT((atomic_load(&u->home)->device >> p & 1) ||
                  u->plane[MT__DEVICE][p].offset == NULL);
        MT_ASSERT(host->offset != NULL || host->arena.base == NULL);
    }
}

static mt_status move(mt_store *s, int unit, const mt_home *to, void *of)
{
    mt__unit *u = mt__unit_at(s, unit);
    mt_status st;

    if (atomic_load(&u->home) == to)
        return MT_OK;
    MT_TRY(may_move(s, u, atomic_load(&u->home), to));
    MT_TRY(host_ready(s, unit, u, to));
    MT_TRY(mt__mirror_move(s, unit, to, of));
    mt_lock(&s->map_mu);
    assert_unit(s, u);
    if (!to->device)
        device_close(s, u);
    u->home_of = of;
    atomic_store(&u->home, to);
    assert_unit(s, u);
    mt_unlock(&s->map_mu);
fail:
    return st;
}

mt_status mt_store_move(mt_store *s, int unit, const mt_home *to, void *of)
{
    mt_status st;

    if (mt__unit_at(s, unit) == NULL)
        return MT_FAIL(MT_EINVAL, "there is no unit %d; the store has %d", unit, mt_store_units(s));
    if (s->share == NULL)
        return move(s, unit, to, of);
    mt_lock(&s->asks.serving);
    st = to->away != 0 ? mt__asks_open(s) : MT_OK;       /* what may fail, before anything moves */
    if (st == MT_OK)
        st = move(s, unit, to, of);
    mt_unlock(&s->asks.serving);
    return st;
}

void mt_store_device_close(mt_store *s)
{
    mt_lock(&s->map_mu);
    for (int i = 0; i < mt_store_units(s); i++)
        device_close(s, mt__unit_at(s, i));
    mt__lent_device_close(s);
    mt_unlock(&s->map_mu);
}

mt_status mt_store_in_arena(mt_store *s, int unit, int param, mt_plane p, int *in)
{
    mt__plane *pl;
    mt__unit  *u;
    mt_status  st;

    MT_TRY(mt__find(s, unit, param, &u));
    pl = &u->plane[MT__HOST][p];
    mt_lock(&pl->making);
    st = plane_make(s, u, MT__HOST, p);
    if (st == MT_OK && u->shared && pl->offset[param] == MT__ABSENT && trains(&u->desc[param]))
        st = late_make(s, u, param, MT__HOST, p);
    if (st == MT_OK)
        *in = u->shared ? address_of(pl, param) != NULL : pl->offset[param] != MT__ABSENT;
    if (st == MT_OK && u->shared)
        atomic_store(&u->unfiled[param], !*in);
    mt_unlock(&pl->making);
fail:
    return st;
}

/* Under map_mu. */
static size_t reserved_in(const mt_arena *a)
{
    return a->reserved ? a->kept : 0;
}

/* In a share, of a copy that has no arena yet. */
static size_t own_late_bytes(const mt__unit *u, int param, mt_plane p)
{
    layout l = { .first = param, .n = 1, .late = 1, .bytes = late_bytes(u, param, p) };
    size_t offset = 0;

    keep_own(u, MT__HOST, p, &offset, &l);
    return l.kept;
}

size_t mt_store_reserved(mt_store *s, int unit, mt_plane p)
{
    mt__unit        *u = mt__unit_at(s, unit);
    const mt__plane *pl;
    size_t           bytes;

    if (u == NULL || !plane_ok(p))
        return 0;
    pl = &u->plane[MT__HOST][p];
    mt_lock(&s->map_mu);
    bytes = reserved_in(&pl->arena);
    for (int i = 0; u->shared && i < u->n_params; i++)
        if (!is_late_copy(u, p, i))
            continue;
        else if (pl->late != NULL && pl->late[i].base != NULL)
            bytes += reserved_in(&pl->late[i]);
        else if (address_of(&u->plane[MT__DEVICE][p], i) != NULL)
            bytes += own_late_bytes(u, i, p);
    mt_unlock(&s->map_mu);
    return bytes;
}
