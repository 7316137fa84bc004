// kernel.cuh — what kernel files share: a launch in the right context, element types,
// packs of 16 bytes.
//
// For .cu files only; everything is in namespace mt. Kernels compute in fp32: widen() on the way
// in, narrow<T>() (to nearest, ties to even) on the way out.
#ifndef MT_KERNEL_CUH
#define MT_KERNEL_CUH

#include "../core/dtype.h"
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <type_traits>

namespace mt {

constexpr int WARP = 32;

/* ---- the host's side of a launch ---- */

inline void *driver(const char *name)
{
    void *p = nullptr;
    cudaDriverEntryPointQueryResult found;

    if (cudaGetDriverEntryPointByVersion(name, &p, 12000, cudaEnableDefault, &found) != cudaSuccess)
        p = nullptr;
    (void)cudaGetLastError();
    return p;
}

// A launch needs the stream's context to be the thread's current one. Which that is is the
// caller's (torch's) affair, so ours is pushed and popped; see dev_cuda.c.
class Current {
public:
    explicit Current(cudaStream_t stream)
    {
        static const auto context_of = reinterpret_cast<CUresult (*)(CUstream, CUcontext *)>(
            driver("cuStreamGetCtx"));
        static const auto push = reinterpret_cast<CUresult (*)(CUcontext)>(
            driver("cuCtxPushCurrent"));
        CUcontext context;

        ok = context_of != nullptr && push != nullptr &&
             context_of(stream, &context) == CUDA_SUCCESS && push(context) == CUDA_SUCCESS;
    }
    ~Current()
    {
        static const auto pop = reinterpret_cast<CUresult (*)(CUcontext *)>(
            driver("cuCtxPopCurrent"));
        CUcontext context;

        if (ok && pop != nullptr)
            pop(&context);
    }
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;

    bool ok;
};

constexpr const char *NO_CONTEXT = "the stream's context cannot be made current";

// What went wrong with the launches since the last call; nullptr: nothing.
inline const char *launch_error()
{
    cudaError_t error = cudaGetLastError();

    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

/* ---- elements ---- */

__device__ inline float widen(float x)         { return x; }
__device__ inline float widen(__half x)        { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> __device__ inline T narrow(float x);
template <> __device__ inline float narrow<float>(float x) { return x; }
template <> __device__ inline __half narrow<__half>(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x)
{
    return __float2bfloat16_rn(x);
}

// W elements that are loaded and stored as one; W * sizeof(T) is 16 in vector code.
template <typename T, int W> struct alignas(sizeof(T) * W) pack { T x[W]; };

// 16 bytes of T as four registers, for kernels that keep rows in them: the compiler gives each
// 16-bit element of a pack a register of its own.
template <typename T> struct alignas(16) vec {
    static constexpr int N = 16 / sizeof(T);
    unsigned u[4];
};

template <typename T> __device__ inline float element(const vec<T> &v, int i);
template <> __device__ inline float element(const vec<float> &v, int i)
{
    return __uint_as_float(v.u[i]);
}
template <> __device__ inline float element(const vec<__nv_bfloat16> &v, int i)
{
    return __uint_as_float(i % 2 ? v.u[i / 2] & 0xffff0000u : v.u[i / 2] << 16);
}
template <> __device__ inline float element(const vec<__half> &v, int i)
{
    const unsigned u = v.u[i / 2];
    return __half2float(__ushort_as_half((unsigned short)(i % 2 ? u >> 16 : u & 0xffffu)));
}

template <typename T> __device__ inline vec<T> rounded(const float (&x)[16 / sizeof(T)])
{
    union { vec<T> v; __nv_bfloat162 b[4]; __half2 h[4]; float f[4]; } to = {};

    for (int i = 0; i < 4; i++)
        if constexpr (sizeof(T) == 4)
            to.f[i] = x[i];
        else if constexpr (std::is_same_v<T, __half>)
            to.h[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        else
            to.b[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    return to.v;
}

template <typename T> __device__ inline vec<T> load_vec(const T *p)
{
    return *reinterpret_cast<const vec<T> *>(p);
}
template <typename T> __device__ inline void store_vec(T *p, const vec<T> &v)
{
    *reinterpret_cast<vec<T> *>(p) = v;
}

inline bool aligned16(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

} // namespace mt

#endif
