// What gemm/ has for the host, and functions of one number: asked by test_gemm_host.py.
#include "gemm/activation.cuh"
#include "gemm/fast_activation.cuh"
#include "gemm/policy.h"

#define QF_EXPORT extern "C" __attribute__((visibility("default")))

// chosen: 1 for the large tile, then the splits of k, then the whole tiles before them.
QF_EXPORT void try_policy(int64_t m, int64_t n, int64_t steps, int processors, int pairs, int32_t* chosen) {
  const qf::gemm::Choice90 choice = qf::gemm::choose_tile({m, n, steps}, processors, pairs);
  chosen[0] = choice.large;
  chosen[1] = choice.splits;
  chosen[2] = int32_t(choice.whole);
}
QF_EXPORT double try_clocks(int64_t m, int64_t n, int64_t steps, int slots, int large, int splits, int whole) {
  const qf::gemm::Tile90& tile = large ? qf::gemm::kLargeTile : qf::gemm::kSmallTile;
  return qf::gemm::clocks_of({m, n, steps}, tile, splits, slots, whole);
}
QF_EXPORT int64_t try_partial_bytes(int64_t m, int64_t n, int64_t steps, int processors) {
  return qf::gemm::most_partial_bytes({m, n, steps}, processors);
}

template <bool kRounded>
float activation_of(int activation, float h, float u) {
  using namespace qf::gemm;
  return activation == QF_GELU        ? fast_activated<QF_GELU, kRounded>(h, u)
         : activation == QF_GELU_TANH ? fast_activated<QF_GELU_TANH, kRounded>(h, u)
         : activation == QF_SILU      ? fast_activated<QF_SILU, kRounded>(h, u)
         : activation == QF_SWIGLU    ? fast_activated<QF_SWIGLU, kRounded>(h, u)
                                      : fast_activated<QF_IDENTITY, kRounded>(h, u);
}
// Of each h[i], with u[i] where it has two; rounded: as for a result of 16 bits, before it is rounded.
QF_EXPORT void try_activation(int activation, int rounded, int64_t count, const float* h, const float* u, float* out) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = rounded ? activation_of<true>(activation, h[i], u[i]) : activation_of<false>(activation, h[i], u[i]);
}

// The slope of each h[i], of the activations that have one product.
QF_EXPORT void try_slopes(int activation, int64_t count, const float* h, float* slope) {
  using namespace qf::gemm;
  for (int64_t i = 0; i < count; ++i)
    slope[i] = activation == QF_GELU        ? slopes<QF_GELU>(h[i], 0.0f).of_h
               : activation == QF_GELU_TANH ? slopes<QF_GELU_TANH>(h[i], 0.0f).of_h
                                            : slopes<QF_SILU>(h[i], 0.0f).of_h;
}
