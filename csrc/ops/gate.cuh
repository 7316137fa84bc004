// gate.cuh — activations and their slopes on CUDA: the formulas of gate.h.
#ifndef MT_GATE_CUH
#define MT_GATE_CUH

#include "glu.h"
#include "kernel.cuh"

namespace mt {

constexpr float SQRT1_2 = 0.707106781f, DENSITY = 0.398942280f;
constexpr float TANH_LINEAR = 1.595769122f, TANH_CUBE = 0.071354816f;

struct Value { float a, slope; };

// QUICK: exp and 1/x by the special function unit, off by 2^-21 and less, which 16-bit results do
// not show. FLUSHED: and an exp below 2^-126 is 0; others have QUICK's bits.
enum { CAREFUL, QUICK, FLUSHED };

template <int Fast> __device__ inline float exp_(float x)
{
    if constexpr (Fast == FLUSHED) {
        float y;

        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.442695041f));
        return y;
    }
    return Fast ? __expf(x) : expf(x);
}

// x is 1 to 2, or NaN.
template <int Fast> __device__ inline float inverse(float x)
{
    if constexpr (Fast == FLUSHED) {
        float y;

        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }
    return Fast ? __fdividef(1.0f, x) : 1.0f / x;
}

template <int Fast> __device__ inline Value swish(float x, float v, float dv)
{
    float e = exp_<Fast>(-fabsf(v)), r = inverse<Fast>(1.0f + e), er = e * r;
    float s = v >= 0 ? r : er;

    return { x * s, fmaf(x * (r * er), dv, s) };
}

template <int Fast, int Act> __device__ inline Value activation(float x)
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

struct Gradients { float dgate, dup, h; };

// glu.h's for one element, not rounded yet. a: v.a, rounded to the type.
template <int Act> __device__ inline Gradients gradients(float dh, Value v, float a, float up)
{
    const float u = factor<Act>(up);
    const bool  cut = Act == MT_CLAMPED && fabsf(up) > MT_CLAMP;

    return { dh * u * v.slope, cut ? 0.0f : dh * v.a, a * u };
}

} // namespace mt

#endif
