// `sm90_fwd`'s C entry over the emulated kernels. num_threads carries the seed of everything that is left to chance.
#include "hopper_on_host.h"
#include "kernels/attention/sm90_fwd/kernel.cuh"
// Made for those tiles, too.
#include "attn/wgmma/stage.cuh"

namespace {

constexpr int kProcessors = 3;  // few, so that each has several items and its rings go round

}  // namespace

extern "C" int qf_sm90_fwd(const QfAttnParams* p, void*) {
  using namespace qf::sm90;
  host::extension = &host::hopper;
  const auto launch = [&](std::function<void()> body, int64_t blocks, int threads, int shared_bytes) {
    return host::launch_blocks(body, blocks, threads, shared_bytes, p->num_threads);
  };
  Items items = items_of(*p);
  int counter = 0;
  items.next = &counter;
  if (items.count == 0) return 0;
  const Stage stage(*p, true);
  std::vector<float4> memory(size_t(stage.bytes) / sizeof(float4) + 1, float4{NAN, NAN, NAN, NAN});
  char* const copies = reinterpret_cast<char*>(memory.data());
  if (stage.bytes > 0) {
    const auto body = [&] { qf_sm90_stage_kernel(*p, stage, copies, qf::rope_tables_vectorise(p->rope)); };
    if (const int status = launch(body, 3 * stage.blocks(1), 256, 0)) return status;
  }
  Maps maps{};
  host::complaint = "the tensor map was refused";
  if (const int status = stage.map<QTile>(maps.q, kQ, copies, p->head_dim, kBlockM)) return status;
  if (const int status = stage.map<KTile>(maps.k, kK, copies, p->head_dim, kBlockN)) return status;
  if (const int status = stage.map<VTile>(maps.v, kV, copies, p->head_dim, kBlockN)) return status;
  const auto run = [&](auto* kernel) {
    const bool out_aligned = qf::chunks_aligned(p->out, p->head_dim, 2);
    return launch([&] { kernel(*p, maps, items, out_aligned); }, items.count < kProcessors ? items.count : kProcessors,
                  kThreads, kSharedBytes);
  };
  return qf::scales_plainly(p->scale, p->softcap) ? run(qf_sm90_fwd_kernel<true>) : run(qf_sm90_fwd_kernel<false>);
}
extern "C" const char* qf_status_text(int) { return host::complaint.c_str(); }
