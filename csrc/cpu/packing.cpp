#include "../packing.h"

#include "capability.h"

namespace moe_parallel {

void transpose_words(const TransposeWords& task) { kernels().transpose_words(task); }
void pair_rows(const PairRows& task) { kernels().pair_rows(task); }

}  // namespace moe_parallel
