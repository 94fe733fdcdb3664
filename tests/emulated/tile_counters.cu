// Which counter of hopper/tile_counter.cuh a launch gets.
#include "common/refusals.h"
#include "hopper/tile_counter.cuh"

QF_EXPORT int try_counter(void* stream, int capturing) {
  emulate::capturing = capturing;
  int counter = -2;
  const int error = qf::take_tile_counter(static_cast<cudaStream_t>(stream), counter);
  emulate::capturing = false;
  return error ? -3 : counter;
}
QF_EXPORT int stream_counters() { return qf::kStreamCounters; }
QF_EXPORT int all_counters() { return qf::kTileCounters; }
