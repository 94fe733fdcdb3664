// Catches threads that would crash or hang the process: by an access outside all memory, or by running forever. The
// thread ends instead, and the launch fails.
#pragma once

#include <signal.h>
#include <sys/time.h>

#include <cstdio>

#include "emulate/complaint.h"

namespace emulate {

// Catches both during its lifetime. It cannot detect a wrong access that hits other memory of the process.
class Guard {
 public:
  Guard() {
    stack_t stack{};
    stack.ss_sp = stack_;  // a thread may have overflowed its own
    stack.ss_size = sizeof stack_;
    sigaltstack(&stack, &before_.stack);
    struct sigaction action{};
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // handlers leave by longjmp
    action.sa_sigaction = left_memory;
    sigaction(SIGSEGV, &action, &before_.segv);
    action.sa_sigaction = time_passed;
    action.sa_flags |= SA_RESTART;
    sigaction(SIGVTALRM, &action, &before_.alarm);
    seen_ = 0, times_seen_ = 0;
    const itimerval tick = {{0, kTickMicroseconds}, {0, kTickMicroseconds}};  // of the process's CPU time
    setitimer(ITIMER_VIRTUAL, &tick, &before_.timer);
  }
  ~Guard() {
    setitimer(ITIMER_VIRTUAL, &before_.timer, nullptr);
    sigaction(SIGVTALRM, &before_.alarm, nullptr);
    sigaction(SIGSEGV, &before_.segv, nullptr);
    sigaltstack(&before_.stack, nullptr);
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  static constexpr int kTickMicroseconds = 250'000;
  static constexpr int kMostTicks = 4;  // that a thread runs without a turn of any other

  static void end_thread(const std::string& what) {
    complain("thread " + std::to_string(threadIdx.x) + " of block " + std::to_string(blockIdx.x) + ": " + what);
    self().waits = Waits::kForGood;
    _longjmp(scheduler, 1);
  }
  static void left_memory(int, siginfo_t* info, void*) {
    if (!running) {  // the emulator's own fault, for the previous handler
      sigaction(SIGSEGV, &before_.segv, nullptr);
      return;
    }
    char address[32];
    snprintf(address, sizeof address, "%p", info->si_addr);
    end_thread(std::string("an access outside all memory, at address ") + address);
  }
  static void time_passed(int, siginfo_t*, void*) {
    times_seen_ = turns == seen_ ? times_seen_ + 1 : 0;
    seen_ = turns;
    if (running && times_seen_ >= kMostTicks) end_thread("it goes on for ever, and waits for nobody");
  }

  struct Before {
    stack_t stack;
    struct sigaction segv, alarm;
    itimerval timer;
  };
  inline static Before before_;
  inline static uint64_t seen_;  // turns
  inline static int times_seen_;
  alignas(16) inline static char stack_[64 * 1024];
};

}  // namespace emulate
