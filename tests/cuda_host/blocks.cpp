// Runs the threads of a block as fibers, each until it waits for others.
#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cuda_runtime_api.h"

namespace cuda_host {
namespace {

constexpr std::size_t kStack = 1 << 16;

// Waiting threads may continue when the generation has changed.
struct Barrier {
  int size = 0, arrived = 0;
  uint64_t generation = 0;
};

struct Warp {
  Barrier barrier;
  // The values of the current exchange and of the previous one, which some lanes may not have read
  // yet.
  std::array<std::array<uint64_t, kWarp>, 2> given{};
};

// Runs a thread of one block after another. To switch, swapcontext() would call the kernel for the
// mask of signals each time, so it only creates a fiber; _longjmp() does not.
struct Fiber {
  jmp_buf place;
  std::unique_ptr<char[]> stack;  // null: not created
  const std::function<bool()>* waits_for = nullptr;
  int exchanges = 0;
  bool is_done = true;

  bool can_run() const { return !is_done && (waits_for == nullptr || (*waits_for)()); }
};

jmp_buf scheduler;
ucontext_t creator;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
Barrier block;
const std::function<void()>* body_of_fibers;
std::size_t shared_bytes_of_kernel;

Fiber& this_fiber() { return fibers[threadIdx.x]; }

void jump(jmp_buf& from, jmp_buf& to) {
  if (_setjmp(from) == 0) _longjmp(to, 1);
}

void run_fiber() {
  if (_setjmp(this_fiber().place) == 0) setcontext(&creator);
  while (true) {
    (*body_of_fibers)();
    expect_no_copies_under_way();
    Fiber& fiber = this_fiber();
    fiber.is_done = true;
    jump(fiber.place, scheduler);
  }
}

void create(unsigned thread) {
  char* stack = new char[kStack];
  fibers[thread].stack.reset(stack);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStack;
  makecontext(&context, run_fiber, 0);
  threadIdx.x = thread;
  swapcontext(&creator, &context);
}

void start(unsigned thread) {
  Fiber& fiber = fibers[thread];
  if (!fiber.stack) create(thread);
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
  wait_until([&barrier, since = barrier.generation] { return barrier.generation != since; });
}

// Runs a warp until all of its lanes wait for other warps. The warps are then as far apart as they
// can be, which reveals a warp that relies on another without waiting for it. Returns whether any
// lane ran.
bool run_warp(unsigned warp, unsigned& left) {
  bool any = false;
  for (bool again = true; again;) {
    again = false;
    for (unsigned i = warp * kWarp; i < (warp + 1) * kWarp; ++i) {
      if (!fibers[i].can_run()) continue;
      again = any = true;
      threadIdx.x = i;
      jump(scheduler, fibers[i].place);
      left -= fibers[i].is_done;
    }
  }
  return any;
}

// Copies arrive at a barrier only when nothing else can continue, that is, as late as possible.
// Every other block begins with its last warp.
void run_block(unsigned threads) {
  begin_block();
  for (unsigned thread = 0; thread < threads; ++thread) start(thread);
  const unsigned count = threads / kWarp;
  for (unsigned left = threads; left > 0;) {
    bool is_stuck = true;
    for (unsigned i = 0; i < count; ++i) {
      if (run_warp(blockIdx.x % 2 == 0 ? i : count - 1 - i, left)) is_stuck = false;
    }
    if (is_stuck && !deliver_a_copy()) {
      std::fputs("cuda_host: some threads of a block wait for others that ended\n", stderr);
      std::abort();
    }
  }
  expect_no_products_under_way();
}

}  // namespace

void run_blocks(dim3 blocks, dim3 threads, std::size_t shared_bytes,
                const std::function<void()>& body) {
  if (blocks.x == 0 || threads.x % kWarp != 0) {
    std::fputs("cuda_host: no blocks, or not whole warps\n", stderr);
    std::abort();
  }
  gridDim = blocks;
  blockDim = threads;
  body_of_fibers = &body;
  shared_bytes_of_kernel = shared_bytes;
  if (fibers.size() < threads.x) fibers.resize(threads.x);
  block = {.size = static_cast<int>(threads.x)};
  warps.assign(threads.x / kWarp, Warp{.barrier = {.size = kWarp}});
  for (blockIdx.x = 0; blockIdx.x < blocks.x; ++blockIdx.x) run_block(threads.x);
}

void wait_until(const std::function<bool()>& condition) {
  Fiber& fiber = this_fiber();
  fiber.waits_for = &condition;
  if (!condition()) jump(fiber.place, scheduler);
  fiber.waits_for = nullptr;
}

void wait_for_block() { wait(block); }
void wait_for_warp() { wait(warps[threadIdx.x / kWarp].barrier); }

std::size_t shared_bytes() { return shared_bytes_of_kernel; }

const std::array<uint64_t, kWarp>& exchange(uint64_t mine) {
  Warp& warp = warps[threadIdx.x / kWarp];
  auto& given = warp.given[this_fiber().exchanges++ % 2];
  given[lane()] = mine;
  wait(warp.barrier);
  return given;
}

int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

}  // namespace cuda_host
