// wgmma: a warpgroup (four warps) multiplies 64 x 16 by 16 x N, or 64 x 32 by 32 x N of bytes, asynchronously. sm_90a.
//
// Accumulators: with g = lane / 4 and t = lane % 4, warp w of the group holds rows 16 w + g (d[j][0], d[j][1]) and 16 w
// + g + 8 (d[j][2], d[j][3]), columns 8 j + 2 t and the next: as mma.sync distributes them (ptx/mma.cuh). A: from
// shared memory through a descriptor (hopper/descriptor.cuh), or registers as mma.sync takes them. B: from shared
// memory: rows of K channels, or, `transposed` (16-bit elements only), of N. Likewise A: or of M. Accumulators and A in
// registers belong to the tensor cores from wgmma_fence to the wgmma_wait that ends their group.
#pragma once

#include <stdint.h>

#include "common/element_types.h"

namespace qf {

// Required before the first wgmma of a sequence, and after writes to registers that it reads or accumulates into.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-fence
__device__ __forceinline__ void wgmma_fence() {
#ifdef __CUDA_ARCH__
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#elif defined(QF_EMULATOR)
  emulate::wgmma_fence();
#endif
}

// Closes a group: every wgmma issued since the last one.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-commit-group
__device__ __forceinline__ void wgmma_commit() {
#ifdef __CUDA_ARCH__
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#elif defined(QF_EMULATOR)
  emulate::wgmma_commit();
#endif
}

// Waits until at most kPending groups are in flight.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-wait-group
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
#ifdef __CUDA_ARCH__
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#elif defined(QF_EMULATOR)
  emulate::wgmma_wait(kPending);
#endif
}

// Identifies this copy of the code that issues MMAs, if there are several: all warps of a warpgroup must go through the
// same one. The emulator checks that.
__device__ __forceinline__ void wgmma_copy(int copy) {
#if !defined(__CUDA_ARCH__) && defined(QF_EMULATOR)
  emulate::wgmma_copy(copy);
#else
  (void)copy;
#endif
}

// Keeps the compiler from using accumulators before, or changing them after, the point where this stands. Likewise A.
template <int kTiles>
__device__ __forceinline__ void hold(float (&d)[kTiles][4]) {
#ifdef __CUDA_ARCH__
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[j][e])::"memory");
#endif
}
template <class Word, int kTiles>
__device__ __forceinline__ void hold(Word (&d)[kTiles][4]) {
#ifdef __CUDA_ARCH__
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(d[j][e])::"memory");
#endif
}

