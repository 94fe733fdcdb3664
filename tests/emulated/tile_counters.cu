// Which counter of hopper/tile_counter.cuh a launch gets, or which counters of a hundred. capture: 0, or an id.
#include "common/refusals.h"
#include "hopper/tile_counter.cuh"

QF_EXPORT int try_counter(void* stream, int capture) {
  emulate::capture = capture;
  int counter = -2;
  const int error = qf::take_tile_counter(static_cast<cudaStream_t>(stream), counter);
  emulate::capture = 0;
  return error ? -3 : counter;
}
QF_EXPORT int try_counters(void* stream, int capture, int wanted) {
  emulate::capture = capture;
  int first = -2;
  struct Uses;
  const int error = qf::take_counters<Uses, 4, 10, 100>(static_cast<cudaStream_t>(stream), wanted, first);
  emulate::capture = 0;
  return error ? -3 : first;
}
QF_EXPORT int stream_counters() { return qf::kStreamCounters; }
QF_EXPORT int all_counters() { return qf::kTileCounters; }
