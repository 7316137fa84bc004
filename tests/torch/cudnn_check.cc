// cudnn_check.cc — proves csrc/ops/dnn.h against NVIDIA's header.
//
//   g++ -std=c++20 -fsyntax-only -I <cuda>/include -I <cudnn>/include tests/torch/cudnn_check.cc
//
// A prototype or number that differs breaks this file and not a user's stack.
#include <cudnn.h>

#include "../../csrc/ops/dnn.h"

#include <type_traits>

#define SAME(ret, name, args) \
    static_assert(std::is_same_v<ret(*) args, decltype(&::name)>, #name " differs from NVIDIA's");
MT_DNN_MAP(SAME)

#define EQUAL(ours, theirs, value) \
    static_assert(int(MT_DNN_##ours) == int(CUDNN_##theirs), #theirs " differs");
MT_DNN_NUMBERS(EQUAL)

static_assert(sizeof(cudnnStatus_t) == sizeof(int) &&
              sizeof(cudnnBackendAttributeName_t) == sizeof(int));
static_assert(sizeof(cudnnPointwiseMode_t) == sizeof(int) &&
              sizeof(cudnnBackendHeurMode_t) == sizeof(int));
static_assert(sizeof(cudnnDataType_t) == sizeof(int) &&
              sizeof(cudnnReduceTensorOp_t) == sizeof(int));
