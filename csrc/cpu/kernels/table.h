// The kernels of one capability. This file and the files that it includes are compiled once per
// capability, each time in a namespace of its own. They use only those functions of the C++ library
// that are inlined. If several files emit the same function, the linker keeps one of the copies,
// and that must not be the AVX-512 one.
#pragma once

#include "../capability.h"
#include "attention.h"
#include "block_product.h"
#include "expert_merge.h"
#include "norm_topk.h"
#include "permute.h"
#include "rms_norm.h"
#include "rotary.h"
#include "softmax.h"
#include "swiglu.h"
#include "unpermute.h"

namespace moe_parallel::MOE_PARALLEL_CAPABILITY {

extern const Kernels kKernels = {
    .permute = permute,
    .unpermute = unpermute,
    .unpermute_backward = unpermute_backward,
    .swiglu = swiglu,
    .swiglu_backward = swiglu_backward,
    .rms_norm = rms_norm,
    .rms_norm_backward = rms_norm_backward,
    .rotary = rotary,
    .transpose_words = transpose_words,
    .pair_rows = pair_rows,
    .softmax_sums = softmax_sums,
    .softmax_gradient = softmax_gradient,
    .attention_weights = attention_weights,
    .attention_output = attention_output,
    .attention_rows = attention_rows,
    .attention_dots = attention_dots,
    .attention_score_gradient = attention_score_gradient,
    .group_norms = group_norms,
    .select_topk = select_topk,
    .norm_gradient = norm_gradient,
    .expert_merge = expert_merge,
    .expert_merge_backward = expert_merge_backward,
};

}  // namespace moe_parallel::MOE_PARALLEL_CAPABILITY
