// Scratch memory of a thread.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "../alignment.h"

namespace moe_parallel {

// Memory that begins on a cache line. Its content is not set.
class CacheLines {
 public:
  explicit CacheLines(int64_t bytes)
      : memory_(std::aligned_alloc(kCacheLine, (bytes / kCacheLine + 1) * kCacheLine)) {
    TORCH_CHECK(memory_ != nullptr, "no memory for ", bytes, " bytes");
  }
  char* at(int64_t bytes) const { return static_cast<char*>(memory_.get()) + bytes; }
  operator void*() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
};

}  // namespace moe_parallel
