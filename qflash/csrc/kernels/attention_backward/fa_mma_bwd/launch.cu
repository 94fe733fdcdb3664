// C entry of `fa_mma_bwd`: delta, the gradient of sinks, dK and dV, then dQ, in sequence on the stream. Where dS is
// kept in the workspace, dK and dV alternate with dQ, one section of the heads at a time.
#include <type_traits>

#include "attn/backward/entry.cuh"
#include "attn/backward/sinks.cuh"
#include "attn/plain_scores.h"
#include "kernels/attention_backward/fa_mma_bwd/keys.cuh"
#include "kernels/attention_backward/fa_mma_bwd/product.cuh"
#include "kernels/attention_backward/fa_mma_bwd/queries.cuh"

__global__ void __launch_bounds__(qf::kDeltaThreads)
    qf_fa_mma_bwd_delta_kernel(const __grid_constant__ QfAttnBwdParams params, const __grid_constant__ qf::Grid grid,
                               const __grid_constant__ qf::DeltaAccess access) {
  qf::write_delta<qf::fa_mma_bwd::Element>(params, grid, access);
}

__global__ void __launch_bounds__(qf::kDeltaThreads, 2)
    qf_fa_mma_bwd_few_kernel(const __grid_constant__ QfAttnBwdParams params, const __grid_constant__ qf::Grid grid,
                             const __grid_constant__ qf::DeltaAccess access) {
  qf::write_delta_of_few<qf::fa_mma_bwd::Element, true>(params, grid, access);
}

__global__ void __launch_bounds__(qf::kSinkThreads)
    qf_fa_mma_bwd_sinks_kernel(const __grid_constant__ QfAttnBwdParams params) {
  extern __shared__ float4 s_memory[];
  qf::write_sink_gradient(params, reinterpret_cast<uint32_t*>(s_memory));
}

namespace {

using namespace qf;
using namespace qf::fa_mma_bwd;

// The workspace: delta, then tiles of dS.
constexpr int64_t kDsAlignment = 1024;
int64_t ds_at(const QfAttnParams& p) { return (delta_bytes(p) + kDsAlignment - 1) / kDsAlignment * kDsAlignment; }

DsTiles ds_tiles_of(const QfAttnBwdParams& params) {
  return kKeepsDs ? ds_tiles(params.fwd, params.ds_bytes) : DsTiles{};
}

int64_t workspace_of(const QfAttnBwdParams& params) {
  const DsTiles tiles = ds_tiles_of(params);
  if (tiles.columns == 0) return delta_bytes(params.fwd);
  return ds_at(params.fwd) + tiles.bytes(params.fwd.q_heads / params.fwd.kv_heads);
}

template <bool kAsync, bool kPlain>
int run_keys(const QfAttnBwdParams& params, const KeyGrid& grid, const Access& access, const StoredDs& ds,
             void* stream) {
  const auto keys = [&](auto* kernel) {
    return launch_backward(kernel, params, grid, kKeyThreads, kKeySharedBytes, stream, access, ds);
  };
  if constexpr (kTogether) {
    return keys(qf_fa_mma_bwd_keys_kernel<kAsync, kPlain, kOfBoth>);
  } else {
    if (const int status = keys(qf_fa_mma_bwd_keys_kernel<kAsync, kPlain, kOfValues>)) return status;
    return keys(qf_fa_mma_bwd_keys_kernel<kAsync, kPlain, kOfKeys>);
  }
}

template <bool kAsync, bool kPlain>
int run(const QfAttnBwdParams& params, const Access& access, void* stream) {
  const QfAttnParams& p = params.fwd;
  QfAttnBwdParams with_dq = params;
  with_dq.fwd.out = params.dq;
  StoredDs ds = {nullptr, ds_tiles_of(params), 0, 0};
  if (ds.tiles.columns == 0) {
    if (const int status = run_keys<kAsync, kPlain>(params, key_grid_of(p, kBlockRows), access, ds, stream))
      return status;
    return launch_backward(qf_fa_mma_bwd_queries_kernel<kAsync, kPlain>, with_dq, grid_of(p, kBlockRows, 1),
                           kQueryThreads, kSharedBytes, stream, access);
  }
  if constexpr (kKeepsDs) {
    ds.g_tiles = static_cast<char*>(params.workspace) + ds_at(p);
    ds.head_bytes = ds.tiles.head_tiles() * kDsTileBytes;
    const int64_t all = int64_t(p.batch) * p.kv_heads;
    for (; ds.first_column < all; ds.first_column += ds.tiles.columns) {
      const int64_t left = all - ds.first_column, columns = left < ds.tiles.columns ? left : ds.tiles.columns;
      const KeyGrid grid = key_grid_of(p, kBlockRows, ds.first_column, columns);
      if (const int status = run_keys<kAsync, kPlain>(params, grid, access, ds, stream)) return status;
      if (const int status = launch_backward(qf_fa_mma_bwd_product_kernel<kAsync>, with_dq,
                                             product_grid_of(p, ds.first_column, columns), kProductThreads,
                                             kProductSharedBytes, stream, access, ds))
        return status;
    }
  }
  return QF_OK;
}

}  // namespace

QF_EXPORT int64_t qf_fa_mma_bwd_workspace(const QfAttnBwdParams* params) { return workspace_of(*params); }

QF_EXPORT int qf_fa_mma_bwd(const QfAttnBwdParams* params, void* stream) {
  if (const int status = check_backward(params, QF_DTYPE)) return status;
  const QfAttnParams& p = params->fwd;
  if (p.head_dim < 1 || p.head_dim > kHeadDim) return QF_UNSUPPORTED;
  if (const int status = check_workspace(*params)) return status;
  if (params->workspace_bytes < workspace_of(*params)) return QF_NO_MEMORY;
  const auto aligned = [&](const QfTensor& x) { return chunks_aligned(x, p.head_dim, 2); };
  const Access access = {aligned(p.q),          aligned(p.kv.k),     aligned(p.kv.v),
                         aligned(params->dout), aligned(params->dq), aligned(params->dk),
                         aligned(params->dv),   vectorises(p),       tensor_vectorises(params->dout, p.head_dim, 2)};
  if (const int status = launch_delta(qf_fa_mma_bwd_delta_kernel, qf_fa_mma_bwd_few_kernel, *params, stream))
    return status;
  if (const int status = launch_sink_gradient(qf_fa_mma_bwd_sinks_kernel, *params, stream)) return status;
  constexpr bool kCanCopyAsync = kArch >= 80;
  const bool async = kCanCopyAsync && !p.rope.cos && access.q && access.k && access.v && access.dout;
  return by_scores(scales_plainly(p.scale, p.softcap), [&](auto plain) {
    constexpr bool kPlain = decltype(plain)::value;
    return async ? run<kCanCopyAsync, kPlain>(*params, access, stream) : run<false, kPlain>(*params, access, stream);
  });
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("fa_mma_bwd", status); }
