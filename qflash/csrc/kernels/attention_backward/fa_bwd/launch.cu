// C entry of `fa_bwd`: delta, the gradient of sinks, dK and dV, then dQ, in sequence on the stream.
#include "attn/backward/entry.cuh"
#include "attn/backward/sinks.cuh"
#include "attn/mma/tile.cuh"
#include "kernels/attention_backward/fa_bwd/kernel.cuh"

__global__ void __launch_bounds__(qf::kDeltaThreads)
    qf_fa_bwd_delta_kernel(const __grid_constant__ QfAttnBwdParams params, const __grid_constant__ qf::Grid grid,
                           const __grid_constant__ qf::DeltaAccess access) {
  qf::write_delta<qf::fa_bwd::Element>(params, grid, access);
}

__global__ void __launch_bounds__(qf::kDeltaThreads, 2)
    qf_fa_bwd_few_kernel(const __grid_constant__ QfAttnBwdParams params, const __grid_constant__ qf::Grid grid,
                         const __grid_constant__ qf::DeltaAccess access) {
  qf::write_delta_of_few<qf::fa_bwd::Element, false>(params, grid, access);
}

__global__ void __launch_bounds__(qf::kSinkThreads)
    qf_fa_bwd_sinks_kernel(const __grid_constant__ QfAttnBwdParams params) {
  extern __shared__ float4 s_memory[];
  qf::write_sink_gradient(params, reinterpret_cast<uint32_t*>(s_memory));
}

namespace {

using namespace qf;
using namespace qf::fa_bwd;

// A template, so that kernels a library does not launch are not compiled.
template <bool kBoth>
int run(const QfAttnBwdParams& params, const Access& access, void* stream) {
  const auto keys = [&](auto* kernel) {
    return launch_backward(kernel, params, key_grid_of(params.fwd, kBlockRows), kThreads, kSharedBytes, stream, access);
  };
  if constexpr (kBoth) {
    if (const int status = keys(qf_fa_bwd_keys_kernel<kOfBoth>)) return status;
  } else {
    if (const int status = keys(qf_fa_bwd_keys_kernel<kOfValues>)) return status;
    if (const int status = keys(qf_fa_bwd_keys_kernel<kOfKeys>)) return status;
  }
  QfAttnBwdParams with_dq = params;
  with_dq.fwd.out = params.dq;
  return launch_backward(qf_fa_bwd_queries_kernel, with_dq, grid_of(params.fwd, kBlockRows, 1), kThreads, kSharedBytes,
                         stream, access);
}

}  // namespace

QF_EXPORT int64_t qf_fa_bwd_workspace(const QfAttnBwdParams* params) { return delta_bytes(params->fwd); }

QF_EXPORT int qf_fa_bwd(const QfAttnBwdParams* params, void* stream) {
  if (const int status = check_backward(params, QF_DTYPE)) return status;
  const QfAttnParams& p = params->fwd;
  if (p.head_dim < 1 || p.head_dim > kHeadDim) return QF_UNSUPPORTED;
  if (const int status = check_workspace(*params)) return status;
  if (const int status = launch_delta(qf_fa_bwd_delta_kernel, qf_fa_bwd_few_kernel, *params, stream)) return status;
  if (const int status = launch_sink_gradient(qf_fa_bwd_sinks_kernel, *params, stream)) return status;
  const auto aligned = [&](const QfTensor& x) { return chunks_aligned(x, p.head_dim, int(sizeof(Element))); };
  const Access access = {vectorises(p), tensor_vectorises(params->dout, p.head_dim, int(sizeof(Element))),
                         aligned(params->dq), aligned(params->dk), aligned(params->dv)};
  return run<kTogether>(*params, access, stream);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("fa_bwd", status); }
