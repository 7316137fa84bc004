/* attention_cudnn.c — see attention_cudnn.h. The graph is the one that cuDNN knows as attention's
 * backward; dV and dK are summed over the query heads of a key's:
 *
 *   D  = sum of dout * out     S  = scale * Q K^T + bias
 *   P  = exp(S - lse), and 0 for keys behind a query where it is causal
 *   dV = P^T dout              dS = scale * P * (dout V^T - D)
 *   dK = dS^T Q                dQ = dS K
 */
#include "attention_cudnn.h"
#include "dnn.h"
#include "../core/lock.h"
#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { DESCRIPTORS = 128, OPS = 32, DEVICES = 64, BUCKETS = 64 };
enum { SCALE = MT_ATT_TENSORS, ONE, NEVER, SUMS, GIVEN };    /* tensors, after the caller's own */
enum { MEMORY, VIRTUAL, NUMBER };

struct mt_attention_choice {
    mt_attention_key           key;
    mt_dnn_handle              handle;
    mt_dnn_desc                plan;
    mt_dnn_desc                made[DESCRIPTORS], ops[OPS];
    int                        n, n_ops;
    int64_t                    names;            /* of tensors, so far */
    mt_status                  st;               /* the first error: nothing is made after it */
    size_t                     sums_bytes, plan_bytes;
    const mt_attention_choice *next;
};
typedef struct mt_attention_choice graph;

static mt_mutex                   mu = MT_MUTEX(MT_RANK_ATTENTION);
static const mt_attention_choice *buckets[BUCKETS];      /* under mu */
static mt_dnn_handle              handles[DEVICES];      /* by CUDA ordinal; under mu */
static mt_dnn                     dnn;                   /* written once, under mu */
static bool                       found;                 /* under mu */

/* ---- the library ---- */

static mt_status find_library(void)
{
    void *library;

    if (found)
        return MT_OK;
    if ((library = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD)) == NULL)
        return MT_FAIL(MT_ENOTSUP, "attention: cuDNN: torch has not loaded libcudnn.so.9");
