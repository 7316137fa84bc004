// gate.cuh — activations and their slopes on CUDA: the formulas of gate.h.
#ifndef MT_GATE_CUH
#define MT_GATE_CUH

#include "glu.h"
#include <cuda_runtime.h>

namespace mt {

constexpr float SQRT1_2 = 0.707106781f, DENSITY = 0.398942280f;
constexpr float TANH_LINEAR = 1.595769122f, TANH_CUBE = 0.071354816f;

struct Value { float a, slope; };

// exp and 1/x by the special function unit: off by 2^-21 and less,
// which 16-bit results do not show.
template <bool Fast> __device__ inline float exp_(float x) { return Fast ? __expf(x) : expf(x); }
template <bool Fast> __device__ inline float inverse(float x)
{
    return Fast ? __fdividef(1.0f, x) : 1.0f / x;
}

template <bool Fast> __device__ inline Value swish(float x, float v, float dv)
{
    float e = exp_<Fast>(-fabsf(v)), r = inverse<Fast>(1.0f + e), er = e * r;
    float s = v >= 0 ? r : er, q = v >= 0 ? er : r;

    return { x * s, fmaf(x * (s * q), dv, s) };
}

template <bool Fast, int Act> __device__ inline Value activation(float x)
{
    if constexpr (Act == MT_SILU) {
        return swish<Fast>(x, x, 1.0f);
    } else if constexpr (Act == MT_GELU_TANH) {
        float square = fminf(x * x, 1e4f);

        return swish<Fast>(x, x * fmaf(TANH_CUBE, square, TANH_LINEAR),
                           fmaf(3 * TANH_CUBE, square, TANH_LINEAR));
    } else if constexpr (Act == MT_GELU) {
        float below = 0.5f * erfcf(-x * SQRT1_2);

        return { x * below, fmaf(x, DENSITY * exp_<Fast>(-0.5f * x * x), below) };
    } else {
        float inside = x > MT_CLAMP ? MT_CLAMP : x;
        Value g = swish<Fast>(inside, MT_CLAMP_SLOPE * inside, MT_CLAMP_SLOPE);

        return { g.a, x > MT_CLAMP ? 0.0f : g.slope };
    }
}

template <int Act> __device__ inline float factor(float up)
{
    if constexpr (Act != MT_CLAMPED)
        return up;
    return (up > MT_CLAMP ? MT_CLAMP : up < -MT_CLAMP ? -MT_CLAMP : up) + 1.0f;
}

} // namespace mt

#endif
