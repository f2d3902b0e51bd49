// All kernels as one capability compiles them. This file and those that it includes are compiled
// once for each, in a namespace of its own. They use nothing of the C++ library but what is
// inlined: of a function that several files emit the linker keeps one, and it must not be the
// AVX-512 one.
#pragma once

#include "../capability.h"
#include "expert_merge.h"
#include "norm_topk.h"
#include "permute.h"
#include "swiglu.h"
#include "unpermute.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

extern const Kernels kKernels = {
    .permute = permute,
    .unpermute = unpermute,
    .unpermute_backward = unpermute_backward,
    .swiglu = swiglu,
    .swiglu_backward = swiglu_backward,
    .group_norms = group_norms,
    .select_topk = select_topk,
    .norm_gradient = norm_gradient,
    .expert_merge = expert_merge,
    .expert_merge_backward = expert_merge_backward,
};

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
