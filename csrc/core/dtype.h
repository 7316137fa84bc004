/* dtype.h — element types, one list, of which the first four can be trained; and how the moments
 * of an optimizer and the master of a weight are kept:
 *
 *   FP32       m and v in fp32; 16 bits continue a bf16 weight: an fp32 master, exactly
 *   8BIT       m and v in a byte each, with fp32 scales for every 128 elements;
 *              the master as before
 *   8BIT_LO8   the same, with 8 bits that continue a bf16 weight, rounded stochastically
 *   8BIT_SR    the same, without any: bf16 weights are rounded stochastically
 * fp32 and fp16 weights have fp32 masters in all of them. What the bytes say: optim/adam8_code.h.
 */
#ifndef MT_DTYPE_H
#define MT_DTYPE_H

#include <stddef.h>
#include <stdint.h>

/* name, bytes */
#define MT_DTYPE_MAP(X) \
    X(F32, 4) X(BF16, 2) X(F16, 2) X(F64, 8) \
    X(I64, 8) X(I32, 4) X(I16, 2) X(I8, 1) X(U8, 1) X(BOOL, 1) X(F8E4M3, 1) X(F8E5M2, 1)

#define MT_DTYPE_ENUM(name, bytes) MT_##name,
typedef enum mt_dtype { MT_DTYPE_MAP(MT_DTYPE_ENUM) MT_DTYPE_COUNT } mt_dtype;
#undef MT_DTYPE_ENUM

size_t      mt_dtype_bytes(mt_dtype dt);   /* 0 for a value outside the list */
const char *mt_dtype_name(mt_dtype dt);    /* "F32"; "?" outside the list */

/* bf16 <-> fp32: widening is exact; narrowing rounds to nearest, ties to even, as torch does. */
static inline float mt_bf16_to_f32(uint16_t b)
{
    union { uint32_t u; float f; } x = { .u = (uint32_t)b << 16 };
    return x.f;
}
static inline uint16_t mt_f32_to_bf16(float f)
{
    union { float f; uint32_t u; } x = { .f = f };
    if ((x.u & 0x7fffffffu) > 0x7f800000u)
        return 0x7fc0;                                  /* NaN */
    return (uint16_t)((x.u + 0x7fffu + ((x.u >> 16) & 1u)) >> 16);
}
float    mt_f16_to_f32(uint16_t h);
uint16_t mt_f32_to_f16(float f);           /* nearest, ties to even; overflow to infinity */

/* name, as users say it, bytes of a bf16 weight's low half */
#define MT_STATES_MAP(X) \
    X(FP32, "fp32", 2) X(8BIT, "8bit", 2) X(8BIT_LO8, "8bit-lo8", 1) X(8BIT_SR, "8bit-sr", 0)

#define MT_STATES_ENUM(name, text, low) MT_STATES_##name,
typedef enum mt_states { MT_STATES_MAP(MT_STATES_ENUM) MT_STATES_COUNT } mt_states;
#undef MT_STATES_ENUM

#define MT_STATES_GROUP 128              /* elements that share the scales of 8-bit moments */

const char *mt_states_name(mt_states s);            /* "8bit-sr"; "?" outside the list */

/* Bytes of one element of a bf16 weight's low half; 0 outside the list. */
static inline unsigned mt_states_low_bytes(mt_states s)
{
#define LOW(name, text, low) s == MT_STATES_##name ? low##u :
    return MT_STATES_MAP(LOW) 0u;
#undef LOW
}

/* Groups of n elements, the last one perhaps short. */
static inline int64_t mt_states_groups(int64_t n)
{
    return n / MT_STATES_GROUP + (n % MT_STATES_GROUP != 0);
}

#endif
