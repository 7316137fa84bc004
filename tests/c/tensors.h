/* tensors.h — what the tests of AdamW share: a parameter with its planes, of any type and states.
 *
 * A plane is an allocation of its exact size, so that ASan sees an element too many; all zero.
 */
#ifndef MT_TENSORS_H
#define MT_TENSORS_H

#include "../../csrc/optim/adam8_kernel.h"
#include "numbers.h"

typedef struct kind { mt_dtype w, g; mt_states states; } kind;

static const kind kinds[] = {
    { MT_F32, MT_F32, MT_STATES_FP32 },       { MT_BF16, MT_BF16, MT_STATES_FP32 },
    { MT_BF16, MT_F32, MT_STATES_FP32 },      { MT_F16, MT_F16, MT_STATES_FP32 },
    { MT_F16, MT_F32, MT_STATES_FP32 },
    { MT_F32, MT_F32, MT_STATES_8BIT },       { MT_F32, MT_F32, MT_STATES_8BIT_SR },
    { MT_BF16, MT_BF16, MT_STATES_8BIT },     { MT_BF16, MT_F32, MT_STATES_8BIT },
    { MT_BF16, MT_BF16, MT_STATES_8BIT_LO8 }, { MT_BF16, MT_F32, MT_STATES_8BIT_LO8 },
    { MT_BF16, MT_BF16, MT_STATES_8BIT_SR },  { MT_BF16, MT_F32, MT_STATES_8BIT_SR },
    { MT_F16, MT_F16, MT_STATES_8BIT_LO8 },   { MT_F16, MT_F32, MT_STATES_8BIT },
};
#define KINDS COUNT(kinds)
#define FULL  5              /* the first have fp32 states */

static int skew;             /* elements left out before each plane: vectors lie across theirs */

static float random_in(float low, float high)
{
    return low + (high - low) * (float)(random_bits() >> 8) * 0x1p-24f;
}

static inline size_t low_bytes(const mt_adam_tensor *t)
{
    return t->dtype == MT_BF16 ? mt_states_low_bytes(t->states) : 0;
}

static inline size_t scale_bytes(int64_t n) { return (size_t)mt_states_groups(n) * 8; }

/* One after the other: address, bytes of an element and of all. The last is the gradient. */
typedef struct piece { void **at; size_t each, bytes; } piece;
enum { PIECES = 10 };

static inline void pieces_of(mt_adam_tensor *t, piece *p)
{
    size_t n = (size_t)t->n, low = low_bytes(t), w = mt_dtype_bytes(t->dtype),
           g = mt_dtype_bytes(t->grad_dtype), full = t->states == MT_STATES_FP32, small = !full;
    piece  all[PIECES] = {
        { &t->hi, w, n * w },
        { (void **)&t->lo, 2, low == 2 ? 2 * n : 0 },
        { (void **)&t->codes.lo, 1, low == 1 ? n : 0 },
        { (void **)&t->master, 4, t->dtype == MT_F16 ? 4 * n : 0 },
        { (void **)&t->m, 4, 4 * n * full },        { (void **)&t->v, 4, 4 * n * full },
        { (void **)&t->codes.m, 1, n * small },     { (void **)&t->codes.v, 1, n * small },
        { (void **)&t->codes.scale, 8, scale_bytes(t->n) * small },
        { (void **)(uintptr_t)&t->grad, g, n * g },
    };

    memcpy(p, all, sizeof all);
}

static inline void *plane_new(const piece *p)
{
    size_t front = p->each == 8 ? 0 : (size_t)skew * p->each;        /* scales have vectors' */
    char  *raw = calloc(p->bytes + front + (p->bytes == 0), 1);

    REQUIRE(raw != NULL && front < 16);
    return raw + front;
}

static inline void tensor_free(mt_adam_tensor *t)
{
    piece p[PIECES];

    pieces_of(t, p);
    for (int i = 0; i < PIECES; i++)             /* malloc's addresses are multiples of 16 */
        free((void *)((uintptr_t)*p[i].at & ~(uintptr_t)15));
}

#define TENSOR CLOSED_BY(tensor_free) mt_adam_tensor

static inline float weight(const mt_adam_tensor *t, int64_t i)
{
    const uint16_t *hi = t->hi;
    float           p;

    if (t->dtype == MT_F16)
        return t->master[i];
    if (low_bytes(t) == 2)
        mt_split_join(hi + i, t->lo + i, &p, 1);
    else if (low_bytes(t) == 1)
        mt_split8_join(hi + i, t->codes.lo + i, &p, 1);
    else
        p = get(t->hi, t->dtype, i);
    return p;
}

static inline void set_weight(const mt_adam_tensor *t, int64_t i, float p)
{
    uint16_t *hi = t->hi;

    if (low_bytes(t) == 2) {
        mt_split_set(&p, hi + i, t->lo + i, 1);
    } else if (low_bytes(t) == 1) {
        mt_split8_set(&p, hi + i, t->codes.lo + i, 1);
    } else {
        set(t->hi, t->dtype, i, p);
        if (t->dtype == MT_F16)
            t->master[i] = p;
    }
}