// Wgmma: d = a b, or d += a b where `add`. kTransposed: B's rows run along N; kTransposedA: A's along M.
// WgmmaS8: the same for int8, exact. WgmmaE4m3: d += a b of 8-bit floats; accumulators keep fewer bits than float32.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
#ifdef QF_EMULATOR
template <class Element>
constexpr auto kWidened = emulate::from_f16;
template <>
constexpr auto kWidened<BF16> = emulate::from_bf16;
template <class Element, int kN>
struct Wgmma {
  template <bool kTransposed = false, bool kTransposedA = false>
  static void multiply(float (&d)[kN / 8][4], uint64_t a, uint64_t b, bool add) {
    emulate::start_product(d[0], {kN, 2, false, kTransposed, add, a, b, kWidened<Element>, kTransposedA}, nullptr);
  }
  template <bool kTransposed = false>
  static void multiply(float (&d)[kN / 8][4], const uint32_t (&a)[4], uint64_t b) {
    emulate::start_product(d[0], {kN, 2, false, kTransposed, true, 0, b, kWidened<Element>}, a);
  }
};
template <int kN>
struct WgmmaS8 {
  static float convert(uint16_t bits) { return float(int8_t(bits)); }
  static void multiply(int32_t (&d)[kN / 8][4], uint64_t a, uint64_t b, bool add) {
    emulate::start_product(reinterpret_cast<float*>(d[0]), {kN, 1, true, false, add, a, b, convert}, nullptr);
  }
};
template <int kN>
struct WgmmaE4m3 {
  static void multiply(float (&d)[kN / 8][4], const uint32_t (&a)[4], uint64_t b) {
    emulate::start_product(d[0], {kN, 1, false, false, true, 0, b, emulate::from_e4m3}, a);
  }
};
template <>
struct WgmmaE4m3<8> {
  static void multiply(float (&d)[1][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    emulate::start_product(d[0], {8, 1, false, false, add, 0, b, emulate::from_e4m3}, a);
  }
};
#else
template <class Element, int kN>
struct Wgmma;
template <int kN>
struct WgmmaS8;
template <int kN>
struct WgmmaE4m3;

#define QF_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define QF_NAMES_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define QF_NAMES_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define QF_NAMES_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define QF_NAMES_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define QF_NAMES_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define QF_NAMES_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define QF_NAMES_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define QF_NAMES_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define QF_NAMES_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define QF_NAMES_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define QF_NAMES_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define QF_NAMES_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define QF_NAMES_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define QF_NAMES_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define QF_NAMES_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define QF_SUMS(i)                                                                                                     \
  "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3]), "+f"(d[i + 1][0]), "+f"(d[i + 1][1]), "+f"(d[i + 1][2]), \
      "+f"(d[i + 1][3])

#define QF_INTEGER_SUMS(i)                                                                                             \
  "+r"(d[i][0]), "+r"(d[i][1]), "+r"(d[i][2]), "+r"(d[i][3]), "+r"(d[i + 1][0]), "+r"(d[i + 1][1]), "+r"(d[i + 1][2]), \
      "+r"(d[i + 1][3])

#define QF_LIST(...) __VA_ARGS__
#define QF_WGMMA(ELEMENT, TYPE, N, NAMES, SUMS, I0, I1, I2, I3, I4, I5)                                         \
  template <>                                                                                                   \
  struct Wgmma<ELEMENT, N> {                                                                                    \
    template <bool kTransposed = false, bool kTransposedA = false>                                              \
    __device__ static __forceinline__ void multiply(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool add) {   \
      asm volatile("{.reg .pred add; setp.ne.b32 add, " I2                                                      \
                   ", 0;\n"                                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES "}, " I0 ", " I1  \
                   ", add, 1, 1, " I4 ", " I3 ";}"                                                              \
                   : QF_LIST SUMS                                                                               \
                   : "l"(a), "l"(b), "r"(int(add)), "n"(int(kTransposed)), "n"(int(kTransposedA)));             \
    }                                                                                                           \
    template <bool kTransposed = false>                                                                         \
    __device__ static __forceinline__ void multiply(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES "}, {" I0 ", " I1 \
                   ", " I2 ", " I3 "}, " I4 ", 1, 1, 1, " I5 ";"                                                \
                   : QF_LIST SUMS                                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(kTransposed)));                \
    }                                                                                                           \
  };
#define QF_WGMMAS(N, NAMES, SUMS, ...)              \
  QF_WGMMA(F16, "f16", N, NAMES, SUMS, __VA_ARGS__) \
  QF_WGMMA(BF16, "bf16", N, NAMES, SUMS, __VA_ARGS__)

QF_WGMMAS(32, QF_NAMES_0 ", " QF_NAMES_1, (QF_SUMS(0), QF_SUMS(2)), "%16", "%17", "%18", "%19", "%20", "%21")
QF_WGMMAS(64, QF_NAMES_0 ", " QF_NAMES_1 ", " QF_NAMES_2 ", " QF_NAMES_3,
          (QF_SUMS(0), QF_SUMS(2), QF_SUMS(4), QF_SUMS(6)), "%32", "%33", "%34", "%35", "%36", "%37")
QF_WGMMAS(96, QF_NAMES_0 ", " QF_NAMES_1 ", " QF_NAMES_2 ", " QF_NAMES_3 ", " QF_NAMES_4 ", " QF_NAMES_5,
          (QF_SUMS(0), QF_SUMS(2), QF_SUMS(4), QF_SUMS(6), QF_SUMS(8), QF_SUMS(10)), "%48", "%49", "%50", "%51", "%52",
          "%53")
QF_WGMMAS(112,
          QF_NAMES_0 ", " QF_NAMES_1 ", " QF_NAMES_2 ", " QF_NAMES_3 ", " QF_NAMES_4 ", " QF_NAMES_5 ", " QF_NAMES_6,
          (QF_SUMS(0), QF_SUMS(2), QF_SUMS(4), QF_SUMS(6), QF_SUMS(8), QF_SUMS(10), QF_SUMS(12)), "%56", "%57", "%58",
          "%59", "%60", "%61")
