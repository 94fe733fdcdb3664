// Settings and queries for the caller of an emulated library.
#pragma once

namespace emulate {

inline unsigned seed = 0;  // of the schedule of later launches
// Device d has d + 1 SMs. A library that remembers a device's properties thus stays correct when the caller requests
// another number of SMs.
constexpr int kDevices = 64;
inline int device = 2;

}  // namespace emulate

#define QF_EMULATE_EXPORT extern "C" __attribute__((visibility("default"), used))

// Later launches run in an order drawn from `seed`, on a device with `multiprocessors` SMs: 1 to 64. Returns 0, or 1 if
// no device has that many.
QF_EMULATE_EXPORT int qf_emulate_schedule(int seed, int multiprocessors);

// The error of the last launch; "" if there was none.
QF_EMULATE_EXPORT const char* qf_emulate_complaint();

// Later launches run in the time of trace.h, and are recorded; 0: in the order of `seed`, and are not.
QF_EMULATE_EXPORT void qf_emulate_trace(int on);

// The recorded spans, one per line: kind, launch, block, warp, begin, end, name, separated by tabs.
QF_EMULATE_EXPORT const char* qf_emulate_spans();
