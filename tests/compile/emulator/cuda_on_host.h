// Enough CUDA to run qflash's device code on the host: g++ reads this header before a kernel's.
//
// A block is run by one fiber per thread. A fiber runs until it meets its warp or its block; when all of them have,
// they go on. Warps, and lanes within a warp, take turns in an order drawn from a seed, so that code which relies on an
// order it did not ask for gives different bits for different seeds. Shared memory starts as NaN. Fibers that wait for
// something that cannot happen (a barrier some thread skips) are reported, not waited for. Asynchronous copies arrive
// when they are waited for and not before. Shared memory is `s_memory` (dynamic); static __shared__ is not emulated.
// What Hopper adds is in hopper_on_host.h.
#pragma once

#define QF_EMULATOR
#undef _FORTIFY_SOURCE  // it forbids longjmp to another stack, which is how fibers take turns

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;

struct Index {
  unsigned x, y = 0, z = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;
alignas(1024) float4 s_memory[256 * 1024 / sizeof(float4)];

namespace host {

enum class Waits { kNot, kWarp, kShuffle, kBlock, kEvent, kForGood, kDone };

// Something besides its warp or its block that a thread waits for.
struct Event {
  bool (*happened)(const void* object, unsigned argument) = nullptr;
  std::string (*name)(const void* object, unsigned argument) = nullptr;
  const void* object = nullptr;
  unsigned argument = 0;
};

// What a generation of GPUs adds to a block.
struct Extension {
  virtual void begin(int threads, std::mt19937& order) = 0;
  virtual bool idle() = 0;  // every thread waits: does something happen now?
  virtual void end() = 0;
};

struct Copy {
  void* to;
  const void* from;
  int bytes;
  bool valid;
};

struct Fiber {
  jmp_buf place;  // where it waits; ucontext's own switch asks the kernel for a signal mask each time
  std::unique_ptr<char[]> stack;
  bool started = false;  // a fiber that is done with one block takes up the next
  Waits waits;
  Event event;
  bool slow;
  unsigned gathers;
  std::vector<Copy> issued;               // since the last commit
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
};

constexpr int kStackBytes = 256 * 1024;
constexpr unsigned kMostPatience = 64;  // turns for which somebody is slow
inline Fiber fibers[1024];
inline jmp_buf scheduler;
inline std::function<void()> body;
constexpr int kExchangeBytes = 64;
alignas(kExchangeBytes) inline char exchanged[2][1024][kExchangeBytes];  // what threads show the others of their warp
inline int or_sum, or_result;
inline Extension* extension = nullptr;
inline std::string complaint;  // the first thing that went wrong
// Libraries of several kernels may be open, which share what is inline here: each has an s_memory, and this is the one
// in use.
inline char* shared_base;
inline int shared_size;

inline void wait_for(Waits what) {
  Fiber& self = fibers[threadIdx.x];
  self.waits = what;
  if (!_setjmp(self.place)) _longjmp(scheduler, 1);
}

inline void wait_for(const Event& event) {
  if (event.happened(event.object, event.argument)) return;
  fibers[threadIdx.x].event = event;
  wait_for(Waits::kEvent);
}

inline void complain(const std::string& what) {
  if (complaint.empty()) complaint = what;
}

// This thread did what a GPU forbids: it goes no further.
inline void fail(const std::string& what) {
  complain("thread " + std::to_string(threadIdx.x) + " of block " + std::to_string(blockIdx.x) + ": " + what);
  wait_for(Waits::kForGood);
}

// Who waits for what.
inline std::string waiting(int threads) {
  const auto what = [](const Fiber& fiber) -> std::string {
    switch (fiber.waits) {
      case Waits::kWarp:
      case Waits::kShuffle:
        return "for their warp";
      case Waits::kBlock:
        return "for the block";
      case Waits::kEvent:
        return "for " + fiber.event.name(fiber.event.object, fiber.event.argument);
      default:
        return "";
    }
  };
  std::string all;
  for (int first = 0, next; first < threads; first = next) {
    const std::string one = what(fibers[first]);
    for (next = first + 1; next < threads && what(fibers[next]) == one; ++next) {
    }
    if (one.empty()) continue;
    all += "; threads " + std::to_string(first) + " to " + std::to_string(next - 1) + " wait " + one;
  }
  return "block " + std::to_string(blockIdx.x) + " is stuck" + all;
}

inline void fiber_main() {
  for (;;) {
    body();
    wait_for(Waits::kDone);
  }
}

// Let a thread run until it waits.
inline void resume(int thread) {
  Fiber& fiber = fibers[thread];
  threadIdx.x = thread;
  if (_setjmp(scheduler)) return;
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

// Let a thread run if it may. Returns whether it did.
inline bool go_on(int thread) {
  Fiber& fiber = fibers[thread];
  const Event& event = fiber.event;
  if (fiber.waits == Waits::kEvent && event.happened(event.object, event.argument)) fiber.waits = Waits::kNot;
  if (fiber.waits != Waits::kNot) return false;
  resume(thread);
  return true;
}

// Let every thread of `members` that may run, and is not slow, do so; then, if all that are left wait for the same
// thing of the kinds given, let them go on. Returns whether anything moved.
inline bool turn(const std::vector<int>& members, std::initializer_list<Waits> kinds) {
  bool moved = false;
  for (int thread : members)
    if (!fibers[thread].slow) moved |= go_on(thread);
  for (Waits kind : kinds) {
    bool all = true, any = false;
    for (int thread : members) {
      all &= fibers[thread].waits == kind || fibers[thread].waits == Waits::kDone;
      any |= fibers[thread].waits == kind;
    }
    if (!all || !any) continue;
    if (kind == Waits::kBlock) or_result = or_sum, or_sum = 0;
    for (int thread : members)
      if (fibers[thread].waits == kind) fibers[thread].waits = Waits::kNot;
    moved = true;
  }
  return moved;
}

// Returns false when the block is stuck or a thread failed: `complaint` says why.
inline bool run_block(int threads, int shared_bytes, std::mt19937& order) {
  const float4 nans = make_float4(NAN, NAN, NAN, NAN);
  std::fill_n(s_memory, shared_bytes / sizeof(float4), nans);
  shared_base = reinterpret_cast<char*>(s_memory);
  shared_size = shared_bytes;
  complaint.clear();
  std::vector<std::vector<int>> warps(threads / 32);
  std::vector<int> block;
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = fibers[t];
    fiber.waits = Waits::kNot;
    fiber.gathers = 0;
    fiber.slow = false;
    fiber.issued.clear();
    fiber.groups.clear();
    warps[t / 32].push_back(t);
    block.push_back(t);
  }
  for (auto& warp : warps) std::shuffle(warp.begin(), warp.end(), order);
  std::shuffle(warps.begin(), warps.end(), order);
  or_sum = 0;
  if (extension) extension->begin(threads, order);
  // With an extension, threads depend on each other in more ways than barriers of the block: one warp or lane at a time
  // is so slow that it goes on only when no other can.
  std::vector<int> slow;
  unsigned patience = 0;
  for (bool moved = true; moved;) {
    moved = false;
    if (extension && patience-- == 0) {
      for (int t : slow) fibers[t].slow = false;
      slow = warps[order() % warps.size()];
      if (order() % 2) slow.resize(1);
      for (int t : slow) fibers[t].slow = true;
      patience = order() % kMostPatience;
    }
    for (const auto& warp : warps)
      while (turn(warp, {Waits::kWarp, Waits::kShuffle})) moved = true;
    moved |= turn(block, {Waits::kBlock});
    if (!moved && extension && order() % 2) moved = extension->idle();
    if (moved) continue;
    for (int t : slow) moved |= go_on(t);
    if (!moved && extension) moved = extension->idle();
  }
  const bool done = std::all_of(block.begin(), block.end(), [](int t) { return fibers[t].waits == Waits::kDone; });
  if (!done) {
    complain(waiting(threads));
    for (Fiber& fiber : fibers) fiber.started = false;
  }
  if (extension) extension->end();
  return complaint.empty();
}

// Run `kernel()` as every thread of `blocks` blocks. Returns 1 when a block is stuck.
inline int launch_blocks(std::function<void()> kernel, int64_t blocks, int threads, int shared_bytes, unsigned seed) {
  std::mt19937 order(seed);
  blockDim.x = threads;
  gridDim.x = unsigned(blocks);
  body = std::move(kernel);
  for (int64_t block = 0; block < blocks; ++block) {
    blockIdx.x = unsigned(block);
    if (!run_block(threads, shared_bytes, order)) return 1;
  }
  return 0;
}

template <class Kernel, class Params, class Grid>
int launch(Kernel* kernel, const Params& p, const Grid& grid, int threads, int shared_bytes, unsigned seed) {
  return launch_blocks([&] { kernel(p, grid); }, grid.items, threads, shared_bytes, seed);
}

template <class T>
struct Shown {
  const char (*lanes)[kExchangeBytes];
  const T& operator[](int lane) const { return *std::launder(reinterpret_cast<const T*>(lanes[lane])); }
};

// What every lane of this warp shows: all show, then all read. It stands until the next but one gather, which no lane
// reaches before all have read: hence two places, in turn.
template <class T>
Shown<T> gather(const T& mine) {
  static_assert(sizeof(T) <= kExchangeBytes, "lanes exchange at most kExchangeBytes");
  const unsigned self = threadIdx.x;
  auto& place = exchanged[fibers[self].gathers++ % 2];
  new (place[self]) T(mine);
  wait_for(Waits::kShuffle);
  return {place + self / 32 * 32};
}

inline float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
// Exponents are 112 apart, subnormals come out normal; g++ would call a function for each _Float16.
inline float from_f16(uint16_t bits) {
  const uint32_t size = uint32_t(bits & 0x7fff) << 13, sign = uint32_t(bits & 0x8000) << 16;
  const float finite = from_bits(size) * 0x1p112f;
  return std::copysign((bits & 0x7c00) == 0x7c00 ? from_bits(size | 0x7f800000) : finite, from_bits(sign));
}
inline float from_bf16(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }
// Exponents are 120 apart; there is no infinity, and one NaN of each sign.
inline float from_e4m3(uint16_t bits) {
  const float finite = from_bits(uint32_t(bits & 0x7f) << 20) * 0x1p120f;
  return std::copysign((bits & 0x7f) == 0x7f ? NAN : finite, from_bits(uint32_t(bits & 0x80) << 24));
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

template <int kRegisters>
struct Words {
  uint32_t r[kRegisters];
};
template <class T, int kA, int kB>
struct Operands {
  T a[kA], b[kB];
};
template <int kElements, class Convert>
void unpack(float (&to)[kElements], const uint32_t* from, Convert convert) {
  for (int i = 0; i < kElements; ++i) to[i] = convert(uint16_t(from[i / 2] >> 16 * (i % 2)));
}

// kDepths blocks of k = 8: element (row, k) of A is register row / 8 + 2 (k / 8) of lane 4 (row % 8) + k % 8 / 2.
template <int kDepths, class Convert>
void mma_16bit(float (&c)[4], const uint32_t (&a)[2 * kDepths], const Words<kDepths>& b, Convert convert) {
  Operands<float, 4 * kDepths, 2 * kDepths> mine;
  unpack(mine.a, a, convert);
  unpack(mine.b, b.r, convert);
  const auto all = gather(mine);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    double sum = c[i];
    for (int k = 0; k < 8 * kDepths; ++k)
      sum += double(all[row % 8 * 4 + k % 8 / 2].a[2 * (row / 8 + 2 * (k / 8)) + k % 2]) *
             all[column * 4 + k % 8 / 2].b[2 * (k / 8) + k % 2];
    c[i] = float(sum);
  }
}

inline void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], const Words<2>& b) {
  Operands<uint32_t, 4, 2> mine;
  memcpy(mine.a, a, sizeof mine.a);
  memcpy(mine.b, b.r, sizeof mine.b);
  const auto all = gather(mine);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    for (int k = 0; k < 32; ++k) {
      const uint32_t x = all[row % 8 * 4 + k % 16 / 4].a[row / 8 + 2 * (k / 16)];
      const uint32_t y = all[column * 4 + k % 16 / 4].b[k / 16];
      c[i] += int32_t(int8_t(x >> 8 * (k % 4))) * int8_t(y >> 8 * (k % 4));
    }
  }
}

