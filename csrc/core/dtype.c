/* dtype.c — the list of element types as tables, and fp16 in integer arithmetic.
 *
 * fp16 conversions are written on bits, so they are the same on machines without F16C.
 */
#include "dtype.h"

#include "status.h"

typedef union f32_bits {
    float    f;
    uint32_t u;
} f32_bits;

size_t mt_dtype_bytes(mt_dtype dt)
{
#define MT_DTYPE_BYTES(name, bytes) bytes,
    static const size_t table[] = { MT_DTYPE_MAP(MT_DTYPE_BYTES) };
#undef MT_DTYPE_BYTES

    return (unsigned)dt < MT_DTYPE_COUNT ? table[dt] : 0;
}

#define NAME(name, bytes) #name,
#define TEXT(name, text, low) text,
MT_NAMES(mt_dtype_name, mt_dtype, MT_DTYPE_MAP(NAME))
MT_NAMES(mt_states_name, mt_states, MT_STATES_MAP(TEXT))

float mt_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 0x1fu;
    uint32_t fraction = h & 0x3ffu;
    f32_bits x;

    if (exponent == 0) {
        /* Zero or subnormal: fraction * 2^-24, exact in fp32. */
        x.f = (float)fraction * 0x1p-24f;
        x.u |= sign;
    } else if (exponent == 31) {
        /* Infinity, or a NaN made quiet as hardware does. */
        x.u = sign | 0x7f800000u | fraction << 13 | (fraction != 0 ? 0x400000u : 0);
    } else {
        x.u = sign | (exponent + 127 - 15) << 23 | fraction << 13;
    }
    return x.f;
}

/* value / 2^shift, to nearest, ties to even. 1 <= shift <= 31. */
static uint32_t shift_to_even(uint32_t value, unsigned shift)
{
    uint32_t half = 1u << (shift - 1);

    return (value + (half - 1) + ((value >> shift) & 1u)) >> shift;
}

uint16_t mt_f32_to_f16(float f)
{
    f32_bits x = { .f = f };
    uint32_t sign = (x.u >> 16) & 0x8000u;
    uint32_t magnitude = x.u & 0x7fffffffu;
    uint32_t half;

    if (magnitude > 0x7f800000u) {
        half = 0x7e00u;                             /* NaN */
    } else if (magnitude >= 0x477ff000u) {
        half = 0x7c00u;                             /* 65520, half way past the largest, and up */
    } else if (magnitude >= 0x38800000u) {
        /* 2^-14 and up: normal. The exponent is rebased first, so that a carry out of the
         * fraction grows it. */
        half = shift_to_even(magnitude - ((127u - 15u) << 23), 13);
    } else if (magnitude >= 0x33000000u) {
        /* 2^-25 and up: subnormal, a multiple of 2^-24; below 2^-25 everything is zero. */
        half = shift_to_even((magnitude & 0x7fffffu) | 0x800000u, 126 - (magnitude >> 23));
    } else {
        half = 0;
    }
    return (uint16_t)(sign | half);
}