static inline void set_grad(const mt_adam_tensor *t, int64_t i, float f)
{
    set(t->grad, t->grad_dtype, i, f);
}

static inline mt_adam_tensor tensor_new(kind k, int64_t n)
{
    mt_adam_tensor t = {
        .dtype = k.w, .grad_dtype = k.g, .states = k.states, .n = n, .key = 5,
        .hyper = { .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1,
                   .step = 1 },
    };
    piece p[PIECES];

    pieces_of(&t, p);
    for (int i = 0; i < PIECES; i++)
        *p[i].at = p[i].bytes > 0 || n == 0 ? plane_new(&p[i]) : NULL;
    for (int64_t i = 0; i < n; i++)
        set_weight(&t, i, random_in(-0.05f, 0.05f));
    return t;
}

static inline mt_adam_tensor tensor_twin(const mt_adam_tensor *t)
{
    mt_adam_tensor from = *t, twin = *t;
    piece          a[PIECES], b[PIECES];

    pieces_of(&from, a);
    pieces_of(&twin, b);
    for (int i = 0; i < PIECES; i++)
        if (*a[i].at != NULL) {
            *b[i].at = plane_new(&b[i]);
            memcpy(*b[i].at, *a[i].at, a[i].bytes);
        }
    return twin;
}

static inline void fill_grad(const mt_adam_tensor *t)
{
    for (int64_t i = 0; i < t->n; i++)
        set_grad(t, i, random_grad());
}

static inline void copy_grad(const mt_adam_tensor *to, const mt_adam_tensor *from)
{
    memcpy((void *)(uintptr_t)to->grad, from->grad,
           (size_t)from->n * mt_dtype_bytes(from->grad_dtype));
}

static inline void step_by(const mt_adam_tensor *t, mt_pool *pool, float clip, mt_isa isa)
{
    CHECK_OK(mt_adam_step(pool, t, 1, clip, isa));
}

/* Elements that differ in any plane. */
static inline int64_t differences(const mt_adam_tensor *a, const mt_adam_tensor *b)
{
    int     full = a->states == MT_STATES_FP32;
    int64_t bad = !full && a->n > 0 &&
                  memcmp(a->codes.scale, b->codes.scale, scale_bytes(a->n)) != 0;

    for (int64_t i = 0; i < a->n; i++)
        bad += !same_value(weight(a, i), weight(b, i)) ||
               !same_value(get(a->hi, a->dtype, i), get(b->hi, b->dtype, i)) ||
               (a->lo != NULL && a->lo[i] != b->lo[i]) ||
               (full ? !same_value(a->m[i], b->m[i]) || !same_value(a->v[i], b->v[i])
                     : a->codes.m[i] != b->codes.m[i] || a->codes.v[i] != b->codes.v[i]);
    return bad;
}

static inline void check_same(const mt_adam_tensor *want, const mt_adam_tensor *got,
                              const char *who)
{
    if (differences(want, got) != 0)
        fprintf(stderr, "  %s, %s weights, %s states, %s gradient, n %lld:\n", who,
                mt_dtype_name(want->dtype), mt_states_name(want->states),
                mt_dtype_name(want->grad_dtype), (long long)want->n);
    CHECK_EQ(differences(want, got), 0);
}

static inline int vector_isas(mt_isa *isas)
{
    int n = 0;

    for (int isa = MT_ISA_SCALAR + 1; isa < MT_ISA_COUNT; isa++)
        if (mt_isa_runs((mt_isa)isa))
            isas[n++] = (mt_isa)isa;
    return n;
}

/* Steps of one kind by scalar code and by another, of the same gradients. */
static inline void check_same_bits(kind k, int64_t n, int steps, mt_pool *pool, mt_isa isa)
{
    random_state = (uint64_t)n * 31 + k.w;
    TENSOR want = tensor_new(k, n);
    TENSOR got = tensor_twin(&want);

    for (int i = 1; i <= steps; i++) {
        fill_grad(&want);
        copy_grad(&got, &want);
        want.hyper.step = got.hyper.step = i;
        step_by(&want, NULL, 0.75f, MT_ISA_SCALAR);
        step_by(&got, pool, 0.75f, isa);
    }
    check_same(&want, &got, mt_isa_name(isa));
}

static const float odd[] = {
    0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, 0x1p-149f, -0x1p-130f, 0x1p-120f,
    0x1p-121f, -0x1p-100f, 0x1p-101f, 0x1p-70f, -0x1p-60f, 0x1p-61f, 3.4e38f, -3.4028235e38f,
    1e19f, 65504.0f, -65520.0f, 1e-7f, 0x1.fffffep127f, -NAN, 0x1.7p-15f,
};
enum { ODD = sizeof odd / sizeof odd[0] };

static inline void check_refused(const mt_adam_tensor *t, const char *part)
{
    uint32_t before = t->hi != NULL ? bits_of(get(t->hi, t->dtype, 0)) : 0;

    CHECK_FAILS(mt_adam_step(NULL, t, 1, 1.0f, MT_ISA_SCALAR), MT_EINVAL, part);
    CHECK(t->hi == NULL || bits_of(get(t->hi, t->dtype, 0)) == before);
}

#endif