#define FIND(ret, name, args)                                                       \
    if ((*(void **)&dnn.name = dlsym(library, #name)) == NULL)                      \
        return MT_FAIL(MT_ENOTSUP, "attention: cuDNN has no " #name);
    MT_DNN_MAP(FIND)
#undef FIND
    found = true;
    return MT_OK;
}

static mt_status said(const char *what, mt_dnn_status status)
{
    if (status == MT_DNN_SUCCESS)
        return MT_OK;
    return MT_FAIL(MT_ENOTSUP, "attention: cuDNN, %s: %s", what, dnn.cudnnGetErrorString(status));
}

static mt_status handle_of(int64_t device, mt_dnn_handle *out)
{
    mt_status st = MT_OK;

    if (device < 0 || device >= DEVICES)
        return MT_FAIL(MT_ENOTSUP, "attention: cuDNN: cuda:%lld is beyond %d devices",
                       (long long)device, DEVICES);
    if (handles[device] == NULL)
        st = said("cudnnCreate", dnn.cudnnCreate(&handles[device]));
    *out = handles[device];
    return st;
}

/* ---- descriptors ---- */

static mt_dnn_desc make(graph *g, int kind)
{
    mt_dnn_desc d = NULL;

    if (g->st == MT_OK && g->n == DESCRIPTORS)
        g->st = MT_FAIL(MT_ENOTSUP, "attention: cuDNN: more than %d parts", DESCRIPTORS);
    if (g->st != MT_OK)
        return NULL;
    g->st = said("a descriptor", dnn.cudnnBackendCreateDescriptor(kind, &d));
    if (g->st == MT_OK)
        g->made[g->n++] = d;
    return d;
}

static void set(graph *g, mt_dnn_desc d, int name, int type, int64_t n, const void *values)
{
    if (g->st == MT_OK)
        g->st = said("an attribute", dnn.cudnnBackendSetAttribute(d, name, type, n, values));
}

static void set_number(graph *g, mt_dnn_desc d, int name, int type, int number)
{
    set(g, d, name, type, 1, &number);
}

static void set_desc(graph *g, mt_dnn_desc d, int name, mt_dnn_desc value)
{
    set(g, d, name, MT_DNN_T_DESC, 1, &value);
}

static void finish(graph *g, mt_dnn_desc d)
{
    if (g->st == MT_OK)
        g->st = said("a part of the graph", dnn.cudnnBackendFinalize(d));
}

static void finish_op(graph *g, mt_dnn_desc op)
{
    finish(g, op);
    if (g->st == MT_OK)
        g->ops[g->n_ops++] = op;
}

static mt_dnn_desc tensor(graph *g, int64_t name, int where, int type, const int64_t size[4],
                          const int64_t stride[4])
{
    const int64_t alignment = 16;
    const bool    yes = true;
    mt_dnn_desc   d = make(g, MT_DNN_TENSOR);

    set_number(g, d, MT_DNN_TENSOR_TYPE, MT_DNN_T_DATA, type);
    set(g, d, MT_DNN_TENSOR_SIZE, MT_DNN_T_INT64, 4, size);
    set(g, d, MT_DNN_TENSOR_STRIDE, MT_DNN_T_INT64, 4, stride);
    set(g, d, MT_DNN_TENSOR_ID, MT_DNN_T_INT64, 1, &name);
    set(g, d, MT_DNN_TENSOR_ALIGNMENT, MT_DNN_T_INT64, 1, &alignment);
    if (where != MEMORY)
        set(g, d, where == VIRTUAL ? MT_DNN_TENSOR_VIRTUAL : MT_DNN_TENSOR_NUMBER, MT_DNN_T_BOOLEAN,
            1, &yes);
    finish(g, d);
    return d;
}

static int type_of(const graph *g) { return g->key.half ? MT_DNN_HALF : MT_DNN_BFLOAT16; }

/* One of the caller's, [rows, heads, tokens, last]. turned: the last two change places. */
static mt_dnn_desc given(graph *g, int which, int64_t heads, int64_t tokens, int64_t last,
                         bool turned)
{
    const int64_t *at = g->key.stride[which];
    const int      type = which == MT_ATT_LSE ? MT_DNN_FLOAT : type_of(g);
    int64_t        rows = g->key.rows;

    if (which == MT_ATT_BIAS)
        rows = g->key.bias_rows;
    if (turned)
        return tensor(g, which, MEMORY, type, (int64_t[]){ rows, heads, last, tokens },
                      (int64_t[]){ at[0], at[1], at[3], at[2] });
    return tensor(g, which, MEMORY, type, (int64_t[]){ rows, heads, tokens, last }, at);
}

static mt_dnn_desc number(graph *g, int name)
{
    const int64_t one[4] = { 1, 1, 1, 1 };

    return tensor(g, name, NUMBER, MT_DNN_FLOAT, one, one);
}

/* Dense between two operations, [rows, hq, a, b]. */
static mt_dnn_desc between(graph *g, int type, int64_t a, int64_t b)
{
    const int64_t size[4] = { g->key.rows, g->key.hq, a, b };
    const int64_t stride[4] = { g->key.hq * a * b, a * b, b, 1 };

    return tensor(g, g->names++, VIRTUAL, type, size, stride);
}

static mt_dnn_desc square(graph *g, int type)
{
    return between(g, type, g->key.queries, g->key.keys);
}

/* ---- operations ---- */

/* b and t may be NULL. axis: of an index only. */
static mt_dnn_desc pointwise(graph *g, int mode, int type, mt_dnn_desc x, mt_dnn_desc b,
                             mt_dnn_desc t, mt_dnn_desc y, int64_t axis)
{
    const float one = 1.0f;
    mt_dnn_desc d = make(g, MT_DNN_POINTWISE), op = make(g, MT_DNN_OP_POINTWISE);

    set_number(g, d, MT_DNN_POINTWISE_MODE, MT_DNN_T_MODE, mode);
    set_number(g, d, MT_DNN_POINTWISE_TYPE, MT_DNN_T_DATA, type);
    if (mode == MT_DNN_INDEX)
        set(g, d, MT_DNN_POINTWISE_AXIS, MT_DNN_T_INT64, 1, &axis);
    finish(g, d);
    set_desc(g, op, MT_DNN_OP_POINTWISE_DESC, d);
    set_desc(g, op, MT_DNN_OP_POINTWISE_X, x);
    set_desc(g, op, MT_DNN_OP_POINTWISE_Y, y);
    if (b != NULL)
        set_desc(g, op, MT_DNN_OP_POINTWISE_B, b);
    if (t != NULL)
        set_desc(g, op, MT_DNN_OP_POINTWISE_T, t);
    set(g, op, MT_DNN_OP_POINTWISE_ALPHA1, MT_DNN_T_FLOAT, 1, &one);
    set(g, op, MT_DNN_OP_POINTWISE_ALPHA2, MT_DNN_T_FLOAT, 1, &one);
    finish_op(g, op);
    return y;
}

/* In fp32, over all queries and keys. */
static mt_dnn_desc each(graph *g, int mode, mt_dnn_desc x, mt_dnn_desc b)
{
    return pointwise(g, mode, MT_DNN_FLOAT, x, b, NULL, square(g, MT_DNN_FLOAT), 0);
}

static mt_dnn_desc matmul(graph *g, mt_dnn_desc a, mt_dnn_desc b, mt_dnn_desc c)
{
    mt_dnn_desc d = make(g, MT_DNN_MATMUL), op = make(g, MT_DNN_OP_MATMUL);

    set_number(g, d, MT_DNN_MATMUL_TYPE, MT_DNN_T_DATA, MT_DNN_FLOAT);
    finish(g, d);
    set_desc(g, op, MT_DNN_OP_MATMUL_A, a);
    set_desc(g, op, MT_DNN_OP_MATMUL_B, b);
    set_desc(g, op, MT_DNN_OP_MATMUL_C, c);
    set_desc(g, op, MT_DNN_OP_MATMUL_DESC, d);
    finish_op(g, op);
    return c;
}

static mt_dnn_desc sum(graph *g, mt_dnn_desc x, mt_dnn_desc y)
{
    mt_dnn_desc d = make(g, MT_DNN_REDUCTION), op = make(g, MT_DNN_OP_REDUCTION);

    set_number(g, d, MT_DNN_REDUCTION_TYPE, MT_DNN_T_DATA, MT_DNN_FLOAT);
    set_number(g, d, MT_DNN_REDUCTION_MODE, MT_DNN_T_REDUCE, MT_DNN_SUM);
    finish(g, d);
    set_desc(g, op, MT_DNN_OP_REDUCTION_DESC, d);
    set_desc(g, op, MT_DNN_OP_REDUCTION_X, x);
    set_desc(g, op, MT_DNN_OP_REDUCTION_Y, y);
    finish_op(g, op);
    return y;
}

static mt_dnn_desc reshape(graph *g, mt_dnn_desc x, mt_dnn_desc y)
{
    mt_dnn_desc op = make(g, MT_DNN_OP_RESHAPE);

    set_desc(g, op, MT_DNN_OP_RESHAPE_X, x);
    set_desc(g, op, MT_DNN_OP_RESHAPE_Y, y);
    finish_op(g, op);
    return y;
}

/* ---- the graph ---- */

/* [rows, hq, keys, queries] of 16 bits from [rows, hq, queries, keys]. */
static mt_dnn_desc transposed(graph *g, mt_dnn_desc x)
{
    const mt_attention_key *key = &g->key;
    const int64_t           area = key->queries * key->keys;
    const int64_t           size[4] = { key->rows, key->hq, key->keys, key->queries };
    const int64_t           stride[4] = { key->hq * area, area, 1, key->keys };

    return reshape(g, x, tensor(g, g->names++, VIRTUAL, type_of(g), size, stride));
}

/* D, [rows, hq, queries, 1], in the workspace. */
static mt_dnn_desc row_sums(graph *g, mt_dnn_desc dout)
{
    const mt_attention_key *key = &g->key;
    const int64_t size[4] = { key->rows, key->hq, key->queries, 1 };
    const int64_t stride[4] = { key->hq * key->queries, key->queries, 1, 1 };
    mt_dnn_desc   out = given(g, MT_ATT_OUT, key->hq, key->queries, key->dim, false);
    mt_dnn_desc   products = pointwise(g, MT_DNN_MUL, MT_DNN_FLOAT, dout, out, NULL,
                                       between(g, MT_DNN_FLOAT, key->queries, key->dim), 0);
    mt_dnn_desc   sums = sum(g, products, between(g, MT_DNN_FLOAT, key->queries, 1));

    /* Times one: where dropout would have its factor. */
    return pointwise(g, MT_DNN_MUL, MT_DNN_FLOAT, sums, number(g, ONE), NULL,
                     tensor(g, SUMS, MEMORY, MT_DNN_FLOAT, size, stride), 0);
}

static mt_dnn_desc causal(graph *g, mt_dnn_desc s)
{
    mt_dnn_desc at[2], sees;                             /* places of query and key */

    for (int i = 0; i < 2; i++)
        at[i] = pointwise(g, MT_DNN_INDEX, MT_DNN_FLOAT, s, NULL, NULL, square(g, MT_DNN_INT32),
                          2 + i);
    sees = pointwise(g, MT_DNN_CMP_GE, MT_DNN_BOOLEAN, at[0], at[1], NULL,
                     square(g, MT_DNN_BOOLEAN), 0);
    return pointwise(g, MT_DNN_SELECT, MT_DNN_FLOAT, s, number(g, NEVER), sees,
                     square(g, MT_DNN_FLOAT), 0);
}

static mt_dnn_desc shares(graph *g, mt_dnn_desc q, mt_dnn_desc k, mt_dnn_desc scale)
{
    const mt_attention_key *key = &g->key;
    mt_dnn_desc             s = matmul(g, q, k, square(g, MT_DNN_FLOAT));

    s = each(g, MT_DNN_MUL, s, scale);
    if (key->bias_rows > 0)
        s = each(g, MT_DNN_ADD, s,
                 given(g, MT_ATT_BIAS, key->bias_heads, key->queries, key->keys, false));
    s = each(g, MT_DNN_SUB, s, given(g, MT_ATT_LSE, key->hq, key->queries, 1, false));
    if (key->causal)
        s = causal(g, s);
    return each(g, MT_DNN_EXP, s, NULL);
}

/* dK or dV: x^T y, summed over the query heads of a key's. */
static void key_grads(graph *g, mt_dnn_desc x, mt_dnn_desc y, int which)
{
    const mt_attention_key *key = &g->key;
    mt_dnn_desc             turned = transposed(g, x);
    mt_dnn_desc             to = given(g, which, key->hk, key->keys, key->dim, false);

    if (key->hq == key->hk)
        matmul(g, turned, y, to);
    else
        sum(g, matmul(g, turned, y, between(g, type_of(g), key->keys, key->dim)), to);
}

static void draw(graph *g)
{
    const mt_attention_key *key = &g->key;
    const int64_t *at = key->stride[MT_ATT_K];
    const int64_t size[4] = { key->rows, key->hk, key->keys, key->dim };
    mt_dnn_desc   q = given(g, MT_ATT_Q, key->hq, key->queries, key->dim, false);
    mt_dnn_desc   k = given(g, MT_ATT_K, key->hk, key->keys, key->dim, true);
    mt_dnn_desc   v = given(g, MT_ATT_V, key->hk, key->keys, key->dim, true);
    mt_dnn_desc   dout = given(g, MT_ATT_DOUT, key->hq, key->queries, key->dim, false);
    mt_dnn_desc   scale = number(g, SCALE), sums = row_sums(g, dout);
    mt_dnn_desc   p = shares(g, q, k, scale), ds;

    key_grads(g, p, dout, MT_ATT_DV);
    ds = each(g, MT_DNN_SUB, matmul(g, dout, v, square(g, MT_DNN_FLOAT)), sums);
    ds = each(g, MT_DNN_MUL, each(g, MT_DNN_MUL, ds, p), scale);
    key_grads(g, ds, q, MT_ATT_DK);
    matmul(g, ds, reshape(g, k, tensor(g, g->names++, VIRTUAL, type_of(g), size, at)),
           given(g, MT_ATT_DQ, key->hq, key->queries, key->dim, false));
}

/* ---- a plan ---- */

/* The first that cuDNN proposes. */
static void choose(graph *g, mt_dnn_desc heuristics)
{
    int64_t     n = 0, bytes = 0, got = 0;
    mt_dnn_desc config = make(g, MT_DNN_CONFIG), plan;

    if (g->st == MT_OK)
        g->st = said("proposals", dnn.cudnnBackendGetAttribute(heuristics, MT_DNN_HEUR_RESULTS,
                                                               MT_DNN_T_DESC, 1, &n, &config));
    if (g->st == MT_OK && n == 0)
        g->st = MT_FAIL(MT_ENOTSUP, "attention: cuDNN has no kernel for it");
    plan = make(g, MT_DNN_PLAN);
    set(g, plan, MT_DNN_PLAN_HANDLE, MT_DNN_T_HANDLE, 1, &g->handle);
    set_desc(g, plan, MT_DNN_PLAN_CONFIG, config);
    finish(g, plan);
    if (g->st == MT_OK)
        g->st = said("a workspace", dnn.cudnnBackendGetAttribute(plan, MT_DNN_PLAN_WORKSPACE,
                                                                 MT_DNN_T_INT64, 1, &got, &bytes));
    g->plan = plan;
    g->plan_bytes = (size_t)bytes;
}

static void plan(graph *g)
{
    mt_dnn_desc whole, heuristics;

    draw(g);
    whole = make(g, MT_DNN_GRAPH);
    set(g, whole, MT_DNN_GRAPH_HANDLE, MT_DNN_T_HANDLE, 1, &g->handle);
    set(g, whole, MT_DNN_GRAPH_OPS, MT_DNN_T_DESC, g->n_ops, g->ops);
    finish(g, whole);
    heuristics = make(g, MT_DNN_HEUR);
    set_desc(g, heuristics, MT_DNN_HEUR_GRAPH, whole);
    set_number(g, heuristics, MT_DNN_HEUR_MODE, MT_DNN_T_HEUR, MT_DNN_HEUR_MODE_A);
    finish(g, heuristics);
    choose(g, heuristics);
}

static void discard(graph *g)
{
    while (g->n > 0)
        (void)dnn.cudnnBackendDestroyDescriptor(g->made[--g->n]);
    free(g);
}

static mt_status new_choice(const mt_attention_key *key, mt_attention_choice **out)
{
    mt_attention_choice *g = NULL;
    mt_status            st;

    MT_TRY(find_library());
    if ((g = calloc(1, sizeof *g)) == NULL)
        return MT_FAIL(MT_ENOMEM, "attention: calloc(%zu)", sizeof *g);
    g->key = *key;
    g->names = GIVEN;
    g->sums_bytes = (size_t)(key->rows * key->hq * key->queries * 4 + 255) / 256 * 256;
    MT_TRY(handle_of(key->device, &g->handle));
    plan(g);
    MT_TRY(g->st);
    *out = g;
    return MT_OK;
fail:
    if (g != NULL)
        discard(g);
    return st;
}

/* FNV-1a over the words. */
static const mt_attention_choice **bucket_of(const mt_attention_key *key)
{
    int64_t  words[sizeof *key / sizeof(int64_t)];
    uint64_t hash = 0xcbf29ce484222325u;

    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        hash = (hash ^ (uint64_t)words[i]) * 0x100000001b3u;
    return &buckets[(hash ^ hash >> 32) % BUCKETS];
}

mt_status mt__attention_cudnn_choose(const mt_attention_key *key, const mt_attention_choice **out)
{
    mt_attention_choice *made = NULL;
    mt_status            st = MT_OK;

    mt_lock(&mu);
    *out = *bucket_of(key);
    while (*out != NULL && memcmp(&(*out)->key, key, sizeof *key) != 0)
        *out = (*out)->next;
    if (*out == NULL && (st = new_choice(key, &made)) == MT_OK) {
        made->next = *bucket_of(key);
        *bucket_of(key) = *out = made;
    }
    mt_unlock(&mu);
    return st;
}

size_t mt__attention_cudnn_workspace(const mt_attention_choice *how)
{
    return how->sums_bytes + how->plan_bytes;
}

static mt_status run(const mt_attention_choice *how, int64_t n, const int64_t *names,
                     void *const *data, void *workspace, uintptr_t stream)
{
    graph       g = { .st = MT_OK };                     /* of the pack alone */
    mt_dnn_desc pack = make(&g, MT_DNN_PACK);

    set(&g, pack, MT_DNN_PACK_IDS, MT_DNN_T_INT64, n, names);
    set(&g, pack, MT_DNN_PACK_POINTERS, MT_DNN_T_POINTER, n, data);
    set(&g, pack, MT_DNN_PACK_WORKSPACE, MT_DNN_T_POINTER, 1, &workspace);
    finish(&g, pack);
    if (g.st == MT_OK)
        g.st = said("cudnnSetStream", dnn.cudnnSetStream(how->handle, (mt_dnn_stream)stream));
    if (g.st == MT_OK)
        g.st = said("a launch", dnn.cudnnBackendExecute(how->handle, how->plan, pack));
    if (g.n > 0)
        (void)dnn.cudnnBackendDestroyDescriptor(pack);
    return g.st;
}

mt_status mt__attention_cudnn_run(const mt_attention_choice *how, void *const data[MT_ATT_TENSORS],
                                  float scale, void *workspace, uintptr_t stream)
{
    float     one = 1.0f, never = -INFINITY;
    void     *all[GIVEN] = { [SCALE] = &scale, [ONE] = &one, [SUMS] = workspace };
    int64_t   names[GIVEN], n = 0;
    mt_status st;

    memcpy(all + MT_ATT_Q, data + MT_ATT_Q, (MT_ATT_TENSORS - MT_ATT_Q) * sizeof *data);
    all[NEVER] = how->key.causal ? &never : NULL;
    for (int name = 0; name < GIVEN; name++)
        if (all[name] != NULL) {
            names[n] = name;
            all[n++] = all[name];
        }
    mt_lock(&mu);
    st = run(how, n, names, all, (char *)workspace + how->sums_bytes, stream);
    mt_unlock(&mu);
    return st;
}