QF_WGMMAS(128,
          QF_NAMES_0 ", " QF_NAMES_1 ", " QF_NAMES_2 ", " QF_NAMES_3 ", " QF_NAMES_4 ", " QF_NAMES_5 ", " QF_NAMES_6
                     ", " QF_NAMES_7,
          (QF_SUMS(0), QF_SUMS(2), QF_SUMS(4), QF_SUMS(6), QF_SUMS(8), QF_SUMS(10), QF_SUMS(12), QF_SUMS(14)), "%64",
          "%65", "%66", "%67", "%68", "%69")
QF_WGMMAS(192,
          QF_NAMES_0 ", " QF_NAMES_1 ", " QF_NAMES_2 ", " QF_NAMES_3 ", " QF_NAMES_4 ", " QF_NAMES_5 ", " QF_NAMES_6
                     ", " QF_NAMES_7 ", " QF_NAMES_8 ", " QF_NAMES_9 ", " QF_NAMES_10 ", " QF_NAMES_11,
          (QF_SUMS(0), QF_SUMS(2), QF_SUMS(4), QF_SUMS(6), QF_SUMS(8), QF_SUMS(10), QF_SUMS(12), QF_SUMS(14),
           QF_SUMS(16), QF_SUMS(18), QF_SUMS(20), QF_SUMS(22)),
          "%96", "%97", "%98", "%99", "%100", "%101")
QF_WGMMAS(256,
          QF_NAMES_0 ", " QF_NAMES_1 ", " QF_NAMES_2 ", " QF_NAMES_3 ", " QF_NAMES_4 ", " QF_NAMES_5 ", " QF_NAMES_6
                     ", " QF_NAMES_7 ", " QF_NAMES_8 ", " QF_NAMES_9 ", " QF_NAMES_10 ", " QF_NAMES_11 ", " QF_NAMES_12
                     ", " QF_NAMES_13 ", " QF_NAMES_14 ", " QF_NAMES_15,
          (QF_SUMS(0), QF_SUMS(2), QF_SUMS(4), QF_SUMS(6), QF_SUMS(8), QF_SUMS(10), QF_SUMS(12), QF_SUMS(14),
           QF_SUMS(16), QF_SUMS(18), QF_SUMS(20), QF_SUMS(22), QF_SUMS(24), QF_SUMS(26), QF_SUMS(28), QF_SUMS(30)),
          "%128", "%129", "%130", "%131", "%132", "%133")

