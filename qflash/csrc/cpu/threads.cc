#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "interrupt.h"
#include "qflash.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace qf {
namespace {

constexpr int32_t kMaxThreads = 1024;
// A worker that finds no job, or a caller that waits for the last worker, spins about this many pauses (some tens of
// microseconds) before it sleeps: back-to-back calls, as in decoding, then never pay for a wake-up.
constexpr int kSpins = 1000;
// How often a caller checks whether to stop.
constexpr int64_t kAskEveryMs = 50;

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_ms(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return int64_t(now.tv_sec) * 1000 + now.tv_nsec / 1000000;
}

// The cheapest clock available: some milliseconds more or less do not matter.
int64_t coarse_ms() {
#if defined(CLOCK_MONOTONIC_COARSE)
  return now_ms(CLOCK_MONOTONIC_COARSE);
#else
  return now_ms(CLOCK_MONOTONIC);
#endif
}

struct Job;
thread_local Interrupt* interrupt_of_thread = nullptr;
thread_local Job* job_of_thread = nullptr;  // the job that it is working for

// One parallel_for. Lives on the caller's stack; `wanted` and the list link belong to the pool's mutex.
struct Job {
  TaskFunction function;
  void* context;
  int64_t tasks;
  int32_t wanted;  // workers that may still join
  // The caller's rounding and treatment of denormals. A new thread inherits its creator's, and some frameworks change
  // theirs: bits must depend on the caller, not on which thread happened to start a worker.
  std::fenv_t float_mode;
  std::atomic<int64_t> next{0};
  std::atomic<int32_t> running{0};  // workers inside
  std::atomic<int> status{QF_OK};
  std::atomic<bool> stopped{false};  // interrupted, whatever else may fail afterwards
  Job* older = nullptr;

  void work() {
    Job* const outer = job_of_thread;  // non-null where the Interrupt of a working thread called the engine
    job_of_thread = this;
    for (bool first = true;; first = false) {
      const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) break;
      if (!first && interrupted()) break;
      const int result = function(context, task);
      if (result != QF_OK) fail(result);
    }
    job_of_thread = outer;
  }

  void fail(int result) {
    status.store(result, std::memory_order_relaxed);
    next.store(tasks, std::memory_order_relaxed);
  }

  void stop() {
    stopped.store(true, std::memory_order_relaxed);
    fail(QF_INTERRUPTED);
  }

  int result() const { return stopped.load(std::memory_order_relaxed) ? QF_INTERRUPTED : status.load(); }
};

// The answer of the thread's Interrupt, if it is time to ask. The caller must not hold anything that the callback
// needs.
bool asked_to_stop() {
  Interrupt* const interrupt = interrupt_of_thread;
  if (!interrupt) return false;
  const int64_t now = coarse_ms();
  const bool due = interrupt->next_ms != 0 && now >= interrupt->next_ms;
  if (interrupt->next_ms == 0) interrupt->next_ms = now + kAskEveryMs;
  if (!due) return false;
  const ScratchAside scratch;
  const bool stop = interrupt->asked_to_stop(interrupt->context);
  interrupt->next_ms = coarse_ms() + kAskEveryMs;
  return stop;
}

class Pool {
 public:
  int run(Job& job, int32_t threads) {
    job.wanted = threads - 1;
    std::fegetenv(&job.float_mode);
    pthread_mutex_lock(&mutex_);
    grow(job.wanted);
    job.older = jobs_;
    jobs_ = &job;
    open_.fetch_add(1, std::memory_order_release);
    if (sleepers_ > 0) pthread_cond_broadcast(&work_);
    pthread_mutex_unlock(&mutex_);

    job.work();

    pthread_mutex_lock(&mutex_);
    close(job);
    pthread_mutex_unlock(&mutex_);
    for (int spin = 0; job.running.load(std::memory_order_acquire) > 0; spin++) {
      if (spin < kSpins) {
        pause_cpu();
        continue;
      }
      pthread_mutex_lock(&mutex_);
      if (job.running.load(std::memory_order_acquire) > 0) wait_for_worker();
      pthread_mutex_unlock(&mutex_);
      if (!job.stopped.load(std::memory_order_relaxed) && asked_to_stop()) job.stop();
    }
    // A worker may still hold the mutex it announced its end under; it no longer touches the job.
    return job.result();
  }

 private:
  // Mutex held. Waits until a worker is done with a job, but not past the time to ask whether to stop.
  void wait_for_worker() {
    if (!interrupt_of_thread) {
      pthread_cond_wait(&done_, &mutex_);
      return;
    }
    const int64_t until = now_ms(CLOCK_REALTIME) + kAskEveryMs;  // the clock of condition variables
    const timespec deadline{time_t(until / 1000), long(until % 1000 * 1000000)};
    pthread_cond_timedwait(&done_, &mutex_, &deadline);
  }

