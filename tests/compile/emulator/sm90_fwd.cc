// `sm90_fwd`'s C entry over the emulated kernels. num_threads carries the seed of everything that is left to chance.
#include "hopper_on_host.h"
#include "kernels/sm90_fwd/kernel.cuh"
#include "kernels/sm90_fwd/stage.cuh"

namespace {

constexpr int kProcessors = 3;  // few, so that each has several items and its rings go round

}  // namespace

extern "C" int qf_sm90_fwd(const QfAttnParams* p, void*) {
  using namespace qf::sm90_fwd;
  host::extension = &host::hopper;
  const auto launch = [&](std::function<void()> body, int64_t blocks, int threads, int shared_bytes) {
    return host::launch_blocks(body, blocks < kProcessors ? blocks : kProcessors, threads, shared_bytes,
                               p->num_threads);
  };
  Items items = items_of(*p);
  int counter = 0;
  items.next = &counter;
  if (items.count == 0) return 0;
  const Stage stage(*p, true);
  std::vector<float4> memory(size_t(stage.bytes) / sizeof(float4) + 1, float4{NAN, NAN, NAN, NAN});
  char* const copies = reinterpret_cast<char*>(memory.data());
  if (stage.bytes > 0)
    for (blockIdx.y = 0; blockIdx.y < 3; ++blockIdx.y) {
      const auto body = [&] { qf_sm90_fwd_stage_kernel(*p, stage, copies, qf::rope_tables_vectorise(p->rope)); };
      if (const int status = launch(body, stage.blocks(kProcessors), 256, 0)) return status;
    }
  Maps maps{};
  const auto bring = [&](Which which, CUtensorMap& map, int box_rows) {
    const Staged& x = stage.tensors[which];
    if (x.rows == 0) return 0;
    const QfTensor tensor = x.copied ? x.copy(copies, p->head_dim) : x.from;
    return qf::encode_tensor_map(map, tensor, QF_DTYPE, p->head_dim, x.rows, x.heads, x.batch, box_rows);
  };
  host::complaint = "the tensor map was refused";
  if (const int status = bring(kQ, maps.q, kBlockM)) return status;
  if (const int status = bring(kK, maps.k, kBlockN)) return status;
  if (const int status = bring(kV, maps.v, kBlockN)) return status;
  const auto run = [&](auto* kernel) {
    const bool out_aligned = qf::chunks_aligned(p->out, p->head_dim, 2);
    return launch([&] { kernel(*p, maps, items, out_aligned); }, items.count, kThreads, kSharedBytes);
  };
  return qf::scales_plainly(p->scale, p->softcap) ? run(qf_sm90_fwd_kernel<true>) : run(qf_sm90_fwd_kernel<false>);
}
extern "C" const char* qf_status_text(int) { return host::complaint.c_str(); }
