"""Realistic faults of the kernels in C++ and CUDA."""

from tests.mutants.fault import Fault

OF_CPU = "csrc/cpu/kernels"
OF_OPS = ("tests/ops",)

FAULTS_OF_KERNELS = [
    Fault(
        "C++: norms without their root",
        f"{OF_CPU}/norm_topk.h",
        "std::sqrt(sum_of_lanes<Sum>(squares))",
        "sum_of_lanes<Sum>(squares)",
        OF_OPS,
    ),
    Fault(
        "C++: ties go to the higher expert",
        f"{OF_CPU}/norm_topk.h",
        "own > order(chosen[place - 1])",
        "own >= order(chosen[place - 1])",
        OF_OPS,
    ),
    Fault(
        "C++: the bias is not ranked by",
        f"{OF_CPU}/norm_topk.h",
        "bias ? norms[e] + bias[e] : norms[e]",
        "norms[e]",
        OF_OPS,
    ),
    Fault(
        "C++: the gradient of a norm lacks its factor",
        f"{OF_CPU}/norm_topk.h",
        "factor * lanes.load(c + i)",
        "lanes.load(c + i)",
        OF_OPS,
    ),
    Fault(
        "C++: a row takes the choices of its token at other ranks along",
        "csrc/packed_rows.h",
        "if (number < 0 || number / ends.experts_there != destination) continue;",
        "if (number < 0) continue;",
        ("tests/ops/test_packed_rows.py", "tests/dispatch"),
    ),
    Fault(
        "C++: the first row is taken for an empty slot",
        f"{OF_CPU}/permute.h",
        "if (row < 0) continue;",
        "if (row <= 0) continue;",
        OF_OPS,
    ),
    Fault(
        "C++: the derivative of SiLU lacks a term",
        f"{OF_CPU}/swiglu.h",
        "sigmoid * (Sum{1} + g * (Sum{1} - sigmoid))",
        "sigmoid * (Sum{1} + g * sigmoid)",
        OF_OPS,
    ),
    Fault(
        "C++: a merge's product leaves out the last expert",
        f"{OF_CPU}/expert_merge.h",
        "for (; row < a.count; ++row) multiply_rows",
        "for (; row + 1 < a.count; ++row) multiply_rows",
        OF_OPS,
    ),
    Fault(
        "C++: a padded expert begins where the rows of the one before end",
        "csrc/cpu/routing_map.cpp",
        "first_row_of_expert += task.counts[expert]",
        "first_row_of_expert += chosen",
        OF_OPS,
    ),
    Fault(
        "C++: an expert counts choices beyond a fixed number of rows",
        "csrc/cpu/routing_map.cpp",
        "std::min(row, task.max_rows)",
        "row",
        OF_OPS,
    ),
    Fault(
        "C++: an expert without rows keeps what lay in its gradient",
        "csrc/grouped_gemm.cpp",
        "out_group.zero_();",
        "",
        OF_OPS,
    ),
    Fault(
        "C++: a gradient lies otherwise than its weight, so autograd copies it",
        "csrc/expert_rows.h",
        "at::empty_like(w)),",
        "w.new_empty(w.sizes())),",
        ("tests/library/test_transformers_experts.py",),
    ),
    Fault(
        "C++: the gradient of W_down is rounded after each tile of tokens",
        "csrc/norm_topk.cpp",
        "w.options().dtype(sum_type_of(w))",
        "w.options()",
        OF_OPS,
    ),
    Fault(
        "C++: the rows that round a product up keep what lay there",
        "csrc/expert_rows.h",
        "product_rows - num_rows).zero_();",
        "product_rows - num_rows);",
        OF_OPS,
    ),
    Fault(
        "C++: in 16 bits any number of parts of an expert round the sum of weight gradients",
        "csrc/expert_rows.h",
        "return x.element_size() < 4 ? std::min(parts, kMostParts) : parts;",
        "return parts;",
        OF_OPS,
    ),
    Fault(
        "C++: the gradient of x leaves out the part of W_p",
        "csrc/autonomous_experts.cpp",
        "transposed(*w_down), groups, /*accumulate=*/true);",
        "transposed(*w_down), groups, /*accumulate=*/false);",
        OF_OPS,
    ),
    Fault(
        "C++: a square of words is transposed with two quarters exchanged",
        f"{OF_CPU}/block_product.h",
        "_mm512_maskz_shuffle_i32x4(kFullMask, top_odd, end_odd, kEven)",
        "_mm512_maskz_shuffle_i32x4(kFullMask, top_odd, end_odd, kOdd)",
        OF_OPS,
    ),
    Fault(
        "C++: AVX2 stores halves of bf16 vectors in another order",
        f"{OF_CPU}/vectors.h",
        "_mm256_permute4x64_epi64(packed, 0b1000)",
        "_mm256_permute4x64_epi64(packed, 0b0010)",
        OF_OPS,
    ),
    Fault(
        "CUDA: equal choices of a warp take one place",
        "csrc/cuda/routing_map.cu",
        "counter[bin] + __popc(before)",
        "counter[bin]",
        ("tests/cuda_host",),
    ),
    Fault(
        "CUDA: a stage is filled again while the products that read it are under way",
        "csrc/cuda/norm_topk_hopper.cu",
        "    release(last);\n    last = stage;\n",
        "    release(stage);\n    last = stage;\n",
        ("tests/cuda_host/test_norm_topk_squares.py",),
    ),
]
