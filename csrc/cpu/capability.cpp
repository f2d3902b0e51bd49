#include "capability.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "processor.h"

namespace moe_parallel {

namespace portable {
extern const Kernels kKernels;
}
#ifdef __x86_64__
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}
#endif

namespace {

constexpr const char* kVariable = "MOE_PARALLEL_CPU";

// The capabilities of this processor, the best first.
std::vector<Capability> capabilities() {
  std::vector<Capability> all;
#ifdef __x86_64__
  const bool has_both = has_avx2() && has_avx512();
  if (has_both && __builtin_cpu_supports("avx512bf16")) {
    all.push_back({"avx512_bf16", avx512_bf16::kKernels});
  }
  if (has_both) all.push_back({"avx512", avx512::kKernels});
  if (has_avx2()) all.push_back({"avx2", avx2::kKernels});
#endif
  all.push_back({"portable", portable::kKernels});
  return all;
}

Capability choose() {
  const auto all = capabilities();
  const char* wish = std::getenv(kVariable);
  if (wish == nullptr || *wish == '\0') return all.front();
  std::string names;
  for (const auto& capability : all) {
    if (std::string(wish) == capability.name) return capability;
    names += (names.empty() ? "" : ", ") + std::string(capability.name);
  }
  throw std::invalid_argument(std::string(kVariable) + " is '" + wish + "': this processor has " +
                              names);
}

}  // namespace

const Capability& cpu_capability() {
  static const Capability chosen = choose();
  return chosen;
}

}  // namespace moe_parallel
