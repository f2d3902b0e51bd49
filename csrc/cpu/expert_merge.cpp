#include "../expert_merge.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "capability.h"
#include "parts.h"

namespace moe_parallel {
namespace {

// The rows of all matrices on so many columns stay in the L2 cache.
constexpr int64_t kColumns = 4096;

// dweights = the sums over all blocks of columns, in their order whatever the threads were.
template <class Sum>
void add_products(const std::vector<char>& products, int64_t blocks, int64_t size, void* dweights) {
  for (int64_t i = 0; i < size; ++i) {
    double sum = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      sum += reinterpret_cast<const Sum*>(products.data())[block * size + i];
    }
    static_cast<Sum*>(dweights)[i] = static_cast<Sum>(sum);
  }
}

}  // namespace

void run_on_cpu(const ExpertMerge& task) {
  advise_huge_pages(task.merged, task.merges * task.size * bytes_of(task.type));
  const int64_t blocks = (task.size + kColumns - 1) / kColumns;
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    kernels().expert_merge(task, begin * kColumns, std::min(end * kColumns, task.size));
  });
}

void run_on_cpu(const ExpertMergeBackward& task) {
  advise_huge_pages(task.dw, task.num_experts * task.size * bytes_of(task.type));
  const bool is_double = task.type == ScalarType::kFloat64;
  const int64_t size = task.merges * task.num_experts;
  const int64_t block_bytes = size * (is_double ? sizeof(double) : sizeof(float));
  const int64_t blocks = (task.size + kColumns - 1) / kColumns;
  std::vector<char> products(blocks * block_bytes);
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kColumns;
      kernels().expert_merge_backward(task, first, std::min(first + kColumns, task.size),
                                      products.data() + block * block_bytes);
    }
  });
  const auto add = is_double ? add_products<double> : add_products<float>;
  add(products, blocks, size, task.dweights);
}

}  // namespace moe_parallel
