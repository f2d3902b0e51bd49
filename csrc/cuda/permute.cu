#include "../permute.h"
#include "scalar.cuh"

namespace moe_parallel {
namespace {

// One block a row; its threads copy the row's words.
template <class Word>
__global__ void permute_rows(Permute task, int64_t words) {
  const auto* x = static_cast<const Word*>(task.x);
  auto* y = static_cast<Word*>(task.y);
  for (int64_t row = blockIdx.x; row < task.rows; row += gridDim.x) {
    const int64_t slot = task.slots[row];
    Word* target = y + row * words;
    if (slot < 0) {
      for (int64_t i = threadIdx.x; i < words; i += blockDim.x) target[i] = Word{};
      continue;
    }
    const Word* source = x + slot / task.choices * words;
    for (int64_t i = threadIdx.x; i < words; i += blockDim.x) target[i] = source[i];
  }
}

bool divides_into(const Permute& task, int64_t word_bytes) {
  const auto address = reinterpret_cast<uintptr_t>(task.x) | reinterpret_cast<uintptr_t>(task.y);
  return task.row_bytes % word_bytes == 0 && address % word_bytes == 0;
}

template <class Word>
void launch_words(const Permute& task, cudaStream_t stream) {
  const int64_t words = task.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t threads = std::min<int64_t>((words + kWarp - 1) / kWarp * kWarp, kThreads);
  permute_rows<Word>
      <<<blocks_for(task.rows, 1), static_cast<int>(threads), 0, stream>>>(task, words);
}

}  // namespace

void run_on_cuda(const Permute& task, cudaStream_t stream) {
  if (task.rows == 0 || task.row_bytes == 0) return;
  if (divides_into(task, sizeof(uint4))) {
    launch_words<uint4>(task, stream);
  } else if (divides_into(task, sizeof(uint32_t))) {
    launch_words<uint32_t>(task, stream);
  } else {
    launch_words<uint16_t>(task, stream);  // every element type has an even size
  }
}

}  // namespace moe_parallel
