// `fa_int8`'s C entry over the emulated kernels. num_threads carries the seed of the order that warps and lanes run in.
#include "attn/kv.h"
#include "kernels/attention/fa_int8/instances.h"
#include "kernels/attention/fa_int8/workspace.h"

namespace qf {
namespace fa_int8 {

template <int kKind>
int attend(QfAttnParams p) {
  const auto launch_instance = [](const QfAttnParams& quantized, auto instance, const Access& access) {
    const Grid grid = grid_of(quantized, kBlockM, 1);
    return host::launch_blocks([&] { instance.kernel(quantized, grid, access); }, grid.items, kThreads, instance.kBytes,
                               quantized.num_threads);
  };
  if constexpr (kKind == QF_KV_QUANTIZED) {
    return serves_quantized(p) ? run_quantized(p, launch_instance) : int(QF_UNSUPPORTED);
  } else {
    if (!kv_is_arrays(p)) return QF_UNSUPPORTED;
    Workspace workspace(p);
    std::vector<float4> memory(size_t(workspace.bytes) / sizeof(float4) + 1, float4{NAN, NAN, NAN, NAN});
    p.workspace = memory.data();
    const QfAttnParams quantized = workspace.place(p);
    if (padded(p.head_dim) != p.head_dim) memset(p.workspace, 0, size_t(workspace.q_scales));
    const auto quantize = [&](const QfQuantizeParams& x) {
      return run_quantize<Element, false>(x, [&](auto* kernel, int64_t blocks, const auto&... arguments) {
        return host::launch_blocks([&] { kernel(arguments...); }, blocks, kQuantizeThreads, kQuantizeSharedBytes,
                                   p.num_threads);
      });
    };
    if (const int status = quantize(workspace.k)) return status;
    if (const int status = quantize(workspace.q)) return status;
    return run_after_quantizing(quantized, launch_instance);
  }
}

}  // namespace fa_int8
}  // namespace qf

extern "C" int qf_fa_int8(const QfAttnParams* p, void*) { return qf::fa_int8::attend<QF_KV_KIND>(*p); }
extern "C" const char* qf_status_text(int) { return "a block is stuck: its threads wait for different things"; }
