// Scratch memory that threads keep from call to call.
#pragma once

#include <stddef.h>

namespace qf {

// This thread's scratch for one task: at least `bytes`, 64-byte aligned, contents arbitrary, kept for the thread's
// next task. A second call on the same thread may move it. NULL: no memory.
void* thread_scratch(size_t bytes);

// A second buffer of the same kind, for what one call shares with all its tasks. release_call_scratch() frees what is
// too large to keep.
void* call_scratch(size_t bytes);
void release_call_scratch();

// While one exists this thread has other scratch, none at first: for code that may call the engine in the middle of a
// call.
class ScratchAside {
 public:
  ScratchAside();
  ~ScratchAside();
  ScratchAside(const ScratchAside&) = delete;

 private:
  struct Kept {
    void* data;
    size_t bytes;
  };
  Kept task_, call_;
};

}  // namespace qf
