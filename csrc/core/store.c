/* store.c — units, their planes, and the address of every parameter in each. */
#include "store.h"

#include "store_impl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int plane_ok(mt_plane p)
{
    return (unsigned)p < MT_PLANE_COUNT;
}

#define NAME(name, what) #name,
MT_NAMES(mt_plane_name, mt_plane, MT_PLANE_MAP(NAME))

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

/* Has the plane room for the parameter, and how many bytes? In a share the host's planes have room
 * for whatever may come (all): what is trained, and how states are kept, moves nothing there, so
 * other ranks need not know of it. */
static int has_room(const mt__unit *u, int all, mt_plane p, const mt_param_desc *d, size_t *bytes)
{
    int first = all ? 0 : (int)states_of(u), last = all ? MT_STATES_COUNT - 1 : first, has = 0;

    *bytes = 0;
    if (p != MT_PLANE_HI && !all && !trains(d))
        return 0;
    for (int st = first; st <= last; st++) {
        size_t each = mt_plane_bytes(p, d->dtype, (mt_states)st, d->numel);

        has |= elem_bytes(p, d->dtype, (mt_states)st) > 0;
        *bytes = each > *bytes ? each : *bytes;
    }
    return has;
}

/* All are multiples of the unit's align; on the device, whose memory is nobody else's, of what
 * parts take. */
