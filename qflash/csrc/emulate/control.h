// What the caller of an emulated library sets and asks.
#pragma once

namespace emulate {

inline unsigned seed = 0;  // of the schedule of the launches to come
// Device d has d + 1 multiprocessors. So a library that remembers what a device told it stays right when the caller
// asks for another number of them.
constexpr int kDevices = 64;
inline int device = 2;

}  // namespace emulate

#define QF_EMULATE_EXPORT extern "C" __attribute__((visibility("default"), used))

// Launches from here on run in an order drawn from `seed`, on a device of so many multiprocessors: 1 to 64. Returns 0,
// or 1 for a number of multiprocessors that no device has.
QF_EMULATE_EXPORT int qf_emulate_schedule(int seed, int multiprocessors);

// What went wrong in the last launch; "" where nothing did.
QF_EMULATE_EXPORT const char* qf_emulate_complaint();

// Launches from here on run in the time of trace.h, and are recorded; 0: as `seed` says, and are not.
QF_EMULATE_EXPORT void qf_emulate_trace(int on);

// What was recorded, a line each: kind, launch, block, warp, begin, end, name, with tabs between.
QF_EMULATE_EXPORT const char* qf_emulate_spans();