inline void mma_m8n8k16_s8(int32_t& c0, int32_t& c1, uint32_t a, uint32_t b) {
  const auto all = gather(Operands<uint32_t, 1, 1>{{a}, {b}});
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int k = 0; k < 16; ++k) {
    const int8_t x = all[g * 4 + k / 4].a[0] >> 8 * (k % 4);
    c0 += int32_t(x) * int8_t(all[2 * t * 4 + k / 4].b[0] >> 8 * (k % 4));
    c1 += int32_t(x) * int8_t(all[(2 * t + 1) * 4 + k / 4].b[0] >> 8 * (k % 4));
  }
}

inline void ldmatrix(uint32_t (&r)[4], const void* s_row, bool transposed) {
  const auto rows = gather(s_row);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row = transposed ? 2 * (lane % 4) + e : lane / 4, column = transposed ? lane / 4 : 2 * (lane % 4) + e;
      memcpy(&pair[e], static_cast<const char*>(rows[8 * i + row]) + 2 * column, 2);
    }
    r[i] = uint32_t(pair[0]) | uint32_t(pair[1]) << 16;
  }
}

// exponent: its bits in a 16-bit float.
inline uint32_t add_zero_times(uint32_t x, uint32_t c, uint16_t exponent) {
  for (int half = 0; half < 32; half += 16)
    if ((x >> half & exponent) == exponent) c |= uint32_t(0x7fff) << half;
  return c;
}