mt_status mt__lay_out(const mt__unit *u, int side, mt_plane p, size_t **offset, size_t *bytes)
{
    size_t *made MT_FREED = NULL, at = 0, len;
    size_t  align = side == MT__HOST ? u->align : MT_PART_ALIGN;

    MT_DO(MT_MAKE(made, u->shape.n, u->name));
    for (int i = 0; i < u->shape.n; i++) {
        const mt_param_desc *d = &u->shape.desc[i];
        int                  has = has_room(u, u->shared && side == MT__HOST, p, d, &len);

        made[i] = has ? at : MT__ABSENT;
        if ((has && (uint64_t)d->numel > SIZE_MAX / ELEM_MOST) ||
            __builtin_add_overflow(at, has ? len : 0, &at) || at > SIZE_MAX - align)
            return MT_FAIL(MT_EINVAL, "unit %s: parameter %d of %" PRId64 " x %s does not fit "
                           "an address space", u->name, i, d->numel, mt_dtype_name(d->dtype));
        at = mt_round_up(at, align);
    }
    *offset = MT_KEEP(made);
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

/* ---- units ------------------------------------------------------------------------------ */

/* Under both locks, or when nobody else is there. Yields the bytes of memory given back. */
static size_t plane_close(mt__plane *pl, int n)
{
    size_t bytes = pl->arena.reserved ? 0 : pl->arena.kept;

    for (int i = 0; pl->own != NULL && i < n; i++) {
        bytes += pl->own[i].reserved ? 0 : pl->own[i].kept;
        mt_arena_close(&pl->own[i]);         /* before the arena that it may be part of */
    }
    mt_arena_close(&pl->view);
    mt_arena_close(&pl->arena);
    free(pl->own);
    free(pl->at);
    pl->own = NULL;
    pl->at = NULL;
    return bytes;
}

void mt__unit_close(mt_store *s, mt__unit *u)
{
    if (u == NULL)
        return;
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        for (int side = 0; side < MT__SIDES; side++) {
            plane_close(&u->plane[side][p], u->shape.n);
            mt_mutex_close(&u->plane[side][p].making);
        }
    mt_watch_take(&s->watch, &u->account.copying);
    s->dev->ops->event_close(u->account.fetched);
    mt_board_close(&u->board);
    free(u->mirror.copies);
    free(u->chunk);
    free(u->unfiled);
    free(u->aloft);
    free(u->shape.offset);
    free(u->shape.desc);
    free(u->name);
    free(u);
}

/* A whole unit that nobody knows of yet. */
static mt_status unit_open(mt_store *s, const char *name, const mt_param_desc *d, int n,
                           mt__unit **out)
{
    mt__unit *u;
    mt_status st;

    if (name == NULL || n < 0 || (n > 0 && d == NULL))
        return MT_FAIL(MT_EINVAL, "unit %s: %d parameters at %p", name ? name : "without a name",
                       n, (const void *)d);
    MT_DO(MT_MAKE(u, 1, name));
    *u = (mt__unit){ .shape.n = n, .own.end.param = n, .shared = s->share != NULL,
                     .align = s->share != NULL ? (size_t)sysconf(_SC_PAGESIZE) : MT_PART_ALIGN,
                     .account.version = 1, .home = &mt_home_ram };
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        for (int side = 0; side < MT__SIDES; side++)
            mt_mutex_open(&u->plane[side][p].making, MT_RANK_MAKING);
    MT_TRY(MT_MAKE(u->name, (int64_t)strlen(name) + 1, name));
    strcpy(u->name, name);
    MT_TRY(MT_MAKE(u->shape.desc, n, name));
    MT_TRY(MT_MAKE(u->unfiled, n, name));
    MT_TRY(MT_MAKE(u->aloft, n, name));
    MT_TRY(MT_MAKE(u->chunk, n, name));
    for (int i = 0; i < n; i++) {
        MT_TRY(check_desc(name, &d[i], i));
        u->shape.desc[i] = d[i];
    }
    MT_TRY(mt__lay_out(u, MT__HOST, MT_PLANE_HI, &u->shape.offset, &u->shape.bytes));
    if (u->shared)                       /* this process owns its rank's portion */
        MT_TRY(mt_shape_cut(&u->shape, name, mt_share_rank(s->share), mt_share_ranks(s->share),
                            &u->own));
    *out = u;
    return MT_OK;

fail:
    mt__unit_close(s, u);
    return st;
}

static int64_t chunks_of(mt_dtype dt, int64_t n)
{
    return mt_plane_bytes(MT_PLANE_GRAD, dt, MT_STATES_FP32, n) > 0 ? mt_grains(n) : 0;
}

/* Under map_mu. n_units grows last, so whoever sees the number sees the unit. */
static mt_status publish(mt_store *s, mt__unit *u)
{
    int        i = u->number = atomic_load(&s->n_units);
    mt__unit ***seg = &s->seg[i / MT__SEG_UNITS];   /* only looked at when i is in range */
    uint64_t   hash = mt_alike_mix(1, (uint64_t)i);     /* of what must be the same on all ranks */
    size_t     chunks = 0, bytes, *offset;

    if (i >= MT__SEGS * MT__SEG_UNITS)
        return MT_FAIL(MT_EINVAL, "unit %s: a store holds at most %d units; stream larger ones",
                       u->name, MT__SEGS * MT__SEG_UNITS);
    for (const char *c = u->name; *c != '\0'; c++)
        hash = mt_alike_mix(hash, (unsigned char)*c);
    for (int k = 0; k < u->shape.n && u->shared; k++) {
        const mt_param_desc *d = &u->shape.desc[k];

        hash = mt_alike_mix(mt_alike_mix(hash, (uint64_t)d->dtype), (uint64_t)d->numel);
        u->chunk[k] = chunks;
        chunks += (size_t)chunks_of(d->dtype, d->numel);
    }
    if (u->shared)                       /* its board, then its ranges: share.h, (5) */
        MT_DO(mt_board_open(s->share, u->name, i, hash, chunks, &u->board));
    for (int p = 0; p < MT_PLANE_COUNT && u->shared; p++) {
        MT_DO(mt__lay_out(u, MT__HOST, (mt_plane)p, &offset, &bytes));
        free(offset);
        MT_DO(mt_share_take(s->share, bytes, &u->range[p]));
    }
    if (*seg == NULL)
        MT_DO(MT_MAKE(*seg, MT__SEG_UNITS, u->name));
    (*seg)[i % MT__SEG_UNITS] = u;
    atomic_store(&s->n_units, i + 1);
    return MT_OK;
}

mt_status mt__find(const mt_store *s, int unit, int param, mt__unit **out)
{
    mt__unit *u = mt__unit_at(s, unit);

    if (u == NULL)
        return mt__no_unit(s, unit);
    if (param < 0 || param >= u->shape.n)
        return MT_FAIL(MT_EINVAL, "unit %s has no parameter %d; it has %d",
                       u->name, param, u->shape.n);
    *out = u;
    return MT_OK;
}

/* Under map_mu. The first plane of these that is made on the host, or (MT__SIDES) on either side;
 * MT_PLANE_COUNT: none. */
static mt_plane made_of(const mt__unit *u, unsigned planes, int sides)
{
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        for (int side = 0; side < sides; side++)
            if ((planes >> p & 1) && u->plane[side][p].at != NULL)
                return (mt_plane)p;
    return MT_PLANE_COUNT;
}

mt_status mt_store_add(mt_store *s, const char *name, const mt_param_desc *p, int n, int *unit)
{
    mt__unit *u;
    mt_status st;

    MT_DO(unit_open(s, name, p, n, &u));
    if ((st = MT_LOCKED(&s->map_mu, publish(s, u))) == MT_OK)
        *unit = u->number;
    else
        mt__unit_close(s, u);
    return st;
}

mt_status mt_store_set_trainable(mt_store *s, int unit, int param, int on)
{
    mt_param_desc d;
    mt__unit     *u;

    MT_DO(mt__find(s, unit, param, &u));
    MT_HOLD(&s->map_mu);
    d = u->shape.desc[param];
    d.trainable = on != 0;
    MT_DO(check_desc(u->name, &d, param));
    __atomic_store_n(&u->shape.desc[param].trainable, d.trainable, __ATOMIC_RELAXED);
    return MT_OK;
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
    return mt__unit_or_none(s, unit)->shape.n;
}

const char *mt_store_name(const mt_store *s, int unit)
{
    return mt__unit_or_none(s, unit)->name;
}

const mt_param_desc *mt_store_desc(const mt_store *s, int unit, int param)
{
    const mt_shape *all = &mt__unit_or_none(s, unit)->shape;
    return param >= 0 && param < all->n ? &all->desc[param] : NULL;
}

size_t mt_store_hi_bytes(const mt_store *s, int unit)
{
    return mt__unit_or_none(s, unit)->shape.bytes;
}

size_t mt_store_offset(const mt_store *s, int unit, int param)
{
    const mt_shape *all = &mt__unit_or_none(s, unit)->shape;
    return param >= 0 && param < all->n ? all->offset[param] : 0;
}

size_t mt_store_align(const mt_store *s, int unit)
{
    return mt__unit_or_none(s, unit)->align;
}

size_t mt_store_plane_bytes(const mt_store *s, int unit, int param, mt_plane p, int64_t n)
{
    const mt_param_desc *d = mt_store_desc(s, unit, param);
    return d != NULL ? mt_plane_bytes(p, d->dtype, mt_store_states(s, unit), n) : 0;
}

mt_states mt_store_states(const mt_store *s, int unit)
{
    return states_of(mt__unit_or_none(s, unit));
}

mt_status mt_store_set_states(mt_store *s, int unit, mt_states states)
{
    mt__unit *u = mt__unit_at(s, unit);
    mt_plane  made;

    if (u == NULL || (unsigned)states >= MT_STATES_COUNT)
        return MT_FAIL(MT_EINVAL, "states %d of unit %d; the store has %d units, and states are 0 "
                       "to %d", (int)states, unit, mt_store_units(s), MT_STATES_COUNT - 1);
    MT_HOLD(&s->map_mu);
    made = states_of(u) != states ? made_of(u, MT_STATE_PLANES, MT__SIDES) : MT_PLANE_COUNT;
    if (made != MT_PLANE_COUNT)
        return MT_FAIL(MT_ESTATE, "unit %s has %s states already (plane %s); %s ones need a store "
                       "without them", u->name, mt_states_name(states_of(u)), mt_plane_name(made),
                       mt_states_name(states));
    atomic_store(&u->states, (int)states);
    return MT_OK;
}

/* Of weights that are aloft: bytes that nobody has brought to host memory. */
static size_t missing(const mt__unit *u)
{
    size_t sum = 0;

    for (int i = 0; u->shared && i < u->shape.n; i++)
        sum += mt__aloft(u, i) ? mt__weight_room(u, i) : 0;
    return sum > 0 && atomic_load(mt_board_plane(&u->board, MT_PLANE_HI)) == 0 ? sum : 0;
}

size_t mt_store_bytes(const mt_store *s, mt_plane p)
{
    size_t sum = 0;

    for (int i = 0; i < MT_PLANE_COUNT; i++)
        sum += i == (int)p || !plane_ok(p) ? atomic_load(&s->mapped[i]) : 0;
    for (int i = 0; (p == MT_PLANE_HI || !plane_ok(p)) && i < mt_store_units(s); i++)
        sum -= missing(mt__unit_at(s, i));
    return sum;
}

size_t mt_store_device_bytes(const mt_store *s)
{
    return atomic_load(&s->on_device);
}

mt_watch *mt_store_watch(mt_store *s)
{
    return &s->watch;
}

/* ---- owners ----------------------------------------------------------------------------- */

mt_status mt_portion_of(const mt_store *s, int unit, int owner, int owners, mt_portion *out)
{
    const mt__unit *u = mt__unit_at(s, unit);

    return u != NULL ? mt_shape_cut(&u->shape, u->name, owner, owners, out) : mt__no_unit(s, unit);
}

mt_status mt_portion_bytes(const mt_store *s, int unit, int owner, int owners, size_t *from,
                           size_t *to)
{
    mt_portion p;

    MT_DO(mt_portion_of(s, unit, owner, owners, &p));
    *from = mt_shape_byte(&mt__unit_at(s, unit)->shape, p.begin);
    *to = mt_shape_byte(&mt__unit_at(s, unit)->shape, p.end);
    return MT_OK;
}

int64_t mt_store_owned(const mt_store *s, int unit, int param, int64_t *from)
{
    const mt__unit *u = mt__unit_or_none(s, unit);

    *from = 0;
    return param >= 0 && param < u->shape.n
           ? mt_portion_part(&u->own, param, u->shape.desc[param].numel, from) : 0;
}

double *mt_store_sums(const mt_store *s, int unit, int param, int own, int64_t *n)
{
    const mt__unit *u = mt__unit_or_none(s, unit);
    int64_t         from = 0, elements;

    *n = 0;
    if (!u->shared || param < 0 || param >= u->shape.n)
        return NULL;
    elements = own ? mt_store_owned(s, unit, param, &from) : u->shape.desc[param].numel;
    *n = chunks_of(u->shape.desc[param].dtype, elements);
    return *n > 0 ? u->board.chunks + u->chunk[param] + from / MT_PORTION_GRAIN : NULL;
}

void mt_store_summed(mt_store *s, int unit)
{
    const mt_board *b = &mt__unit_at(s, unit)->board;

    if (mt_share_is_apart(s->share))         /* who is on this machine reads the board */
        mt_board_say(b, MT_COUNT_SUMMED,
                     mt_board_said(b, MT_COUNT_SUMMED, mt_share_rank(s->share)) + 1, 0);
}

/* The first chunk of what is behind the bound. */
static size_t chunk_at(const mt__unit *u, mt_bound b)
{
    return b.param == u->shape.n ? u->board.n_chunks
           : u->chunk[b.param] + (size_t)chunks_of(u->shape.desc[b.param].dtype, b.from);
}

void mt__chunks_of(const mt__unit *u, const mt_portion *p, size_t *from, size_t *n)
{
    *from = chunk_at(u, p->begin);
    *n = chunk_at(u, p->end) - *from;
}

/* ---- memory of planes ------------------------------------------------------------------- */

static unsigned registered(const mt__unit *u, const mt_home *h)
{
    return h->registered | (u->shared ? h->later : 0);
}

/* The plane's memory on the host is a copy: no more than addresses until it is committed. */
static int is_copy(const mt__unit *u, mt_plane p)
{
    const mt_home *h = atomic_load(&u->home);

    return (int)((h->away & ~h->later) >> p & 1);
}

/* That of a parameter with an arena of its own, which is on the host unless the store has such
 * planes on the device. In a share all have one; there those of a file's that came after its
 * layout. */
static int is_own_copy(const mt__unit *u, mt_plane p, int param)
{
    int there = (int)(atomic_load(&u->home)->device >> p & 1);

    return is_copy(u, p) && (there || (u->shared && !atomic_load(&u->unfiled[param])));
}

/* In a share, but of HI, an arena is addresses for its parameters, each of which has its own. */
static int in_parts(const mt__unit *u, int side, mt_plane p)
{
    return u->shared && side == MT__HOST && p != MT_PLANE_HI;
}

/* What an arena is to have: n parameters from the first on, which lie at these offsets. */
typedef struct extent {
    int           first, n, own;             /* own: the parameter's, not the plane's */
    const size_t *offset;                    /* [n] */
    size_t        bytes, from, kept;         /* kept: of these, what is this process's */
} extent;

/* HI is committed as a whole, since it is fetched, and read, as a whole. But where weights in a
 * share are copies, of a file, each process commits, and gives back, the pages of its own portion.
 * Of other planes it does so always. */
static void keep_own(const mt__unit *u, int side, mt_plane p, extent *x)
{
    int whole = (p == MT_PLANE_HI && !(u->shared && side == MT__HOST && is_copy(u, p))) ||
                (u->own.begin.param == 0 && u->own.begin.from == 0 &&
                 u->own.end.param == u->shape.n);

    x->from = 0;
    x->kept = whole ? x->bytes : 0;
    for (int i = 0; i < x->n && !whole; i++) {
        const mt_param_desc *d = &u->shape.desc[x->first + i];
        int64_t              from, n = mt_portion_part(&u->own, x->first + i, d->numel, &from);
        size_t               at = x->offset[i] + mt_plane_bytes(p, d->dtype, states_of(u), from);

        if (n == 0 || x->offset[i] == MT__ABSENT)
            continue;
        x->from = x->kept == 0 ? at : x->from;
        x->kept = at + mt_plane_bytes(p, d->dtype, states_of(u), n) - x->from;
    }
}

/* Host memory: addresses for all of it, pages for what is this process's; of a copy none yet. Under
 * making, also while the pool touches the pages: another thread's first `at` waits for it. No chunk
 * of the pool's asks for addresses, so the pool's turn comes. */
static mt_status map(mt_store *s, const mt__unit *u, int side, mt_plane p, const extent *x,
                     mt_arena *out)
{
    int       copy = x->own ? is_own_copy(u, p, x->first) : is_copy(u, p);
    size_t    mapped = mt_store_bytes(s, MT_PLANE_COUNT), at = 0, bytes;
    mt_dev   *dev = registered(u, atomic_load(&u->home)) >> p & 1 ? s->dev : NULL;
    mt_arena  made __attribute__((cleanup(mt_arena_close))) = { 0 };
    char      what[256];

    snprintf(what, sizeof what, "unit %s, plane %s", u->name, mt_plane_name(p));
    if (side == MT__DEVICE) {
        MT_DO(mt_arena_device(out, x->from, x->kept, s->dev, what));
        atomic_fetch_add(&s->on_device, out->kept);
        return MT_OK;
    }
    if (!u->shared && !copy && x->kept == x->bytes) {
        MT_DO(mt_arena_open(&made, x->bytes, s->pool, dev, what, mapped));
    } else {
        if (!u->shared || !x->own) {
            const mt_range *r = u->shared ? &u->range[p] : NULL;

            MT_DO(mt_arena_reserve(&made, x->bytes, r, 0, what, mapped));
        } else {
            /* Its part of the plane's addresses is behind those of parameters before it. */
            for (int i = 0; i < x->first; i++)
                if (has_room(u, 1, p, &u->shape.desc[i], &bytes))
                    at = mt_round_up(at + bytes, u->align);
            mt_arena_part(&made, &u->plane[MT__HOST][p].arena, at, x->bytes);
        }
        mt_arena_keep(&made, x->from, x->kept);
        if (!copy)
            MT_DO(mt_arena_commit(&made, s->pool, dev));
    }
    atomic_fetch_add(&s->mapped[p], copy ? 0 : made.kept);
    *out = made;
    made = (mt_arena){ 0 };
    return MT_OK;
}

void mt__unbind(mt_store *s, mt__unit *u)
{
    atomic_fetch_sub(&s->mapped[MT_PLANE_GRAD],
                     plane_close(&u->plane[MT__HOST][MT_PLANE_GRAD], u->shape.n));
    atomic_fetch_sub(&s->on_device, plane_close(&u->plane[MT__DEVICE][MT_PLANE_GRAD], u->shape.n));
}

/* Under making. Nothing to do when the plane is there. */
static mt_status plane_make(mt_store *s, mt__unit *u, int side, mt_plane p)
{
    mt__plane *pl = &u->plane[side][p];
    extent     x = { .n = u->shape.n };
    size_t    *offset MT_FREED = NULL;
    uintptr_t *at MT_FREED = NULL;
    mt_arena   made = { 0 };

    if (pl->at != NULL)
        return MT_OK;
    MT_DO(mt__lay_out(u, side, p, &offset, &x.bytes));
    x.offset = offset;
    if (!in_parts(u, side, p))
        keep_own(u, side, p, &x);
    MT_DO(MT_MAKE(at, u->shape.n, u->name));
    MT_DO(map(s, u, side, p, &x, &made));
    for (int i = 0; i < u->shape.n && !in_parts(u, side, p); i++)
        at[i] = offset[i] != MT__ABSENT ? (uintptr_t)made.base + offset[i] : 0;
    MT_HOLD(&s->map_mu);
    pl->arena = made;
    pl->at = MT_KEEP(at);
    return MT_OK;
}

/* A parameter's own arena, to be made: also of one that is not trained now, whose states may be on
 * their way here. */
static extent own_extent(const mt__unit *u, int side, mt_plane p, int param)
{
    static const size_t  nowhere = 0;
    const mt_param_desc *d = &u->shape.desc[param];
    size_t               bytes = mt_plane_bytes(p, d->dtype, states_of(u), d->numel);
    extent               x = { .first = param, .n = 1, .own = 1, .offset = &nowhere,
                               .bytes = mt_round_up(bytes, MT_PART_ALIGN) };

    keep_own(u, side, p, &x);
    return x;
}

/* Under making, of a plane that is made. Nothing to do when the parameter has one. */
static mt_status own_make(mt_store *s, mt__unit *u, int param, int side, mt_plane p)
{
    mt__plane *pl = &u->plane[side][p];
    extent     x = own_extent(u, side, p, param);
    mt_arena  *room = pl->own, made = { 0 };

    if (room == NULL) {
        MT_DO(MT_MAKE(room, u->shape.n, u->name));
        MT_WITH(&s->map_mu) pl->own = room;
    }
    if (pl->own[param].base != NULL)
        return MT_OK;
    MT_DO(map(s, u, side, p, &x, &made));
    MT_HOLD(&s->map_mu);
    pl->own[param] = made;
    pl->at[param] = (uintptr_t)made.base;
    return MT_OK;
}

/* Under map_mu, or making. NULL: it has none yet. */
static void *address_of(const mt__plane *pl, int param)
{
    return pl->at != NULL ? (void *)pl->at[param] : NULL;
}

static void *find_at(mt_store *s, const mt__plane *pl, int param)
{
    MT_HOLD(&s->map_mu);
    return address_of(pl, param);
}

static mt_status at(mt_store *s, int unit, int param, int side, mt_plane p, void **out)
{
    const mt_param_desc *d;
    mt__plane           *pl, *other;
    mt__unit            *u;
    void                *found;

    if (!plane_ok(p))
        return MT_FAIL(MT_EINVAL, "there is no plane %d", (int)p);
    MT_DO(mt__find(s, unit, param, &u));
    d = &u->shape.desc[param];
    pl = &u->plane[side][p];
    other = &u->plane[side == MT__HOST ? MT__DEVICE : MT__HOST][p];
    if (side == MT__DEVICE && !(atomic_load(&u->home)->device >> p & 1))
        return MT_FAIL(MT_EINVAL, "unit %s: the store has no plane %s of it on the device; settled "
                       "units have those other than HI there", u->name, mt_plane_name(p));
    if ((found = find_at(s, pl, param)) != NULL) {
        *out = found;
        return MT_OK;
    }
    MT_HOLD(&pl->making);
    if (elem_bytes(p, d->dtype, states_of(u)) == 0)
        return MT_FAIL(MT_EINVAL, "unit %s: plane %s has nothing for parameter %d, which is %s "
                       "with %s states", u->name, mt_plane_name(p), param, mt_dtype_name(d->dtype),
                       mt_states_name(states_of(u)));
    if (p == MT_PLANE_GRAD && pl->at == NULL && atomic_load(&u->passing))
        return MT_FAIL(MT_ESTATE, "unit %s: its gradients pass; there are none between an update "
                       "and the next hand-over", u->name);
    /* One that is not trained any more may have its states moved. */
    if (p != MT_PLANE_HI && !trains(d) && address_of(pl, param) == NULL &&
        find_at(s, other, param) == NULL)
        return MT_FAIL(MT_EINVAL, "unit %s: parameter %d is not trainable, so plane %s leaves it "
                       "out; call mt_store_set_trainable() first",
                       u->name, param, mt_plane_name(p));
    MT_DO(plane_make(s, u, side, p));
    if (address_of(pl, param) == NULL)
        MT_DO(own_make(s, u, param, side, p));
    *out = address_of(pl, param);
    return MT_OK;
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

    if (u == NULL)
        return mt__no_unit(s, unit);
    pl = &u->plane[MT__HOST][MT_PLANE_HI];
    MT_HOLD(&pl->making);
    MT_DO(plane_make(s, u, MT__HOST, MT_PLANE_HI));
    *out = pl->arena.base;
    return MT_OK;
}

int mt_store_made(mt_store *s, int unit, int param, mt_plane p, int on_device)
{
    mt__unit *u = mt__unit_at(s, unit);

    return u != NULL && plane_ok(p) && param >= 0 && param < u->shape.n &&
           find_at(s, &u->plane[on_device ? MT__DEVICE : MT__HOST][p], param) != NULL;
}

mt_status mt_store_in_arena(mt_store *s, int unit, int param, mt_plane p, int *in)
{
    mt__plane *pl;
    mt__unit  *u;

    MT_DO(mt__find(s, unit, param, &u));
    pl = &u->plane[MT__HOST][p];
    MT_HOLD(&pl->making);
    MT_DO(plane_make(s, u, MT__HOST, p));
    if (u->shared && address_of(pl, param) == NULL && trains(&u->shape.desc[param]))
        MT_DO(own_make(s, u, param, MT__HOST, p));
    *in = address_of(pl, param) != NULL &&
          (u->shared || pl->own == NULL || pl->own[param].base == NULL);
    if (u->shared)
        atomic_store(&u->unfiled[param], !*in);
    return MT_OK;
}

/* ---- memory that comes and goes --------------------------------------------------------- */

/* Under making: the plane's arenas, one after the other; i is -1 at first, which is the plane's
 * own. NULL: there is no more. */
static mt_arena *arena_of(const mt__unit *u, mt__plane *pl, int i)
{
    return i < 0 ? &pl->arena : pl->own != NULL && i < u->shape.n ? &pl->own[i] : NULL;
}

mt_status mt_store_commit(mt_store *s, int unit, mt_plane p)
{
    mt__unit  *u = mt__unit_at(s, unit);
    mt__plane *pl;
    mt_arena  *a;
    mt_dev    *dev;

    if (u == NULL || !plane_ok(p))
        return MT_FAIL(MT_EINVAL, "there is no plane %d of unit %d; the store has %d units", (int)p,
                       unit, mt_store_units(s));
    pl = &u->plane[MT__HOST][p];
    MT_HOLD(&pl->making);
    MT_DO(plane_make(s, u, MT__HOST, p));
    dev = registered(u, atomic_load(&u->home)) >> p & 1 ? s->dev : NULL;
    for (int i = 0; in_parts(u, MT__HOST, p) && i < u->shape.n; i++)
        if (find_at(s, &u->plane[MT__DEVICE][p], i) != NULL)
            MT_DO(own_make(s, u, i, MT__HOST, p));      /* where the device's values come */
    for (int i = -1; (a = arena_of(u, pl, i)) != NULL; i++) {
        mt_arena made = *a;

        MT_DO(mt_arena_commit(&made, s->pool, dev));
        atomic_fetch_add(&s->mapped[p], a->reserved ? made.kept : 0);
        MT_WITH(&s->map_mu) *a = made;
    }
    return MT_OK;
}

void mt_store_decommit(mt_store *s, int unit, mt_plane p)
{
    mt__unit  *u = mt__unit_at(s, unit);
    mt__plane *pl;
    mt_arena  *a;

    if (u == NULL || !plane_ok(p))
        return;
    pl = &u->plane[MT__HOST][p];
    MT_HOLD(&pl->making);
    for (int i = -1; (a = arena_of(u, pl, i)) != NULL; i++) {
        mt_arena made = *a;

        if (made.base == NULL || (i >= 0 && !is_own_copy(u, p, i)))
            continue;
        atomic_fetch_sub(&s->mapped[p], made.reserved ? 0 : made.kept);
        mt_arena_decommit(&made);
        MT_WITH(&s->map_mu) *a = made;
    }
}

/* Locked pages that are given back stay where they are, and what is written to their addresses then
 * is elsewhere. So all is unlocked first, and then the longest stretch between them locked. */
mt_status mt__thin(mt_store *s, mt__unit *u, int whole)
{
    mt__plane *pl = &u->plane[MT__HOST][MT_PLANE_HI];
    size_t     begin = 0, end, from = 0, to = whole ? u->shape.bytes : 0;
    mt_arena   a;
    mt_status  st;

    MT_HOLD(&pl->making);
    a = pl->arena;
    mt_arena_unregister(&a);
    for (int i = 0; i < u->shape.n && !whole; i++) {
        end = u->shape.offset[i] + mt__weight_room(u, i);
        if (mt__aloft(u, i)) {
            mt_share_punch(&u->range[MT_PLANE_HI], u->shape.offset[i], mt__weight_room(u, i));
            begin = end;
        } else if (end - begin > to - from) {
            from = begin;
            to = end;
        }
    }
    mt_arena_keep(&a, from, to - from);
    st = mt_arena_register(&a, s->dev);
    MT_WITH(&s->map_mu) pl->arena = a;
    return st;
}

size_t mt_store_reserved(mt_store *s, int unit, mt_plane p)
{
    mt__unit        *u = mt__unit_at(s, unit);
    const mt__plane *pl;
    size_t           bytes;

    if (u == NULL || !plane_ok(p))
        return 0;
    pl = &u->plane[MT__HOST][p];
    MT_HOLD(&s->map_mu);
    bytes = (pl->arena.reserved ? pl->arena.kept : 0) + (p == MT_PLANE_HI ? missing(u) : 0);
    for (int i = 0; u->shared && i < u->shape.n; i++)
        if (!is_own_copy(u, p, i))
            continue;
        else if (pl->own != NULL && pl->own[i].base != NULL)
            bytes += pl->own[i].reserved ? pl->own[i].kept : 0;
        else if (address_of(&u->plane[MT__DEVICE][p], i) != NULL)
            bytes += own_extent(u, MT__HOST, p, i).kept;         /* it has none yet */
    return bytes;
}

/* ---- homes ------------------------------------------------------------------------------ */

const mt_home mt_home_ram = {
    .lives = "lives in host memory", .registered = 1u << MT_PLANE_HI | 1u << MT_PLANE_GRAD,
    .by = MT_BY_RUN, .turn = 2,
};

const mt_home *mt_store_home(const mt_store *s, int unit, void **of)
{
    const mt__unit *u = mt__unit_or_none(s, unit);
    const mt_home  *h = atomic_load(&u->home);

    if (of != NULL)
        *of = u->home_of;
    return h;
}

/* The host's memory is there before anything has changed: all of it, where the device's goes, and
 * registered. */
mt_status mt__home_ready(mt_store *s, int unit, const mt_home *to)
{
    mt__unit      *u = mt__unit_at(s, unit);
    const mt_home *from = atomic_load(&u->home);
    mt_plane       made;

    /* All that there is to know of what may be combined. */
    if (to->from != from && from->from != to)
        return MT_FAIL(MT_ESTATE, "unit %s %s; it cannot be one that %s too", u->name, from->lives,
                       to->lives);
    if (atomic_load(&u->passing) && ((from->device ^ to->device) >> MT_PLANE_GRAD & 1))
        return MT_FAIL(MT_ESTATE, "unit %s: its gradients pass; it cannot become one that %s",
                       u->name, to->lives);
    MT_WITH(&s->map_mu)
        made = made_of(u, to->fresh | (u->shared && to->fed ? 1u << MT_PLANE_HI : 0), 1);
    if (made != MT_PLANE_COUNT)
        return MT_FAIL(MT_ESTATE, "unit %s has its plane %s in memory already; one that %s goes "
                       "there before that is asked for", u->name, mt_plane_name(made), to->lives);
    if (mt__aloft(u, -1) && !to->device)
        MT_DO(mt__thin(s, u, 1));
    for (int p = 0; p < MT_PLANE_COUNT; p++) {
        if (from->device && !to->device && u->plane[MT__HOST][p].at != NULL)
            MT_DO(mt_store_commit(s, unit, (mt_plane)p));
        if (registered(u, to) >> p & 1) {
            mt__plane *pl = &u->plane[MT__HOST][p];
            mt_arena  *a;

            MT_HOLD(&pl->making);
            for (int i = -1; (a = arena_of(u, pl, i)) != NULL; i++) {
                mt_arena one = *a;

                if (one.base == NULL || one.reserved)
                    continue;
                MT_DO(mt_arena_register(&one, s->dev));
                MT_WITH(&s->map_mu) *a = one;
            }
        }
    }
    return MT_OK;
}

void mt__device_close(mt_store *s, mt__unit *u)
{
    for (int p = 0; p < MT_PLANE_COUNT; p++)
        atomic_fetch_sub(&s->on_device, plane_close(&u->plane[MT__DEVICE][p], u->shape.n));
}

/* At the door: what is not made has no memory, and the device has planes of its own alone. */
static void assert_unit(const mt_store *s, const mt__unit *u)
{
    if (!MT_IS_CHECKED)
        return;
    MT_ASSERT(mt_holds(&s->map_mu));
    for (int p = 0; p < MT_PLANE_COUNT; p++) {
        const mt__plane *host = &u->plane[MT__HOST][p];

        MT_ASSERT((atomic_load(&u->home)->device >> p & 1) || u->plane[MT__DEVICE][p].at == NULL);
        MT_ASSERT(host->at != NULL || host->arena.base == NULL);
    }
}

void mt__home_set(mt_store *s, int unit, const mt_home *to, void *of)
{
    mt__unit *u = mt__unit_at(s, unit);

    MT_HOLD(&s->map_mu);
    assert_unit(s, u);
    if (!to->device)
        mt__device_close(s, u);
    u->home_of = of;
    atomic_store(&u->home, to);
    assert_unit(s, u);
}
