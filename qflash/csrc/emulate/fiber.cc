#include "emulate/fiber.h"

namespace emulate {

Fiber fibers[kMostThreads];
void (*body)(const void*);
const void* body_arguments;
unsigned first_block;

void wait_for(Waits what) {
  Fiber& fiber = self();
  fiber.waits = what;
  observe(Event::kWaits, int(what));
  if (!_setjmp(fiber.place)) _longjmp(scheduler, 1);
}

void wait_for(const Condition& condition) {
  if (!timed && condition.happened(condition.object, condition.argument)) return;
  self().condition = condition;
  wait_for(Waits::kCondition);
}

bool block_is_done(int rank) {
  for (int t = rank * block_threads; t < (rank + 1) * block_threads; ++t)
    if (fibers[t].waits != Waits::kDone) return false;
  return true;
}

static void fiber_main() {
  for (;;) {
    body(body_arguments);
    wait_for(Waits::kDone);
  }
}

void resume(int thread) {
  Fiber& fiber = fibers[thread];
  fiber_now = thread;
  threadIdx.x = unsigned(thread % block_threads);
  blockIdx.x = first_block + unsigned(thread / block_threads);
  ++turns;
  observe(Event::kRuns, 0);
  if (_setjmp(scheduler)) {
    running = false;
    return;
  }
  running = true;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, fiber_main, 0);
  setcontext(&context);
}

}  // namespace emulate
