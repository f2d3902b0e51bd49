#include "../expert_merge.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "cache_lines.h"
#include "capability.h"
#include "large_output.h"
#include "parts.h"

namespace moe_parallel {
namespace {

// The number of columns of one task. It does not depend on the number of threads, so that the order
// of every sum is fixed.
constexpr int64_t kColumns = 8 * kMergeColumns;

// Memory for packed rows and for the sums of products, each of at most a register.
CacheLines scratch_of(int64_t rows, int64_t products) {
  const int64_t of_rows = rows * kMergeStride * static_cast<int64_t>(sizeof(double));
  return CacheLines(of_rows + products * kCacheLine);
}

// Calls body(block, begin, end, scratch) for every block of columns.
template <class Body>
void for_each_block(int64_t size, int64_t rows, int64_t products, const Body& body) {
  const int64_t blocks = (size + kColumns - 1) / kColumns;
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    const auto scratch = scratch_of(rows, products);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kColumns;
      body(block, first, std::min(first + kColumns, size), scratch);
    }
  });
}

template <class Sum>
void run(const ExpertMergeBackward& task) {
  const int64_t num_products = task.merges * task.num_experts;
  const int64_t blocks = (task.size + kColumns - 1) / kColumns;
  std::vector<Sum> products(blocks * num_products);
  for_each_block(task.size, task.merges + task.num_experts, num_products,
                 [&](int64_t block, int64_t begin, int64_t end, void* scratch) {
                   kernels().expert_merge_backward(task, begin, end, scratch,
                                                   products.data() + block * num_products);
                 });
  for (int64_t i = 0; i < num_products; ++i) {
    double sum = 0;
    for (int64_t block = 0; block < blocks; ++block) sum += products[block * num_products + i];
    static_cast<Sum*>(task.dweights)[i] = static_cast<Sum>(sum);
  }
}

}  // namespace

void run_on_cpu(const ExpertMerge& task) {
  advise_huge_pages(task.merged, task.merges * task.size * bytes_of(task.type));
  for_each_block(task.size, task.num_experts, 0,
                 [&](int64_t, int64_t begin, int64_t end, void* scratch) {
                   kernels().expert_merge(task, begin, end, scratch);
                 });
}

void run_on_cpu(const ExpertMergeBackward& task) {
  advise_huge_pages(task.dw, task.num_experts * task.size * bytes_of(task.type));
  task.type == ScalarType::kFloat64 ? run<double>(task) : run<float>(task);
}

}  // namespace moe_parallel