inline void stmatrix(void* s_row, const uint32_t (&r)[4]) {
  const auto rows = gather(s_row);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) memcpy(static_cast<char*>(rows[8 * i + lane / 4]) + 4 * (lane % 4), &r[i], 4);
  gather(0);  // all is in place
}

// wmma fragments: lane l holds elements 8 (l % 2) .. +7 of line l / 2, in order; lines are rows, or the columns of a B
// that is stored by columns. No GPU has this layout: a kernel that relies on one gives nonsense here.
template <int kRegisters>
void wmma_load(uint32_t (&r)[kRegisters], const void* s_from, int stride) {
  const int lane = threadIdx.x % 32;
  memset(r, 0, sizeof r);
  memcpy(r, static_cast<const uint16_t*>(s_from) + lane / 2 * stride + lane % 2 * 8, 16);
}
inline void wmma_load_sums(float (&c)[8], const float* s_from, int stride) {
  const int lane = threadIdx.x % 32;
  memcpy(c, s_from + lane / 2 * stride + lane % 2 * 8, sizeof c);
}
inline void wmma_store(float* s_to, const float (&d)[8], int stride, bool by_columns) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 8; ++i) {
    const int row = lane / 2, column = lane % 2 * 8 + i;
    s_to[by_columns ? column * stride + row : row * stride + column] = d[i];
  }
}
template <int kRegisters, class Convert>
void wmma_multiply(float (&c)[8], const uint32_t (&a)[kRegisters], const uint32_t (&b)[kRegisters], bool b_by_columns,
                   Convert convert) {
  Operands<float, 8, 8> mine;
  unpack(mine.a, a, convert);
  unpack(mine.b, b, convert);
  const auto all = gather(mine);
  const int row = threadIdx.x % 32 / 2;
  for (int i = 0; i < 8; ++i) {
    const int column = threadIdx.x % 2 * 8 + i;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int line = b_by_columns ? column : k, place = b_by_columns ? k : column;
      sum += double(all[2 * row + k / 8].a[k % 8]) * all[2 * line + place / 8].b[place % 8];
    }
    c[i] = float(sum);
  }
}

