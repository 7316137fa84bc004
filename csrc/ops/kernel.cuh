// kernel.cuh — what kernel files share: a launch in the right context, element types, packs of 16 bytes.
//
// For .cu files only; everything is in namespace mt. Kernels compute in fp32: widen() on the way in,
// narrow<T>() (to nearest, ties to even) on the way out.
#ifndef MT_KERNEL_CUH
#define MT_KERNEL_CUH

#include "../core/dtype.h"
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

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

        ok = context_of != nullptr && push != nullptr && context_of(stream, &context) == CUDA_SUCCESS
          && push(context) == CUDA_SUCCESS;
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
template <> __device__ inline float         narrow<float>(float x)         { return x; }
template <> __device__ inline __half        narrow<__half>(float x)        { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// W elements that are loaded and stored as one; W * sizeof(T) is 16 in vector code.
template <typename T, int W> struct alignas(sizeof(T) * W) pack { T x[W]; };

inline bool aligned16(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

} // namespace mt

#endif
