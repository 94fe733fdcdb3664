// Tiles of csrc/gemm/wgmma by name, whatever gemm/policy.h would choose: clusters of one and of two, lags, layouts that
// the library of the forward pass does not have, any number of splits of k after any number of whole tiles.
#include "kernels/linear/sm90_gemm/run.cuh"

namespace {

using namespace qf;
using gemm::wgmma::TileConfig;
template <bool kXAlongM, bool kWAlongN>
using Halves = sm90_gemm::Problem<false, QF_BF16, QF_IDENTITY, kXAlongM, kWAlongN>;
using Bytes = sm90_gemm::Problem<true, QF_I32, QF_IDENTITY, false, false>;
template <bool kInt8>
using Gated = sm90_gemm::Problem<kInt8, QF_BF16, QF_SWIGLU, false, false>;

template <class Large>
struct WithoutLag : Large {
  static constexpr int kLag = 0;
};

template <class Shape>
int run(const QfLinearParams& p, int splits, int whole) {
  int processors = 0;
  if (const int error = multiprocessors(processors)) return error;
  return sm90_gemm::run<TileConfig<Shape>>(p, processors, splits, whole, nullptr);
}
template <class Problem>
int run(const QfLinearParams& p, int tile, int splits, int whole) {
  switch (tile) {
    case 0:
      return run<sm90_gemm::Large<Problem, 1>>(p, splits, whole);
    case 1:
      return run<sm90_gemm::Large<Problem, 2>>(p, splits, whole);
    case 2:
      return run<WithoutLag<sm90_gemm::Large<Problem, 2>>>(p, splits, whole);
    default:
      return run<sm90_gemm::Small<Problem>>(p, splits, whole);
  }
}

}  // namespace

// tile: 0, 1: large, of clusters of one, of two; 2: of two, without a lag; 3: small. whole: tiles that come first and
// are not cut, counted in clusters.
QF_EXPORT int try_gemm(const QfLinearParams* p, int tile, int splits, int whole) {
  const bool x_along_m = p->x_stride_m == 1 && p->x_stride_k != 1, w_along_n = p->w_stride_k != 1;
  if (p->activation == QF_SWIGLU)
    return p->dtype == QF_I8 ? run<Gated<true>>(*p, tile, splits, whole) : run<Gated<false>>(*p, tile, splits, whole);
  if (p->dtype == QF_I8) return run<Bytes>(*p, tile, splits, whole);
  if (x_along_m)
    return w_along_n ? run<Halves<true, true>>(*p, tile, splits, whole)
                     : run<Halves<true, false>>(*p, tile, splits, whole);
  return w_along_n ? run<Halves<false, true>>(*p, tile, splits, whole)
                   : run<Halves<false, false>>(*p, tile, splits, whole);
}
