// C entry of `fa_mma_bwd`: delta, the gradient of sinks, dK and dV, then dQ, one after the other on the stream.
#include <type_traits>

#include "attn/backward/entry.cuh"
#include "attn/backward/sinks.cuh"
#include "kernels/attention_backward/fa_mma_bwd/keys.cuh"
#include "kernels/attention_backward/fa_mma_bwd/queries.cuh"

__global__ void __launch_bounds__(qf::kDeltaThreads)
    qf_fa_mma_bwd_delta_kernel(const __grid_constant__ QfAttnBwdParams params, const __grid_constant__ qf::Grid grid,
                               const __grid_constant__ qf::DeltaAccess vector) {
  qf::write_delta<qf::fa_mma_bwd::Element, true>(params, grid, vector);
}

__global__ void __launch_bounds__(qf::kSinkThreads)
    qf_fa_mma_bwd_sinks_kernel(const __grid_constant__ QfAttnBwdParams params) {
  extern __shared__ float4 s_memory[];
  qf::write_sink_gradient(params, reinterpret_cast<uint32_t*>(s_memory));
}

namespace {

using namespace qf;
using namespace qf::fa_mma_bwd;

template <bool kAsync>
int run(const QfAttnBwdParams& params, const Access& access, void* stream) {
  const auto keys = [&](auto* kernel) {
    return launch_backward(kernel, params, key_grid_of(params.fwd, kBlockRows), kKeyThreads, kSharedBytes, stream,
                           access);
  };
  if constexpr (kTogether) {
    if (const int status = keys(qf_fa_mma_bwd_keys_kernel<kAsync, kOfBoth>)) return status;
  } else {
    if (const int status = keys(qf_fa_mma_bwd_keys_kernel<kAsync, kOfValues>)) return status;
    if (const int status = keys(qf_fa_mma_bwd_keys_kernel<kAsync, kOfKeys>)) return status;
  }
  QfAttnBwdParams with_dq = params;
  with_dq.fwd.out = params.dq;
  return launch_backward(qf_fa_mma_bwd_queries_kernel<kAsync>, with_dq, grid_of(params.fwd, kBlockRows, 1),
                         kQueryThreads, kSharedBytes, stream, access);
}

}  // namespace

QF_EXPORT int64_t qf_fa_mma_bwd_workspace(const QfAttnBwdParams* params) { return delta_bytes(params->fwd); }

QF_EXPORT int qf_fa_mma_bwd(const QfAttnBwdParams* params, void* stream) {
  if (const int status = check_backward(params, QF_DTYPE)) return status;
  const QfAttnParams& p = params->fwd;
  if (p.head_dim < 1 || p.head_dim > kHeadDim) return QF_UNSUPPORTED;
  if (const int status = check_workspace(*params)) return status;
  const auto aligned = [&](const QfTensor& x) { return chunks_aligned(x, p.head_dim, 2); };
  const Access access = {aligned(p.q),          aligned(p.kv.k),     aligned(p.kv.v),
                         aligned(params->dout), aligned(params->dq), aligned(params->dk),
                         aligned(params->dv),   vectorises(p),       tensor_vectorises(params->dout, p.head_dim, 2)};
  if (const int status = launch_delta(qf_fa_mma_bwd_delta_kernel, *params, stream)) return status;
  if (const int status = launch_sink_gradient(qf_fa_mma_bwd_sinks_kernel, *params, stream)) return status;
  constexpr bool kCanCopyAsync = kArch >= 80;
  const bool async = kCanCopyAsync && !p.rope.cos && access.q && access.k && access.v && access.dout;
  return async ? run<kCanCopyAsync>(*params, access, stream) : run<false>(*params, access, stream);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("fa_mma_bwd", status); }