inline void cp_async(void* to, const void* from, int bytes, bool valid) {
  fibers[threadIdx.x].issued.push_back({to, from, bytes, valid});
}
inline void cp_async_commit() {
  Fiber& self = fibers[threadIdx.x];
  self.groups.push_back(std::move(self.issued));
  self.issued.clear();
}
inline void cp_async_wait(int pending) {
  auto& groups = fibers[threadIdx.x].groups;
  while (int(groups.size()) > pending) {
    for (const Copy& copy : groups.front()) {
      if (copy.valid)
        memcpy(copy.to, copy.from, copy.bytes);
      else
        memset(copy.to, 0, copy.bytes);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace host

inline float __fdividef(float x, float y) { return x / y; }
inline void __syncthreads() { host::wait_for(host::Waits::kBlock); }
inline int __syncthreads_or(int value) {
  host::or_sum |= value != 0;
  host::wait_for(host::Waits::kBlock);
  return host::or_result;
}
inline void __syncwarp() { host::wait_for(host::Waits::kWarp); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return host::gather(value)[(threadIdx.x % 32) ^ mask];
}
template <class T>
T __shfl_down_sync(unsigned, T value, int step) {
  const unsigned lane = threadIdx.x % 32;
  return host::gather(value)[lane + step < 32 ? lane + step : lane];
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return host::gather(value)[lane % 32];
}
inline unsigned __ballot_sync(unsigned, int value) {
  unsigned bits = 0;
  const auto all = host::gather(value);
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane] != 0) << lane;
  return bits;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __any_sync(unsigned, int value) { return __ballot_sync(~0u, value) != 0; }
inline int __all_sync(unsigned, int value) { return __ballot_sync(~0u, value) == ~0u; }
inline int atomicAdd(int* address, int value) {
  const int before = *address;
  *address = before + value;
  return before;
}
inline unsigned atomicMax(unsigned* address, unsigned value) {
  const unsigned before = *address;
  *address = before > value ? before : value;
  return before;
}
