/* torch_shim.h — what we use of libtorch's stable C shim, written by hand.
 *
 * torch is a run-time guest: the build sees no header of it, and the functions are looked up in
 * the libtorch that Python has imported. tests/torch/abi_check.cc includes PyTorch's own headers
 * before this file and proves every prototype of the list by static_assert.
 *
 * Ownership: tensors in a boxed kernel's stack belong to the kernel, which deletes them; what it
 * puts there instead belongs to torch. An optional argument is NULL or a pointer to a slot made by
 * torch, deleted by torch_delete_stable_ivalue (2.13 on) or operator delete (before: the shim's own
 * headers did that inline).
 */
#ifndef MT_TORCH_SHIM_H
#define MT_TORCH_SHIM_H

#include <stdbool.h>
#include <stdint.h>

#ifndef AOTI_TORCH_SHIM      /* PyTorch's header, in the check only, has its own */
typedef struct AtenTensorOpaque  *AtenTensorHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;
typedef struct CUDAGuardOpaque   *CUDAGuardHandle;
typedef uint64_t StableIValue;
typedef int32_t  AOTITorchError;      /* 0: ok */
#endif

typedef void (*mt_boxed_fn)(StableIValue *stack, uint64_t n_args, uint64_t n_returns);

/* returns, name, arguments. In libtorch_cpu of torch 2.10 and later. */
#define MT_SHIM_MAP(X)                                                                            \
    X(void, aoti_torch_check, (bool, const char *, const char *, uint32_t, const char *))         \
    X(AOTITorchError, aoti_torch_library_init_def,                                                \
      (const char *, const char *, uint32_t, TorchLibraryHandle *))                               \
    X(AOTITorchError, aoti_torch_library_init_impl,                                               \
      (const char *, const char *, const char *, uint32_t, TorchLibraryHandle *))                 \
    X(AOTITorchError, aoti_torch_library_def, (TorchLibraryHandle, const char *))                 \
    X(AOTITorchError, torch_library_impl,                                                         \
      (TorchLibraryHandle, const char *, mt_boxed_fn, uint64_t))                                  \
    X(AOTITorchError, aoti_torch_delete_library_object, (TorchLibraryHandle))                     \
    X(AOTITorchError, aoti_torch_delete_tensor_object, (AtenTensorHandle))                        \
    X(AOTITorchError, aoti_torch_empty_strided,                                                   \
      (int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, AtenTensorHandle *)) \
    X(AOTITorchError, torch_get_mutable_data_ptr, (AtenTensorHandle, void **))                    \
    X(AOTITorchError, torch_get_const_data_ptr, (AtenTensorHandle, const void **))                \
    X(AOTITorchError, torch_get_num_threads, (uint32_t *))                                        \
    X(AOTITorchError, aoti_torch_get_numel, (AtenTensorHandle, int64_t *))                        \
    X(AOTITorchError, aoti_torch_get_dim, (AtenTensorHandle, int64_t *))                          \
    X(AOTITorchError, aoti_torch_get_sizes, (AtenTensorHandle, int64_t **))                       \
    X(AOTITorchError, aoti_torch_get_strides, (AtenTensorHandle, int64_t **))                     \
    X(AOTITorchError, aoti_torch_get_dtype, (AtenTensorHandle, int32_t *))                        \
    X(AOTITorchError, aoti_torch_get_device_type, (AtenTensorHandle, int32_t *))                  \
    X(AOTITorchError, aoti_torch_get_device_index, (AtenTensorHandle, int32_t *))                 \
    X(AOTITorchError, aoti_torch_is_contiguous, (AtenTensorHandle, bool *))                       \
    X(int32_t, aoti_torch_dtype_float32, (void))                                                  \
    X(int32_t, aoti_torch_dtype_bfloat16, (void))                                                 \
    X(int32_t, aoti_torch_dtype_float16, (void))                                                  \
    X(int32_t, aoti_torch_dtype_float64, (void))                                                  \
    X(int32_t, aoti_torch_dtype_int64, (void))                                                    \
    X(int32_t, aoti_torch_dtype_int32, (void))                                                    \
    X(int32_t, aoti_torch_dtype_int16, (void))                                                    \
    X(int32_t, aoti_torch_dtype_int8, (void))                                                     \
    X(int32_t, aoti_torch_dtype_uint8, (void))                                                    \
    X(int32_t, aoti_torch_dtype_bool, (void))                                                     \
    X(int32_t, aoti_torch_dtype_float8_e4m3fn, (void))

/* There in some builds only; NULL where they are not. */
#define MT_SHIM_DELETE_MAP(X) \
    X(AOTITorchError, torch_delete_stable_ivalue, (StableIValue *))      /* since 2.13 */
#define MT_SHIM_CUDA_MAP(X)   /* in libtorch_cuda */ \
    X(AOTITorchError, aoti_torch_get_current_cuda_stream, (int32_t, void **)) \
    X(AOTITorchError, aoti_torch_create_cuda_guard, (int32_t, CUDAGuardHandle *)) \
    X(AOTITorchError, aoti_torch_delete_cuda_guard, (CUDAGuardHandle))

#define MT_SHIM_MEMBER(ret, name, args) ret (*name) args;
typedef struct mt_shim {
    MT_SHIM_MAP(MT_SHIM_MEMBER)
    MT_SHIM_DELETE_MAP(MT_SHIM_MEMBER)
    MT_SHIM_CUDA_MAP(MT_SHIM_MEMBER)
    void (*operator_delete)(void *);
} mt_shim;
#undef MT_SHIM_MEMBER

/* The feature level our calls are written against: torch 2.10. */
#define MT_SHIM_VERSION ((UINT64_C(2) << 56) | (UINT64_C(10) << 48))

#endif
