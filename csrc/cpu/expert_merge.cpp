#include "../expert_merge.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "loops.h"

namespace moe_parallel {
namespace {

constexpr int64_t kColumns = 2048;  // the sums of so many columns stay in the L1 cache

}  // namespace

void run_on_cpu(const ExpertMerge& task) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    const auto* weights = static_cast<const Sum*>(task.weights);
    const auto* w = static_cast<const Scalar*>(task.w);
    auto* merged = static_cast<Scalar*>(task.merged);
    const int64_t blocks = (task.size + kColumns - 1) / kColumns;
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      Sum sums[kColumns];
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * kColumns, columns = std::min(kColumns, task.size - first);
        for (int64_t p = 0; p < task.merges; ++p) {
          std::fill_n(sums, columns, Sum{0});
          for (int64_t e = 0; e < task.num_experts; ++e) {
            add_scaled(w + e * task.size + first, weights[p * task.num_experts + e], sums, columns);
          }
          round_to(sums, merged + p * task.size + first, columns);
        }
      }
    });
  });
}

void run_on_cpu(const ExpertMergeBackward& task) {
  with_scalar(task.type, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Sum = sum_t<Scalar>;
    const auto* dmerged = static_cast<const Scalar*>(task.dmerged);
    const auto* weights = static_cast<const Sum*>(task.weights);
    const auto* w = static_cast<const Scalar*>(task.w);
    auto* dw = static_cast<Scalar*>(task.dw);
    auto* dweights = static_cast<Sum*>(task.dweights);
    // An expert a task, whatever the number of threads: the order of every sum is fixed.
    at::parallel_for(0, task.num_experts, 1, [&](int64_t begin, int64_t end) {
      Sum sums[kColumns];
      std::vector<Sum> products(task.merges);
      for (int64_t e = begin; e < end; ++e) {
        std::fill(products.begin(), products.end(), Sum{0});
        for (int64_t first = 0; first < task.size; first += kColumns) {
          const int64_t columns = std::min(kColumns, task.size - first);
          std::fill_n(sums, columns, Sum{0});
          for (int64_t p = 0; p < task.merges; ++p) {
            const Scalar* d = dmerged + p * task.size + first;
            add_scaled(d, weights[p * task.num_experts + e], sums, columns);
            products[p] += dot(d, w + e * task.size + first, columns);
          }
          round_to(sums, dw + e * task.size + first, columns);
        }
        for (int64_t p = 0; p < task.merges; ++p) {
          dweights[p * task.num_experts + e] = products[p];
        }
      }
    });
  });
}

}  // namespace moe_parallel
