// `fa_int8_quantized`'s C entry over the emulated kernel. attn.num_threads carries the seed of the order that warps and
// lanes run in.
#include "kernels/fa_int8/quantized.h"

extern "C" int qf_fa_int8_quantized(const QfInt8AttnParams* p, void*) {
  using namespace qf::fa_int8;
  if (!serves(*p)) return QF_UNSUPPORTED;
  const qf::Grid grid = qf::grid_of(p->attn, kBlockM, 1);
  return run_quantized(*p, [&](auto instance, const Access& access) {
    return host::launch_blocks([&] { instance.kernel(*p, grid, access); }, grid.items, kThreads, instance.kBytes,
                               p->attn.num_threads);
  });
}
extern "C" const char* qf_status_text(int) { return "a block is stuck: its threads wait for different things"; }
