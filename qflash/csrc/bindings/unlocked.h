// Releases the interpreter lock while an entry runs. On Python's main thread, where signal handlers run, entries of the
// CPU engine let them run, so Ctrl-C ends a long call.
#ifndef QFLASH_BINDINGS_UNLOCKED_H_
#define QFLASH_BINDINGS_UNLOCKED_H_

#include <pthread.h>
#include <pybind11/pybind11.h>

#include "interrupt.h"

namespace qflash {

// Whether this is Python's main thread. Determined once per thread; a forked child may have another main thread.
inline bool on_main_thread() {
  enum Answer { kUnknown, kYes, kNo };
  static thread_local Answer answer = kUnknown;
  static const int watching = pthread_atfork(nullptr, nullptr, [] { answer = kUnknown; });
  (void)watching;
  if (answer == kUnknown) {
    const pybind11::object main = pybind11::module_::import("threading").attr("main_thread")();
    answer = main.attr("ident").cast<unsigned long>() == PyThread_get_thread_ident() ? kYes : kNo;
  }
  return answer == kYes;
}

// Runs entry() without the lock. Throws what a signal handler raised meanwhile.
template <class Entry>
int run_unlocked(Entry entry) {
  struct Run {
    PyThreadState* state = nullptr;
    bool raised = false;

    static bool handle_signals(void* context) {
      Run& run = *static_cast<Run*>(context);
      if (run.raised) return true;
      PyEval_RestoreThread(run.state);
      run.raised = PyErr_CheckSignals() != 0;
      run.state = PyEval_SaveThread();
      return run.raised;
    }
  } run;
  qf::Interrupt interrupt{&Run::handle_signals, &run};
  qf::Interrupt* const outer = qf::exchange_interrupt(on_main_thread() ? &interrupt : nullptr);
  run.state = PyEval_SaveThread();
  const int status = entry();
  PyEval_RestoreThread(run.state);
  qf::exchange_interrupt(outer);
  if (run.raised) throw pybind11::error_already_set();
  return status;
}

}  // namespace qflash

#endif  // QFLASH_BINDINGS_UNLOCKED_H_
