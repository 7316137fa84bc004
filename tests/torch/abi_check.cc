// abi_check.cc — proves csrc/bind/torch_shim.h against the headers of the installed PyTorch.
//
//   g++ -std=c++20 -fsyntax-only -I <torch>/include tests/torch/abi_check.cc
//
// Every hand-written prototype must be PyTorch's own type, so a change there breaks this file and
// not a user's stack. Functions newer than the installed headers are left out.
#define USE_CUDA            // shows the CUDA functions of shim.h; no header of CUDA is included
#include <torch/csrc/stable/c/shim.h>

#include "../../csrc/bind/torch_shim.h"

#include <type_traits>

#define SAME(ret, name, args) \
    static_assert(std::is_same_v<ret(*) args, decltype(&::name)>, #name " differs from PyTorch's");

MT_SHIM_MAP(SAME)
MT_SHIM_CUDA_MAP(SAME)
#if TORCH_ABI_VERSION >= TORCH_VERSION_2_10_0 && defined(TORCH_VERSION_2_13_0)
#if TORCH_ABI_VERSION >= TORCH_VERSION_2_13_0
MT_SHIM_DELETE_MAP(SAME)
#endif
#endif

static_assert(MT_SHIM_VERSION == TORCH_VERSION_2_10_0, "the feature level is torch 2.10");
static_assert(sizeof(StableIValue) == sizeof(double), "boxed floats are doubles in 8 bytes");
