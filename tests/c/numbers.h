/* numbers.h — numbers of all types, made from a seed. */
#ifndef MT_NUMBERS_H
#define MT_NUMBERS_H

#include "../../csrc/core/dtype.h"
#include "check.h"

/* splitmix64: Steele, Lea & Flood 2014, figure 17. */
static inline uint64_t toy_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline int64_t random_below(uint64_t *state, int64_t n)
{
    return (int64_t)(toy_random(state) % (uint64_t)n);
}

static uint64_t random_state;

static inline uint32_t random_bits(void)
{
    return (uint32_t)(toy_random(&random_state) >> 32);
}

/* Of either sign, magnitudes over 16 powers of two: what gradients of one layer look like. */
static inline float random_grad(void)
{
    float size = ldexpf(1.0f + (float)(random_bits() >> 8) * 0x1p-24f,
                        (int)(random_bits() % 16) - 20);

    return random_bits() & 1 ? size : -size;
}

static inline uint32_t bits_of(float f) { uint32_t u; memcpy(&u, &f, sizeof u); return u; }
static inline float float_of(uint32_t u) { float f; memcpy(&f, &u, sizeof f); return f; }

/* A NaN is a NaN: the sign and payload of one are not promised. */
static inline int same_value(float a, float b)
{
    return bits_of(a) == bits_of(b) || (isnan(a) && isnan(b));
}

static inline float get(const void *x, mt_dtype dt, int64_t i)
{
    return dt == MT_F32  ? ((const float *)x)[i]
         : dt == MT_BF16 ? mt_bf16_to_f32(((const uint16_t *)x)[i])
                         : mt_f16_to_f32(((const uint16_t *)x)[i]);
}

static inline void set(const void *x, mt_dtype dt, int64_t i, float f)
{
    void *to = (void *)(uintptr_t)x;

    if (dt == MT_F32)
        ((float *)to)[i] = f;
    else
        ((uint16_t *)to)[i] = dt == MT_BF16 ? mt_f32_to_bf16(f) : mt_f32_to_f16(f);
}

/* The same numbers for all who have the seed. */
static inline void fill_random(mt_dtype dt, void *x, int64_t n, uint64_t seed)
{
    for (int64_t i = 0; i < n; i++)
        if (dt == MT_I64)
            ((int64_t *)x)[i] = (int64_t)toy_random(&seed);
        else if (dt == MT_F32 || dt == MT_BF16 || dt == MT_F16)
            set(x, dt, i, ldexpf((float)(int32_t)(uint32_t)toy_random(&seed), -33 - (int)(i % 7)));
}

#endif
