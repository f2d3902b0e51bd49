// The threads of a block as fibers, each run until it waits for others.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cuda_runtime_api.h"

namespace cuda_host {
namespace {

constexpr std::size_t kStack = 1 << 16;

// Those who wait may go on once the generation has changed.
struct Barrier {
  int size = 0, arrived = 0;
  uint64_t generation = 0;
};

struct Warp {
  Barrier barrier;
  // Of the exchange under way and the one before, which some lanes may not have read yet.
  std::array<std::array<uint64_t, kWarp>, 2> given{};
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  const Barrier* waits_for = nullptr;
  uint64_t since = 0;
  int exchanges = 0;
  bool is_done = true;

  bool can_run() const {
    return !is_done && (waits_for == nullptr || waits_for->generation != since);
  }
};

ucontext_t scheduler;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
Barrier block;
const std::function<void()>* body_of_fibers;

Fiber& this_fiber() { return fibers[threadIdx.x]; }

void run_fiber() {
  (*body_of_fibers)();
  this_fiber().is_done = true;
}

void start(Fiber& fiber) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = &scheduler;
  makecontext(&fiber.context, run_fiber, 0);
  fiber.waits_for = nullptr;
  fiber.exchanges = 0;
  fiber.is_done = false;
}

void wait(Barrier& barrier) {
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  Fiber& fiber = this_fiber();
  fiber.waits_for = &barrier;
  fiber.since = barrier.generation;
  swapcontext(&fiber.context, &scheduler);
  fiber.waits_for = nullptr;
}

void run_block(unsigned threads) {
  for (auto& fiber : fibers) start(fiber);
  for (unsigned left = threads; left > 0;) {
    bool is_stuck = true;
    for (unsigned i = 0; i < threads; ++i) {
      if (!fibers[i].can_run()) continue;
      is_stuck = false;
      threadIdx.x = i;
      swapcontext(&scheduler, &fibers[i].context);
      left -= fibers[i].is_done;
    }
    if (is_stuck) {
      std::fputs("cuda_host: some threads of a block wait for others that ended\n", stderr);
      std::abort();
    }
  }
}

}  // namespace

void run_blocks(dim3 blocks, dim3 threads, const std::function<void()>& body) {
  if (blocks.x == 0 || threads.x % kWarp != 0) {
    std::fputs("cuda_host: no blocks, or not whole warps\n", stderr);
    std::abort();
  }
  gridDim = blocks;
  blockDim = threads;
  body_of_fibers = &body;
  fibers.resize(threads.x);
  block = {.size = static_cast<int>(threads.x)};
  warps.assign(threads.x / kWarp, Warp{.barrier = {.size = kWarp}});
  for (blockIdx.x = 0; blockIdx.x < blocks.x; ++blockIdx.x) run_block(threads.x);
}

void wait_for_block() { wait(block); }
void wait_for_warp() { wait(warps[threadIdx.x / kWarp].barrier); }

std::array<uint64_t, kWarp> exchange(uint64_t mine) {
  Warp& warp = warps[threadIdx.x / kWarp];
  auto& given = warp.given[this_fiber().exchanges++ % 2];
  given[lane()] = mine;
  wait(warp.barrier);
  return given;
}

int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

}  // namespace cuda_host
