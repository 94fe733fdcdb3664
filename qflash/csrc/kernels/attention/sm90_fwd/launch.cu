// C entry of `sm90_fwd`: stage what must be, make tensor maps, attend.
#include "attn/entry.cuh"
#include "attn/plain_scores.h"
#include "kernels/attention/sm90_fwd/kernel.cuh"
// Made for those tiles, too.
#include "attn/wgmma/stage.cuh"

// The counter that items are drawn from comes first in the workspace, copies after it.
static int64_t counter_bytes(const qf::sm90::Items& items) { return items.drawn ? 256 : 0; }

QF_EXPORT int64_t qf_sm90_fwd_workspace(const QfAttnParams* p) {
  return counter_bytes(qf::sm90::items_of(*p)) + qf::sm90::Stage(*p, false).bytes;
}

QF_EXPORT int qf_sm90_fwd(const QfAttnParams* p, void* stream) {
  using namespace qf::sm90;
  if (const int status = qf::check_arrays(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > kHeadDim || p->head_dim % 8 != 0) return QF_UNSUPPORTED;
  const bool plain = qf::scales_plainly(p->scale, p->softcap);
  if (!qf::serves_scores(plain)) return QF_UNSUPPORTED;
  Items items = items_of(*p);
  if (items.count == 0) return QF_OK;
  if (items.count == kTooMany) return QF_UNSUPPORTED;
  const Stage planned(*p, false), stage(*p, true);
  const int64_t counter = counter_bytes(items), needed = counter + planned.bytes;
  if (needed > 0 && (!p->workspace || p->workspace_bytes < needed)) return QF_NO_MEMORY;
  int processors = 0;
  if (const int error = qf::multiprocessors(processors)) return error;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  qf::Borrowed borrowed{on};  // for addresses that nobody could plan for
  if (stage.bytes > planned.bytes)
    if (const cudaError_t error = borrowed.take(stage.bytes)) return error;
  char* const memory =
      borrowed.memory ? static_cast<char*>(borrowed.memory) : static_cast<char*>(p->workspace) + counter;
  if (items.count <= processors) items.drawn = false;  // one for each block at most
  if (items.drawn) {
    items.next = static_cast<int*>(p->workspace);
    if (const cudaError_t error = cudaMemsetAsync(items.next, 0, sizeof(int), on)) return error;
  }

  if (stage.bytes > 0) {
    if (const int status = qf::launch({3 * stage.blocks(processors), 256, 0, on}, qf_sm90_stage_kernel, *p, stage,
                                      memory, qf::rope_tables_vectorise(p->rope)))
      return status;
  }
  Maps maps{};
  if (const int error = stage.map<QTile>(maps.q, kQ, memory, p->head_dim, kBlockM)) return error;
  if (const int error = stage.map<KTile>(maps.k, kK, memory, p->head_dim, kBlockN)) return error;
  if (const int error = stage.map<VTile>(maps.v, kV, memory, p->head_dim, kBlockN)) return error;

  const int blocks = items.count < processors ? items.count : processors;
  return qf::by_scores(plain, [&](auto kind) {
    return qf::launch({blocks, kThreads, kSharedBytes, on}, qf_sm90_fwd_kernel<decltype(kind)::value>, *p, maps, items,
                      qf::chunks_aligned(p->out, p->head_dim, 2));
  });
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("sm90_fwd", status); }
