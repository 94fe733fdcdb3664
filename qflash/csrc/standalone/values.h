// The arrays of a profiling binary's problem, and the conversions between float and the kernel's type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "qflash.h"
#include "standalone/options.h"

namespace qf {
namespace standalone {

#if QF_DTYPE == 0
using Element = float;
inline Element narrow(float x) { return x; }
inline float widen(Element x) { return x; }
constexpr double kUnit = 1.0 / (1 << 24);  // half an ulp of 1
#elif QF_DTYPE == 1
using Element = __half;
inline Element narrow(float x) { return __float2half_rn(x); }
inline float widen(Element x) { return __half2float(x); }
constexpr double kUnit = 1.0 / (1 << 11);
#else
using Element = __nv_bfloat16;
inline Element narrow(float x) { return __float2bfloat16_rn(x); }
inline float widen(Element x) { return __bfloat162float(x); }
constexpr double kUnit = 1.0 / (1 << 8);
#endif

inline uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Value `index` of the normal sequence of `seed`: the same on every machine, in any order of evaluation.
inline float normal(uint64_t seed, uint64_t index) {
  const uint64_t bits = mix(mix(seed) + index);
  const double u = (double(bits >> 40) + 1) / (1 << 24), turn = double(bits & 0xffffff) / (1 << 24);
  return float(std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * turn));
}

// `count` elements: ones, or the normal sequence of array `which`. On all cores: tens of millions take seconds on one.
inline std::vector<Element> make_values(const Options& o, int which, int64_t count) {
  std::vector<Element> values(count);
  const uint64_t seed = uint64_t(o.seed) * 8 + which;
  const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (int64_t part = 0; part < cores; part++)
    threads.emplace_back([&, part] {
      for (int64_t i = count * part / cores; i < count * (part + 1) / cores; i++)
        values[i] = narrow(o.random ? normal(seed, i) : 1.0f);
    });
  for (std::thread& thread : threads) thread.join();
  return values;
}

struct Inputs {
  std::vector<Element> q, k, v;  // [batch, length, heads, head_dim], [batch, keys, kv_heads, head_dim]
};

inline int64_t q_count(const Options& o) { return int64_t(o.batch) * o.length * o.heads * o.head_dim; }
inline int64_t k_count(const Options& o) { return int64_t(o.batch) * o.keys * o.kv_heads * o.head_dim; }
inline int64_t lse_count(const Options& o) { return int64_t(o.batch) * o.heads * o.length; }

inline Inputs make_inputs(const Options& o) {
  return {make_values(o, 0, q_count(o)), make_values(o, 1, k_count(o)), make_values(o, 2, k_count(o))};
}

inline QfTensor tensor(const void* data, int length, int heads, int head_dim) {
  const int64_t row = int64_t(heads) * head_dim;
  return {const_cast<void*>(data), length * row, row, head_dim};
}

// The struct that every engine takes, for contiguous arrays at the given addresses.
inline QfAttnParams make_params(const Options& o, int dtype, int precision, const void* q, const void* k, const void* v,
                                void* out, float* lse) {
  QfAttnParams p{};
  p.struct_bytes = sizeof p;
  p.dtype = dtype;
  p.precision = precision;
  p.batch = o.batch, p.q_len = o.length, p.k_len = o.keys;
  p.q_heads = o.heads, p.kv_heads = o.kv_heads, p.head_dim = o.head_dim;
  p.window_left = -1, p.window_right = o.causal ? 0 : -1;
  p.scale = 1 / std::sqrt(float(o.head_dim));
  p.q = tensor(q, o.length, o.heads, o.head_dim), p.out = tensor(out, o.length, o.heads, o.head_dim);
  p.kv.k = tensor(k, o.keys, o.kv_heads, o.head_dim), p.kv.v = tensor(v, o.keys, o.kv_heads, o.head_dim);
  p.kv.kind = QF_KV_ARRAYS;
  p.kv.k_dtype = p.kv.v_dtype = dtype;
  p.lse = lse;
  p.lse_stride_b = int64_t(o.heads) * o.length, p.lse_stride_h = o.length;
  return p;
}

}  // namespace standalone
}  // namespace qf
