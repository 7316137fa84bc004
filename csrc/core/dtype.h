/* dtype.h — element types, one list. Only the first four can be trained. */
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

#endif
