// Rows of tokens between floats and int8. See quantize.h.
#include <float.h>
#include <math.h>
#include <string.h>

#include "memory.h"
#include "quantize.h"
#include "rows.h"

namespace qf {
namespace QF_ISA {
namespace {

// Philox-4x32-10 (J. K. Salmon et al., 2011): four random words as a function of a counter and a key.
struct Words {
  uint32_t word[4];
};
inline Words philox(uint64_t counter, uint64_t key) {
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0, c1 = uint32_t(b);
    c2 = uint32_t(a >> 32) ^ c3 ^ k1, c3 = uint32_t(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// y[i] <- floor(y[i]), or the integer above it with the probability that is y[i]'s fraction. `element`: of y[0].
void round_stochastically(float* y, int64_t n, uint64_t element, uint64_t seed) {
  for (int64_t i = 0; i < n;) {
    const Words words = philox((element + uint64_t(i)) / 4, seed);
    for (int w = int((element + uint64_t(i)) % 4); w < 4 && i < n; w++, i++) {
      const float below = floorf(y[i]), uniform = float(words.word[w] >> 8) * 0x1p-24f;
      y[i] = uniform < y[i] - below ? below + 1.0f : below;
    }
  }
}

}  // namespace

void load_tokens(const QfQuantizeParams& p, const TokenBlock& block, const float* mean) {
  const int n = p.head_dim;
  for (int64_t i = 0; i < block.count; i++) {
    const int64_t token = block.first + i;
    float* row = block.rows + i * block.stride;
    load_row(row, row_address(p.x, p.dtype, block.b, token, block.h), p.dtype, n);
    const int32_t* positions = p.rope.positions_k;
    rotate_row(row, p.rope, positions ? positions[block.b * p.rope.stride_positions_k_b + token] : token);
    if (mean)
      for (int d = 0; d < n; d++) row[d] -= mean[d];
    block.nonfinite[i] = largest_magnitude(row, n) >= kInfinityBits;
  }
}

int32_t sum_tokens(const QfQuantizeParams& p, const TokenBlock& block, float* sums) {
  int32_t finite = 0;
  for (int64_t i = 0; i < block.count; i++) {
    if (block.nonfinite[i]) continue;
    const float* row = block.rows + i * block.stride;
    for (int d = 0; d < p.head_dim; d++) sums[d] += row[d];
    finite++;
  }
  return finite;
}

Extent extent_of_tokens(const QfQuantizeParams& p, const TokenBlock& block) {
  Extent extent;
  for (int64_t i = 0; i < block.count; i++) {
    Extent token;
    const float* row = block.rows + i * block.stride;
    token.any_nonfinite = block.nonfinite[i];
    token.any_finite = !block.nonfinite[i];
    if (token.any_finite) {
      token.largest = largest_magnitude(row, p.head_dim);
      if (!p.symmetric)
        for (int d = 0; d < p.head_dim; d++) {
          token.above = row[d] > token.above ? row[d] : token.above;
          token.below = -row[d] > token.below ? -row[d] : token.below;
        }
    }
    extent.join(token);
  }
  return extent;
}

void round_tokens(const QfQuantizeParams& p, const TokenBlock& block, const Scale& scale) {
  const int n = p.head_dim;
  const float lowest = p.symmetric ? -127.0f : -128.0f;
  for (int64_t i = 0; i < block.count; i++) {
    const int64_t token = block.first + i;
    int8_t* values = static_cast<int8_t*>(p.values.data) + offset_of(p.values, block.b, token, block.h);
    float* y = block.rows + i * block.stride;
    if (block.nonfinite[i]) {
      memset(values, p.symmetric ? -128 : 0, size_t(n));
    } else {
      for (int d = 0; d < n; d++) y[d] *= scale.inverse;
      if (p.rounding == QF_STOCHASTIC)
        round_stochastically(y, n, uint64_t((block.b * p.length + token) * p.heads + block.h) * uint64_t(n), p.seed);
      for (int d = 0; d < n; d++) {
        float integer = (y[d] + kIntegers) - kIntegers + scale.zero_point;
        integer = integer < lowest ? lowest : integer;
        integer = integer > 127.0f ? 127.0f : integer;
        values[d] = int8_t(int32_t(integer));
      }
    }
    if (p.sums) {
      int32_t sum = 0;
      for (int d = 0; d < n; d++) sum += values[d];
      p.sums[(block.b * p.heads + block.h) * p.length + token] = sum;
    }
  }
}

int dequantize_tokens(const QfDequantizeParams& p, int64_t b, int64_t h, int64_t first, int64_t count) {
  const int n = p.head_dim;
  float* row = static_cast<float*>(thread_scratch(size_t(n + kLanes) * sizeof(float)));
  if (!row) return QF_NO_MEMORY;
  const int64_t head = b * p.heads + h, groups = (int64_t(p.length) + p.group - 1) / p.group;
  const int32_t zero_point = p.symmetric ? 0 : *p.zero_point;
  for (int64_t token = first; token < first + count; token++) {
    const int8_t* values = static_cast<const int8_t*>(p.values.data) + offset_of(p.values, b, token, h);
    const float scale = p.granularity == QF_PER_TENSOR ? *p.scale : p.scale[head * groups + token / p.group];
    for (int d = 0; d < n; d++) row[d] = scale * float(int32_t(values[d]) - zero_point);
    if (p.mean)
      for (int d = 0; d < n; d++) row[d] += p.mean[head * n + d];
    for (int d = 0; d < n; d++) row[d] = row[d] > FLT_MAX ? FLT_MAX : row[d] < -FLT_MAX ? -FLT_MAX : row[d];
    if (p.symmetric)
      for (int d = 0; d < n; d++) row[d] = values[d] == -128 ? NAN : row[d];
    store_row(row_address(p.out, p.dtype, b, token, h), row, p.dtype, n);
  }
  return QF_OK;
}

}  // namespace QF_ISA
}  // namespace qf