#define QF_WGMMA_S8(N, NAMES, SUMS, I0, I1, I2)                                                                 \
  template <>                                                                                                   \
  struct WgmmaS8<N> {                                                                                           \
    __device__ static __forceinline__ void multiply(int32_t (&d)[N / 8][4], uint64_t a, uint64_t b, bool add) { \
      asm volatile("{.reg .pred add; setp.ne.b32 add, " I2                                                      \
                   ", 0;\n"                                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" NAMES "}, " I0 ", " I1 ", add;}"    \
                   : QF_LIST SUMS                                                                               \
                   : "l"(a), "l"(b), "r"(int(add)));                                                            \
    }                                                                                                           \
  };
QF_WGMMA_S8(64, QF_NAMES_0 ", " QF_NAMES_1 ", " QF_NAMES_2 ", " QF_NAMES_3,
            (QF_INTEGER_SUMS(0), QF_INTEGER_SUMS(2), QF_INTEGER_SUMS(4), QF_INTEGER_SUMS(6)), "%32", "%33", "%34")
QF_WGMMA_S8(128,
            QF_NAMES_0 ", " QF_NAMES_1 ", " QF_NAMES_2 ", " QF_NAMES_3 ", " QF_NAMES_4 ", " QF_NAMES_5 ", " QF_NAMES_6
                       ", " QF_NAMES_7,
            (QF_INTEGER_SUMS(0), QF_INTEGER_SUMS(2), QF_INTEGER_SUMS(4), QF_INTEGER_SUMS(6), QF_INTEGER_SUMS(8),
             QF_INTEGER_SUMS(10), QF_INTEGER_SUMS(12), QF_INTEGER_SUMS(14)),
            "%64", "%65", "%66")
QF_WGMMA_S8(256,
            QF_NAMES_0 ", " QF_NAMES_1 ", " QF_NAMES_2 ", " QF_NAMES_3 ", " QF_NAMES_4 ", " QF_NAMES_5 ", " QF_NAMES_6
                       ", " QF_NAMES_7 ", " QF_NAMES_8 ", " QF_NAMES_9 ", " QF_NAMES_10 ", " QF_NAMES_11
                       ", " QF_NAMES_12 ", " QF_NAMES_13 ", " QF_NAMES_14 ", " QF_NAMES_15,
            (QF_INTEGER_SUMS(0), QF_INTEGER_SUMS(2), QF_INTEGER_SUMS(4), QF_INTEGER_SUMS(6), QF_INTEGER_SUMS(8),
             QF_INTEGER_SUMS(10), QF_INTEGER_SUMS(12), QF_INTEGER_SUMS(14), QF_INTEGER_SUMS(16), QF_INTEGER_SUMS(18),
             QF_INTEGER_SUMS(20), QF_INTEGER_SUMS(22), QF_INTEGER_SUMS(24), QF_INTEGER_SUMS(26), QF_INTEGER_SUMS(28),
             QF_INTEGER_SUMS(30)),
            "%128", "%129", "%130")

#define QF_WGMMA_E4M3(N, NAMES, SUMS, I0, I1, I2, I3, I4)                                                       \
  template <>                                                                                                   \
  struct WgmmaE4m3<N> {                                                                                         \
    __device__ static __forceinline__ void multiply(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" NAMES "}, {" I0 ", " I1 ", " I2 \
                   ", " I3 "}, " I4 ", 1, 1, 1;"                                                                \
                   : QF_LIST SUMS                                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                       \
    }                                                                                                           \
  };
QF_WGMMA_E4M3(64, QF_NAMES_0 ", " QF_NAMES_1 ", " QF_NAMES_2 ", " QF_NAMES_3,
              (QF_SUMS(0), QF_SUMS(2), QF_SUMS(4), QF_SUMS(6)), "%32", "%33", "%34", "%35", "%36")
QF_WGMMA_E4M3(128,
              QF_NAMES_0 ", " QF_NAMES_1 ", " QF_NAMES_2 ", " QF_NAMES_3 ", " QF_NAMES_4 ", " QF_NAMES_5 ", " QF_NAMES_6
                         ", " QF_NAMES_7,
              (QF_SUMS(0), QF_SUMS(2), QF_SUMS(4), QF_SUMS(6), QF_SUMS(8), QF_SUMS(10), QF_SUMS(12), QF_SUMS(14)),
              "%64", "%65", "%66", "%67", "%68")
QF_WGMMA_E4M3(256,
              QF_NAMES_0 ", " QF_NAMES_1 ", " QF_NAMES_2 ", " QF_NAMES_3 ", " QF_NAMES_4 ", " QF_NAMES_5 ", " QF_NAMES_6
                         ", " QF_NAMES_7 ", " QF_NAMES_8 ", " QF_NAMES_9 ", " QF_NAMES_10 ", " QF_NAMES_11
                         ", " QF_NAMES_12 ", " QF_NAMES_13 ", " QF_NAMES_14 ", " QF_NAMES_15,
              (QF_SUMS(0), QF_SUMS(2), QF_SUMS(4), QF_SUMS(6), QF_SUMS(8), QF_SUMS(10), QF_SUMS(12), QF_SUMS(14),
               QF_SUMS(16), QF_SUMS(18), QF_SUMS(20), QF_SUMS(22), QF_SUMS(24), QF_SUMS(26), QF_SUMS(28), QF_SUMS(30)),
              "%128", "%129", "%130", "%131", "%132")

template <>
struct WgmmaE4m3<8> {  // d = a b, or d += a b where `add`
  __device__ static __forceinline__ void multiply(float (&d)[1][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{.reg .pred add; setp.ne.b32 add, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, add, 1, 1;}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
  }
};

#undef QF_WGMMA_E4M3
#undef QF_WGMMA_S8
#undef QF_INTEGER_SUMS
#undef QF_LIST
#undef QF_WGMMAS
#undef QF_WGMMA
#undef QF_SUMS
#undef QF_NAMES_0
#undef QF_NAMES_1
#undef QF_NAMES_2
#undef QF_NAMES_3
#undef QF_NAMES_4
#undef QF_NAMES_5
#undef QF_NAMES_6
#undef QF_NAMES_7
#undef QF_NAMES_8
#undef QF_NAMES_9
#undef QF_NAMES_10
#undef QF_NAMES_11
#undef QF_NAMES_12
#undef QF_NAMES_13
#undef QF_NAMES_14
#undef QF_NAMES_15
#endif

}  // namespace qf