  // Mutex held. Starts workers until there are `workers`; fewer when the system refuses.
  void grow(int32_t workers) {
    while (workers_ < workers) {
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
      pthread_t thread;
      const int error = pthread_create(&thread, nullptr, &Pool::worker, this);
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      if (error) return;
      pthread_detach(thread);
      workers_++;
    }
  }

  // Mutex held. Takes the job off the list, so that no more workers join.
  void close(Job& job) {
    for (Job** link = &jobs_; *link; link = &(*link)->older)
      if (*link == &job) {
        *link = job.older;
        open_.fetch_sub(1, std::memory_order_release);
        return;
      }
  }

  // Mutex held. Joins a job that still wants workers and returns it; NULL when there is none.
  Job* join_any() {
    for (Job* job = jobs_; job; job = job->older)
      if (job->wanted > 0 && job->next.load(std::memory_order_relaxed) < job->tasks) {
        job->running.fetch_add(1, std::memory_order_relaxed);
        if (--job->wanted == 0) close(*job);
        return job;
      }
    return nullptr;
  }

  static void* worker(void* pool) {
    static_cast<Pool*>(pool)->serve();
    return nullptr;
  }

  void serve() {
    while (true) {
      for (int spin = 0; spin < kSpins && open_.load(std::memory_order_acquire) == 0; spin++) pause_cpu();
      pthread_mutex_lock(&mutex_);
      Job* job = join_any();
      if (!job) {
        sleepers_++;
        while (!(job = join_any())) pthread_cond_wait(&work_, &mutex_);
        sleepers_--;
      }
      pthread_mutex_unlock(&mutex_);
      std::fesetenv(&job->float_mode);
      job->work();
      pthread_mutex_lock(&mutex_);
      if (job->running.fetch_sub(1, std::memory_order_acq_rel) == 1) pthread_cond_broadcast(&done_);
      pthread_mutex_unlock(&mutex_);
    }
  }

  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t work_ = PTHREAD_COND_INITIALIZER;
  pthread_cond_t done_ = PTHREAD_COND_INITIALIZER;
  Job* jobs_ = nullptr;
  std::atomic<int32_t> open_{0};  // jobs on the list
  int32_t workers_ = 0;
  int32_t sleepers_ = 0;
};

std::atomic<Pool*> the_pool{nullptr};

// The pool is never freed: its detached workers may outlive every destructor.
Pool* pool() {
  Pool* found = the_pool.load(std::memory_order_acquire);
  if (found) return found;
  Pool* made = new (std::nothrow) Pool;
  if (made && !the_pool.compare_exchange_strong(found, made)) {
    delete made;
    made = found;
  }
  return made;
}

// A forked child has none of the parent's threads: forget the pool and make a new one when it is needed.
void forget_pool() { the_pool.store(nullptr, std::memory_order_release); }

int32_t clamp_threads(int64_t n) { return n < 1 ? 1 : n > kMaxThreads ? kMaxThreads : int32_t(n); }

int32_t initial_threads() {
  pthread_atfork(nullptr, nullptr, &forget_pool);
  const char* asked = std::getenv("QFLASH_NUM_THREADS");
  if (asked && *asked) {
    char* end = nullptr;
    const long n = std::strtol(asked, &end, 10);
    if (*end == '\0' && n >= 1) return clamp_threads(n);
    // The module is being loaded: there is no caller yet that could take an error.
    std::fprintf(stderr, "qflash: QFLASH_NUM_THREADS is '%s'; allowed: 1 or more. Using every core.\n", asked);
  }
#if defined(__linux__)
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) return clamp_threads(CPU_COUNT(&mask));
#endif
  return clamp_threads(sysconf(_SC_NPROCESSORS_ONLN));
}

std::atomic<int32_t> default_threads{initial_threads()};

}  // namespace

int parallel_for(int64_t tasks, int32_t threads, TaskFunction function, void* context) {
  threads = resolve_threads(threads);
  if (threads > tasks) threads = tasks < 1 ? 1 : int32_t(tasks);
  Job job{function, context, tasks, 0, {}};
  Pool* workers = threads > 1 ? pool() : nullptr;
  if (workers) return workers->run(job, threads);
  job.work();
  return job.result();
}

Interrupt* exchange_interrupt(Interrupt* interrupt) {
  Interrupt* const before = interrupt_of_thread;
  interrupt_of_thread = interrupt;
  return before;
}

bool interrupted() {
  Job* const job = job_of_thread;
  if (!job) return false;
  if (!job->stopped.load(std::memory_order_relaxed) && asked_to_stop()) job->stop();
  return job->stopped.load(std::memory_order_relaxed);
}

int32_t resolve_threads(int32_t threads) {
  return threads < 1 ? default_threads.load(std::memory_order_relaxed) : clamp_threads(threads);
}

}  // namespace qf

extern "C" {
int32_t qf_cpu_default_threads(void) { return qf::default_threads.load(); }
void qf_cpu_set_default_threads(int32_t n) { qf::default_threads.store(qf::clamp_threads(n)); }
}
