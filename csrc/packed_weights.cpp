#include "packed_weights.h"

#include <ATen/Parallel.h>

#include "fused_gemm.h"
#include "launch.h"
#include "packed_product.h"

namespace moe_parallel {
namespace {

// The blocks of w[e], [I, O], for products with w[e] as their right factor: [E, I * O]. The columns
// are packed in `parts` parts of equal width, each of which is a right factor of its own. [E, 0]
// where products do not read packed weights: on CUDA, in other types than bf16, on other processors
// (packed_product.h).
at::Tensor pack_weights(const at::Tensor& w, int64_t parts) {
  check_dim("w", w, 3);
  const int64_t groups = w.size(0), depth = w.size(1), all = w.size(2);
  TORCH_CHECK_VALUE(parts > 0 && all % parts == 0, "w has ", all, " columns: ", parts,
                    " parts have no equal width");
  const int64_t columns = all / parts;
  if (!w.is_cpu() || !keeps_blocks(scalar_type_of("w", w), depth, columns)) {
    return w.new_empty({groups, 0});
  }
  const GroupedWeights dense = matrices_of(w) ? w : w.contiguous();
  auto blocks = w.new_empty({groups, depth * all});
  at::parallel_for(0, groups * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto part = dense.of_groups(i / parts, 1).part(i % parts, parts);
      pack_right_factor({scalar_type_of("w", w), *matrices_of(part), depth, columns},
                        static_cast<char*>(blocks.mutable_data_ptr()) +
                            i * depth * columns * bytes_of_element(w));
    }
  });
  return blocks;
}

}  // namespace
}  // namespace moe_parallel

MOE_PARALLEL_OPERATOR("pack_weights", "(Tensor w, int parts) -> Tensor", moe_parallel::pack_weights)
