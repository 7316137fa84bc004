/* adam.h — AdamW: the definition, and the same bits from every instruction set and from CUDA.
 *
 * Letters: p weight (fp32 value), g gradient, m v moments, t step (from 1), b1 b2 betas.
 * One element, IEEE fp32, FMA where written and nowhere else, true division and square root:
 *
 *     g  = g * clip                             maximize: -g * clip
 *     m  = fma(1-b1, g - m, m)
 *     v  = fma(1-b2, fma(g, g, -v), v)
 *     s  = sqrt(v)
 *     u  = m / fma(s, rsqrt_bc2, eps)           rsqrt_bc2 = 1/sqrt(1 - b2^t)
 *     p  = p - fma(lr*wd, p, (lr/bc1) * u)      bc1 = 1 - b1^t
 *   The coefficients 1-b1, 1-b2, rsqrt_bc2, eps, lr*wd and lr/bc1 are made in fp64, rounded once.
 *   |m| < 2^-100 and v < 2^-120 are stored as zero (denormals cost a factor 4).
 *   Source: Loshchilov & Hutter 2019, Algorithm 2 (decoupled decay, bias-corrected).
 *
 * How p is kept, by the weight's type:
 *   F32   hi is p
 *   BF16  bits(p) = (hi << 16) + (int16)lo: hi is p rounded to nearest, ties away from zero, so
 *         that lo always fits. NaN is stored as hi = 0x7FC0, lo = 0; a finite |p| that would round
 *         to infinity (from 3.3961776e38 on) saturates to hi = 0x7F7F, lo = 0x7FFF. Whoever
 *         writes hi alone must zero lo: a stale lo can carry a zero hi into NaN.
 *   F16   master is p; hi is p rounded to nearest even. Where hi is not the rounding of master,
 *         someone wrote hi: p starts from hi.
 *
 * Moments of 8 bits (states other than FP32): adam8_code.h says what a byte means, how it is
 * rounded, and what keeps an update from being too large. Weights with less than 16 bits below hi:
 *   8BIT_LO8  bits(p) = (hi << 16) + (int8)lo * 256, rounded stochastically
 *   8BIT_SR   p is hi, rounded stochastically
 *
 * Bytes per parameter moved: F32 r16 w12; BF16 r14 w12 and F16 r16 w14 with a 16-bit gradient; BF16
 * of 8 bits r8.06 w6.06, with LO8 1 less each way, with SR 2.
 * What is exact and what is not: docs/numerics.md.
 */
#ifndef MT_ADAM_H
#define MT_ADAM_H

#include "../core/dev.h"
#include "../core/pool.h"
#include "../core/dtype.h"

typedef enum mt_isa { MT_ISA_SCALAR, MT_ISA_AVX2, MT_ISA_AVX512, MT_ISA_COUNT } mt_isa;
const char *mt_isa_name(mt_isa isa);
mt_isa      mt_isa_best(void);              /* what this processor runs */
int         mt_isa_runs(mt_isa isa);

typedef struct mt_adam_hyper {
    double  lr, beta1, beta2, eps, weight_decay;
    int64_t step;                            /* t >= 1 */
    int     maximize;                        /* 1: g is negated first */
} mt_adam_hyper;

/* Moments of 8 bits, and lo where it is a byte. */
typedef struct mt_adam_codes {
    int8_t     *m;                           /* [n] */
    uint8_t    *v;                           /* [n] */
    float      *scale;                       /* [2 * mt_states_groups(n)]: a group's of m, its of v;
                                              * aligned to 8 bytes */
    int8_t     *lo;                          /* [n] 8BIT_LO8 with BF16 only */
} mt_adam_codes;

typedef struct mt_adam_tensor {
    mt_dtype    dtype;                       /* F32, BF16, F16 */
    int64_t     n;
    void       *hi;                          /* [n] dtype, in/out */
    int16_t    *lo;                          /* [n] BF16 with 16 bits below hi, in/out */
    float      *master;                      /* [n] F16 only, in/out */
    float      *m, *v;                       /* [n] states FP32, in/out */
    const void *grad;                        /* [n] grad_dtype */
    mt_dtype    grad_dtype;                  /* dtype, or F32 (a micro-batch sum) */
    mt_adam_hyper hyper;
    mt_states   states;
    mt_adam_codes codes;                     /* states of 8 bits, in/out */
    /* What rounding is drawn from besides the step: a number of the parameter's own, and the number
     * of the tensor's first element in the parameter,
     * a multiple of 128 where states are of 8 bits. */
    uint64_t    key;
    int64_t     first;
} mt_adam_tensor;

/* Bytes that one step of n parameters reads and writes: the weight and its low half or master, both
 * moments with their scales, and once the gradient. */
static inline uint64_t mt_adam_moves(mt_dtype weight, mt_states states, mt_dtype grad, int64_t n)
{
    uint64_t kept = weight == MT_F16 ? 6 : weight == MT_F32 ? 4 : 2 + mt_states_low_bytes(states);
    uint64_t scales = states == MT_STATES_FP32 ? 0 : 16 * (uint64_t)mt_states_groups(n);

    return (uint64_t)n * (2 * (kept + (states == MT_STATES_FP32 ? 8 : 2)) + mt_dtype_bytes(grad)) +
           scales;
}

/* One step of every tensor. clip multiplies every gradient (1: none). Chunks of 256 Ki elements
 * are taken dynamically across tensors; the result does not depend on the number of threads, nor on
 * where a parameter is cut into tensors, if at multiples of 128.
 * pool NULL: this thread alone. Everything is checked before anything is written.
 * Errors: MT_EINVAL (dtype, a missing plane, step < 1, eps < 0, betas outside [0,1), lr, weight
 * decay or clip not finite; first not a multiple of 128), MT_ENOTSUP (isa does not run here),
 * MT_ENOMEM. */
mt_status mt_adam_step(mt_pool *pool, const mt_adam_tensor *t, int n_tensors, float clip,
                       mt_isa isa);

/* The same step in a queue, on memory of its device. Returns when it is put; everything is checked
 * before, and t is copied. On the CPU device the queue's thread does it alone.
 * Errors: as above, and MT_EDEVICE. */
mt_status mt_adam_put(mt_queue *q, const mt_adam_tensor *t, int n_tensors, float clip);
/* On a CUDA stream by its handle (cudaStream_t). MT_ENOTSUP in a build without CUDA. */
mt_status mt_adam_put_cuda(uintptr_t stream, const mt_adam_tensor *t, int n_tensors, float clip);

/* Benchmarks: reads and writes what mt_adam_step does, in the same chunks, with trivial arithmetic.
 * What it leaves in the planes has no meaning. Same errors. */
mt_status mt_adam_traffic(mt_pool *pool, const mt_adam_tensor *t, int n_tensors, mt_isa isa);

/* fp32 values <-> split weights: what masters() and state_dict() show. n elements. */
void mt_split_join(const uint16_t *hi, const int16_t *lo, float *p, int64_t n);
void mt_split_set (const float *p, uint16_t *hi, int16_t *lo, int64_t n);
/* The same with 8 bits below hi; set rounds to nearest, ties away. */
void mt_split8_join(const uint16_t *hi, const int8_t *lo, float *p, int64_t n);
void mt_split8_set (const float *p, uint16_t *hi, int8_t *lo, int64_t n);

/* fp32 moments <-> 8 bits: what state_dict() shows, and what it takes from elsewhere. n elements;
 * set rounds to nearest. */
void mt_codes_get(const mt_adam_codes *c, float *m, float *v, int64_t n);
void mt_codes_set(const float *m, const float *v, const mt_adam_codes *c, int64_t n);

#endif
