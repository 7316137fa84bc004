/* gate.h — private to csrc/ops: activations and their slopes on the host, as glu.h says. */
#ifndef MT_GATE_H
#define MT_GATE_H

#include "glu.h"
#include <math.h>

#define MT__SQRT1_2     0.707106781f       /* 1 / sqrt(2) */
#define MT__DENSITY     0.398942280f       /* 1 / sqrt(2 pi) */
#define MT__TANH_LINEAR 1.595769122f       /* 2 sqrt(2/pi) */
#define MT__TANH_CUBE   0.071354816f       /* that times 0.044715 */

typedef struct mt__gate {
    float a, slope;              /* a(x), a'(x) */
} mt__gate;

/* x s(v), and its slope for v' = dv/dx. s and 1-s come from e = exp(-|v|) <= 1,
 * so neither cancels. */
static inline mt__gate mt__swish(float x, float v, float dv)
{
    float e = expf(-fabsf(v)), r = 1.0f / (1.0f + e);
    float s = v >= 0 ? r : e * r, q = v >= 0 ? e * r : r;

    return (mt__gate){ x * s, s + x * (s * q) * dv };
}

static inline mt__gate mt__gelu_tanh(float x)
{
    /* Above 100, s(v)(1-s(v)) is 0 long since; the bound keeps 0 * infinity away. */
    float square = fminf(x * x, 1e4f);

    return mt__swish(x, x * (MT__TANH_LINEAR + MT__TANH_CUBE * square),
                     MT__TANH_LINEAR + 3 * MT__TANH_CUBE * square);
}

static inline mt__gate mt__gelu(float x)
{
    float below = 0.5f * erfcf(-x * MT__SQRT1_2);

    return (mt__gate){ x * below, below + x * (MT__DENSITY * expf(-0.5f * x * x)) };
}

static inline mt__gate mt__clamped(float x)
{
    float inside = x > MT_CLAMP ? MT_CLAMP : x;
    mt__gate g = mt__swish(inside, MT_CLAMP_SLOPE * inside, MT_CLAMP_SLOPE);

    if (x > MT_CLAMP)
        g.slope = 0;
    return g;
}

static inline mt__gate mt__activation(int act, float x)
{
    switch (act) {
    case MT_SILU:      return mt__swish(x, x, 1);
    case MT_GELU_TANH: return mt__gelu_tanh(x);
    case MT_GELU:      return mt__gelu(x);
    default:           return mt__clamped(x);
    }
}

/* u(up). */
static inline float mt__factor(int act, float up)
{
    if (act != MT_CLAMPED)
        return up;
    return (up > MT_CLAMP ? MT_CLAMP : up < -MT_CLAMP ? -MT_CLAMP : up) + 1.0f;
}

#endif
