// Naive scalar engine: the placeholder the tiled one replaces. One row at a time, double arithmetic.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "checks.h"
#include "qflash.h"

namespace {
float load(const void* p, int64_t i, int dtype) {
  if (dtype == QF_F32) return static_cast<const float*>(p)[i];
  uint16_t h = static_cast<const uint16_t*>(p)[i];
  if (dtype == QF_BF16) {
    uint32_t u = uint32_t(h) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
  _Float16 x;
  std::memcpy(&x, &h, 2);
  return float(x);
}
void store(void* p, int64_t i, float f, int dtype) {
  if (dtype == QF_F32) {
    static_cast<float*>(p)[i] = f;
    return;
  }
  uint16_t h;
  if (dtype == QF_BF16) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    h = std::isnan(f) ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  } else {
    _Float16 x = _Float16(f);
    std::memcpy(&h, &x, 2);
  }
  static_cast<uint16_t*>(p)[i] = h;
}
struct Seq {
  int64_t q0, k0, lq, lk;
};
Seq sequence(const QfAttnParams& p, int b) {
  Seq s{0, 0, p.q_len, p.k_len};
  if (p.cu_seqlens_q) {
    s.q0 = p.cu_seqlens_q[b];
    s.lq = p.cu_seqlens_q[b + 1] - s.q0;
    s.k0 = p.cu_seqlens_k[b];
    s.lk = p.cu_seqlens_k[b + 1] - s.k0;
  }
  if (p.kv_lens) s.lk = p.kv_lens[b];
  return s;
}
int64_t at(const QfTensor& t, int64_t b, int64_t row, int64_t h) {
  return b * t.stride_b + row * t.stride_t + h * t.stride_h;
}
// Rotate x (forward) or rotate back (inverse).
void rotate(const QfRope& r, std::vector<double>& x, int64_t pos, bool inverse) {
  if (!r.cos) return;
  int half = r.rotary_dim / 2;
  double sign = (pos < 0) != inverse ? -1 : 1;
  int64_t row = pos < 0 ? -pos : pos;
  if (row >= r.rows) return;
  for (int i = 0; i < half; i++) {
    int a = r.interleaved ? 2 * i : i, b = r.interleaved ? 2 * i + 1 : i + half;
    double c = r.cos[row * half + i], s = sign * r.sin[row * half + i], u = x[a], v = x[b];
    x[a] = u * c - v * s;
    x[b] = u * s + v * c;
  }
}
int64_t qpos(const QfAttnParams& p, const Seq& s, int b, int64_t i) {
  if (p.rope.positions_q) return p.rope.positions_q[b * p.rope.stride_positions_q_b + s.q0 + i];
  return i + s.lk - s.lq;
}
int64_t kpos(const QfAttnParams& p, const Seq& s, int b, int64_t j) {
  if (p.rope.positions_k) return p.rope.positions_k[b * p.rope.stride_positions_k_b + s.k0 + j];
  return j;
}
std::vector<double> row_of(const QfAttnParams& p, const QfTensor& t, int b, int64_t row, int h) {
  std::vector<double> x(p.head_dim);
  for (int d = 0; d < p.head_dim; d++) x[d] = load(t.data, at(t, b, row, h) + d, p.dtype);
  return x;
}
bool seen(const QfAttnParams& p, const Seq& s, int64_t i, int64_t j) {
  int64_t diagonal = i + s.lk - s.lq;
  return (p.window_left < 0 || j >= diagonal - p.window_left) && (p.window_right < 0 || j <= diagonal + p.window_right);
}
}  // namespace

extern "C" {
int qf_cpu(const QfAttnParams* pp, void*) {
  const QfAttnParams& p = *pp;
  if (int status = qf::check_values(p)) return status;
  for (int b = 0; b < p.batch; b++)
    for (int h = 0; h < p.q_heads; h++) {
      Seq s = sequence(p, b);
      int hk = h / (p.q_heads / p.kv_heads);
      std::vector<std::vector<double>> K, V;
      for (int64_t j = 0; j < s.lk; j++) {
        K.push_back(row_of(p, p.k, b, s.k0 + j, hk));
        rotate(p.rope, K.back(), kpos(p, s, b, j), false);
        V.push_back(row_of(p, p.v, b, s.k0 + j, hk));
      }
      for (int64_t i = 0; i < s.lq; i++) {
        auto q = row_of(p, p.q, b, s.q0 + i, h);
        rotate(p.rope, q, qpos(p, s, b, i), false);
        std::vector<double> sc(s.lk, -INFINITY), o(p.head_dim, 0.0);
        double m = -INFINITY, l = 0;
        for (int64_t j = 0; j < s.lk; j++) {
          if (!seen(p, s, i, j)) continue;
          double x = 0;
          for (int d = 0; d < p.head_dim; d++) x += q[d] * K[j][d];
          x *= p.scale;
          if (p.softcap != 0) x = p.softcap * std::tanh(x / p.softcap);
          sc[j] = x;
          m = std::isnan(x) ? x : (x > m ? x : m);
        }
        for (int64_t j = 0; j < s.lk; j++) {
          if (!seen(p, s, i, j)) continue;
          double e = std::exp(sc[j] - m);
          l += e;
          for (int d = 0; d < p.head_dim; d++) o[d] += e * V[j][d];
        }
        bool none = l == 0 && m == -INFINITY;
        for (int d = 0; d < p.head_dim; d++)
          store(p.out.data, at(p.out, b, s.q0 + i, h) + d, none ? 0 : o[d] / l, p.dtype);
        if (p.lse) p.lse[b * p.lse_stride_b + h * p.lse_stride_h + s.q0 + i] = none ? -INFINITY : m + std::log(l);
      }
    }
  return QF_OK;
}
}
