// gemm_cuda.cu — c = alpha * a @ b + beta * c by torch's cublasLt; no kernel of ours.
//
// Figures (bf16, fp32 accumulation, 7B shapes, 32k tokens): one H200 sustains 665 to 790 TFLOP/s;
// the limit is the same library through torch.mm, measured in the same run
// (benchmarks/bench_ops.py).
extern "C" {
#include "gemm_cuda.h"
}
#include "cublaslt.h"
#include "../core/lock.h"
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

struct mt_gemm_choice {
    mt_gemm_key           key;
    mt_lt_handle          handle;
    mt_lt_desc            desc;             // of codes one is made for each run: it has addresses
    mt_lt_layout          left, right, base, out;
    bool                  bare;
    mt_lt_algo            algo;
    size_t                workspace_bytes;
    const mt_gemm_choice *next;      // of the same bucket; set before the choice is seen
};

namespace {

constexpr int BUCKETS = 256, DEVICES = 64, CANDIDATES = 8;

mt_mutex              mu = MT_MUTEX(MT_RANK_GEMM);
const mt_gemm_choice *buckets[BUCKETS];     // under mu
mt_lt_handle          handles[DEVICES];     // by CUDA ordinal; under mu
mt_lt                 lt;                   // written once, under mu, before any choice is seen
bool                  lt_found;             // under mu

// ---- the library ----

// torch has it loaded: the name leads to that very one. Else the loader's own search.
void *open_library()
{
    static const char *const names[] = { "libcublasLt.so.13", "libcublasLt.so.12" };

    for (int flag : { RTLD_NOLOAD, 0 })
        for (const char *name : names)
            if (void *library = dlopen(name, RTLD_LAZY | flag))
                return library;
    return nullptr;
}

mt_status find_library()
{
    if (lt_found)
        return MT_OK;
    void *library = open_library();

    if (library == nullptr)
        return MT_FAIL(MT_ENOTSUP,
                       "gemm_: no libcublasLt.so.13 or .12 in this process; a CUDA build of "
                       "torch brings it");
#define FIND(ret, name, args)                                                           \
    if ((lt.name = reinterpret_cast<ret (*) args>(dlsym(library, #name))) == nullptr)   \
        return MT_FAIL(MT_ENOTSUP, "gemm_: this cublasLt has no " #name);
    MT_LT_MAP(FIND)
#undef FIND
    lt_found = true;
    return MT_OK;
}

mt_status said(const char *what, mt_lt_status status)
{
    if (status == MT_LT_SUCCESS)
        return MT_OK;
    return MT_FAIL(MT_EDEVICE, "gemm_: %s: %s", what, lt.cublasLtGetStatusString(status));
}

// A handle belongs to the device that is current when it is made.
mt_status handle_of(int64_t device, mt_lt_handle *out)
{
    mt_status st = MT_OK;

    if (device < 0 || device >= DEVICES)
        return MT_FAIL(MT_ENOTSUP, "gemm_: cuda:%lld is beyond %d devices", (long long)device,
                       DEVICES);
    if (handles[device] == nullptr)
        st = said("cublasLtCreate", lt.cublasLtCreate(&handles[device]));
    *out = handles[device];
    return st;
}

// ---- a choice ----

mt_lt_type type_of(int64_t dt)
{
    return dt == MT_F32  ? MT_LT_R_32F
         : dt == MT_BF16 ? MT_LT_R_16BF
         : dt == MT_F16  ? MT_LT_R_16F
                         : MT_LT_R_8F_E4M3;
}

mt_status make_layout(const mt_gemm_blas::mt_gemm_seen &m, int64_t dt, mt_lt_layout *out)
{
    return said("a layout", lt.cublasLtMatrixLayoutCreate(out, type_of(dt), (uint64_t)m.rows,
                                                          (uint64_t)m.cols, m.ld));
}

mt_status set(mt_lt_desc desc, const char *what, int attribute, const void *value, size_t bytes)
{
    return said(what, lt.cublasLtMatmulDescSetAttribute(
                          desc, static_cast<mt_lt_desc_attribute>(attribute), value, bytes));
}

// Scales of rows, and what is added.
mt_status describe_codes(mt_lt_desc desc, const mt_gemm *g)
{
    const int32_t  rows = MT_LT_SCALE_OUTER_VEC_32F;
    const uint32_t bias = MT_LT_EPILOGUE_BIAS;
    mt_status st;

    // left is b, right is a.
    MT_TRY(set(desc, "scales", MT_LT_DESC_A_SCALE_MODE, &rows, sizeof rows));
    MT_TRY(set(desc, "scales", MT_LT_DESC_B_SCALE_MODE, &rows, sizeof rows));
    MT_TRY(set(desc, "scales", MT_LT_DESC_A_SCALE_POINTER, &g->b_scale, sizeof g->b_scale));
    MT_TRY(set(desc, "scales", MT_LT_DESC_B_SCALE_POINTER, &g->a_scale, sizeof g->a_scale));
    if (g->bias != nullptr) {
        MT_TRY(set(desc, "a bias", MT_LT_DESC_EPILOGUE, &bias, sizeof bias));
        MT_TRY(set(desc, "a bias", MT_LT_DESC_BIAS_POINTER, &g->bias, sizeof g->bias));
    }
fail:
    return st;
}

// The product but for its layouts. out is to be destroyed, also after a failure.
mt_status describe(const mt_gemm_choice *how, const mt_gemm *g, mt_lt_desc *out)
{
    const mt_gemm_key &key = how->key;
    const mt_gemm_blas blas = mt_gemm_to_blas(g);
    const mt_lt_compute compute = key.ab == MT_F32 && key.tf32 ? MT_LT_COMPUTE_32F_FAST_TF32
                                                               : MT_LT_COMPUTE_32F;
    const int32_t left = blas.left.transposed ? MT_LT_OP_T : MT_LT_OP_N;
    const int32_t right = blas.right.transposed ? MT_LT_OP_T : MT_LT_OP_N;
    const int8_t  fast = (int8_t)key.fast;
    mt_status st;

    MT_TRY(said("a description", lt.cublasLtMatmulDescCreate(out, compute, MT_LT_R_32F)));
    MT_TRY(set(*out, "transpose", MT_LT_DESC_TRANSA, &left, sizeof left));
    MT_TRY(set(*out, "transpose", MT_LT_DESC_TRANSB, &right, sizeof right));
    if (key.ab == MT_F8E4M3) {
        MT_TRY(set(*out, "fast sums", MT_LT_DESC_FAST_ACCUM, &fast, sizeof fast));
        if (!how->bare)
            MT_TRY(describe_codes(*out, g));
    }
fail:
    return st;
}

mt_status lay_out(mt_gemm_choice *how, const mt_gemm *g)
{
    const mt_gemm_key &key = how->key;
    const mt_gemm_blas blas = mt_gemm_to_blas(g);
    mt_gemm_blas::mt_gemm_seen base = blas.out;
    mt_status st;

    if (g->base != nullptr)
        base.ld = g->base_ld;
    MT_TRY(make_layout(blas.left, key.ab, &how->left));
    MT_TRY(make_layout(blas.right, key.ab, &how->right));
    MT_TRY(make_layout(base, key.c_type, &how->base));
    MT_TRY(make_layout(blas.out, key.c_type, &how->out));
fail:
    return st;
}

mt_status prefer(mt_lt_pref pref, int attribute, const void *value, size_t bytes)
{
    return said("a preference",
                lt.cublasLtMatmulPreferenceSetAttribute(pref, attribute, value, bytes));
}

mt_status set_preferences(mt_lt_pref pref, const mt_gemm_key &key)
{
    const uint64_t workspace = MT_GEMM_WORKSPACE;
    const uint32_t reduction = MT_LT_REDUCTION_COMPUTE_TYPE;
    // left is b, right is a; D is c, and so is C, but for codes.
    const uint32_t align[] = { (uint32_t)key.align[2], (uint32_t)key.align[1],
                               (uint32_t)(key.ab == MT_F8E4M3 ? key.align[3] : key.align[0]),
                               (uint32_t)key.align[0] };
    mt_status st;

    MT_TRY(prefer(pref, MT_LT_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    MT_TRY(prefer(pref, MT_LT_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction));
    for (int i = 0; i < 4; i++)
        MT_TRY(prefer(pref, MT_LT_PREF_MIN_ALIGNMENT_A_BYTES + i, &align[i], sizeof align[i]));
fail:
    return st;
}

// The rule: the place of the first candidate that can run; -1: there is none. cublasLt puts those
// first that it takes for the fastest, by what it knows of the key and the
// device and without running them.
int chosen(const mt_lt_found *found, int n)
{
    for (int i = 0; i < n; i++)
        if (found[i].state == MT_LT_SUCCESS && found[i].workspaceSize <= MT_GEMM_WORKSPACE)
            return i;
    return -1;
}

mt_status ask(const mt_gemm_choice *how, mt_lt_desc desc, mt_lt_found *out)
{
    const mt_gemm_key &key = how->key;
    mt_lt_found  found[CANDIDATES];
    mt_lt_pref   pref = nullptr;
    mt_lt_status status;
    mt_status    st;
    int          n = 0, at;

    MT_TRY(said("a preference", lt.cublasLtMatmulPreferenceCreate(&pref)));
    MT_TRY(set_preferences(pref, key));
    status = lt.cublasLtMatmulAlgoGetHeuristic(how->handle, desc, how->left, how->right, how->base,
                                               how->out, pref, CANDIDATES, found, &n);
    at = status == MT_LT_SUCCESS ? chosen(found, n) : -1;
    if (at >= 0)
        *out = found[at];
    else
        st = MT_FAIL(MT_ENOTSUP,
                     "gemm_: cublasLt has no algorithm for [%lld, %lld] @ [%lld, %lld] with "
                     "leading dimensions %lld, %lld and %lld of the result: %s", (long long)key.m,
                     (long long)key.k, (long long)key.k, (long long)key.n, (long long)key.ld[1],
                     (long long)key.ld[2], (long long)key.ld[0],
                     lt.cublasLtGetStatusString(status));
fail:
    if (pref != nullptr)
        lt.cublasLtMatmulPreferenceDestroy(pref);
    return st;
}

mt_lt_status launch(const mt_gemm_choice *how, mt_lt_desc desc, const mt_gemm *g, float alpha,
                    float beta, void *workspace, cudaStream_t stream)
{
    const mt_gemm_blas blas = mt_gemm_to_blas(g);
    const void *base = g->base != nullptr ? g->base : g->c.data;

    return lt.cublasLtMatmul(how->handle, desc, &alpha, blas.left.data, how->left, blas.right.data,
                             how->right, &beta, base, how->base, g->c.data, how->out, &how->algo,
                             workspace, how->workspace_bytes, stream);
}

void discard(mt_gemm_choice *how)
{
    if (how->desc != nullptr)
        lt.cublasLtMatmulDescDestroy(how->desc);
    for (mt_lt_layout layout : { how->left, how->right, how->base, how->out })
        if (layout != nullptr)
            lt.cublasLtMatrixLayoutDestroy(layout);
    free(how);
}

mt_status settle(mt_gemm_choice *how, const mt_gemm *g)
{
    mt_lt_found found;
    mt_status   st;

    MT_TRY(describe(how, g, &how->desc));
    MT_TRY(lay_out(how, g));
    MT_TRY(ask(how, how->desc, &found));
    how->algo = found.algo;
    how->workspace_bytes = found.workspaceSize;
fail:
    return st;
}

mt_status make(const mt_gemm_key *key, const mt_gemm *g, bool bare, mt_gemm_choice **out)
{
    mt_gemm_choice *how = static_cast<mt_gemm_choice *>(calloc(1, sizeof *how));
    mt_status       st;

    if (how == nullptr)
        return MT_FAIL(MT_ENOMEM, "gemm_: calloc(%zu)", sizeof *how);
    how->key = *key;
    how->bare = bare;
    MT_TRY(find_library());
    MT_TRY(handle_of(key->device, &how->handle));
    MT_TRY(settle(how, g));
    if (key->ab == MT_F8E4M3) {
        lt.cublasLtMatmulDescDestroy(how->desc);
        how->desc = nullptr;
    }
    *out = how;
    return MT_OK;
fail:
    discard(how);
    return st;
}

// Rows' scales are cuBLAS 12.9's and some GPUs', and what else a kernel may lack is the library's
// to say; but it takes any bias of a product of codes for bf16, without a word. What it does not
// do beside such a product is done behind it.
mt_status make_any(const mt_gemm_key *key, const mt_gemm *g, mt_gemm_choice **out)
{
    const mt_gemm sums = mt_gemm_sums(g, g->c.data);
    const bool    of_codes = key->ab == MT_F8E4M3;
    mt_status     st = MT_ENOTSUP;

    if (!(of_codes && key->biased && key->c_type == MT_F32))
        st = make(key, g, false, out);
    return st == MT_OK || !of_codes ? st : make(key, &sums, true, out);
}

const mt_gemm_choice **bucket_of(const mt_gemm_key *key)       // FNV-1a over the key's words
{
    int64_t  words[sizeof *key / sizeof(int64_t)];
    uint64_t hash = 0xcbf29ce484222325u;

    memcpy(words, key, sizeof words);
    for (int64_t word : words)
        hash = (hash ^ (uint64_t)word) * 0x100000001b3u;
    return &buckets[(hash ^ hash >> 32) % BUCKETS];
}

const mt_gemm_choice *known(const mt_gemm_key *key)            // under mu
{
    const mt_gemm_choice *how = *bucket_of(key);

    while (how != nullptr && memcmp(&how->key, key, sizeof *key) != 0)
        how = how->next;
    return how;
}

} // namespace

extern "C" mt_status mt__gemm_cuda_choose(const mt_gemm_key *key, const mt_gemm *g,
                                          const mt_gemm_choice **out)
{
    mt_gemm_choice *made = nullptr;
    mt_status       st = MT_OK;

    mt_lock(&mu);
    if ((*out = known(key)) == nullptr && (st = make_any(key, g, &made)) == MT_OK) {
        made->next = *bucket_of(key);
        *bucket_of(key) = *out = made;
    }
    mt_unlock(&mu);
    return st;
}

extern "C" size_t mt__gemm_cuda_workspace(const mt_gemm_choice *how)
{
    return how->workspace_bytes;
}

extern "C" int mt__gemm_cuda_bare(const mt_gemm_choice *how)
{
    return how->bare;
}

extern "C" mt_status mt__gemm_cuda_run(const mt_gemm_choice *how, const mt_gemm *g, float alpha,
                                       float beta, void *workspace, uintptr_t handle)
{
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(handle);
    mt_lt_desc   desc = how->desc;
    mt_status    st = MT_OK;

    if (how->desc == nullptr)
        MT_TRY(describe(how, g, &desc));
    st = said("cublasLtMatmul", launch(how, desc, g, alpha, beta, workspace, stream));
fail:
    if (how->desc == nullptr && desc != nullptr)
        lt.cublasLtMatmulDescDestroy(desc);
    return st;
}
