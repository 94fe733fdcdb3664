// C entry of `sm90_fwd`, for one type (-DQF_DTYPE: QF_F16 or QF_BF16) and bucket of head dims (-DQF_HEAD_DIM): stage
// what must be, make tensor maps, attend.
#include "attn/entry.cuh"
#include "kernels/attention/sm90_fwd/kernel.cuh"

namespace {

using Element = qf::ElementOf<QF_DTYPE>::Type;
using Config = qf::sm90_fwd::Kernel<Element, QF_HEAD_DIM, true>::Config;

// A counter for work tiles comes first in the workspace, for when the library has run out of its own; copies after it.
int64_t counter_bytes(const qf::TileSchedule& schedule) { return schedule.dynamic ? 256 : 0; }

}  // namespace

QF_EXPORT int64_t qf_sm90_fwd_workspace(const QfAttnParams* p) {
  using namespace qf::wgmma;
  return counter_bytes(schedule_of(*p, Config::kBlockM)) + Stage(*p, false).bytes;
}

QF_EXPORT int qf_sm90_fwd(const QfAttnParams* p, void* stream) {
  using namespace qf::wgmma;
  if (const int status = qf::check_arrays(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > QF_HEAD_DIM || p->head_dim % 8 != 0) return QF_UNSUPPORTED;
  qf::TileSchedule schedule = schedule_of(*p, Config::kBlockM);
  if (schedule.count == 0) return QF_OK;
  if (schedule.count == schedule.kTooMany) return QF_UNSUPPORTED;
  const Stage planned(*p, false), stage(*p, true);
  const int64_t counter = counter_bytes(schedule), needed = counter + planned.bytes;
  if (needed > 0 && (!p->workspace || p->workspace_bytes < needed)) return QF_NO_MEMORY;
  int processors = 0;
  if (const int error = qf::multiprocessors(processors)) return error;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  qf::Borrowed borrowed{on};  // for addresses that nobody could plan for
  if (stage.bytes > planned.bytes)
    if (const cudaError_t error = borrowed.take(stage.bytes)) return error;
  char* const memory =
      borrowed.memory ? static_cast<char*>(borrowed.memory) : static_cast<char*>(p->workspace) + counter;
  if (schedule.count <= processors) schedule.dynamic = false;  // one for each block at most
  if (schedule.dynamic) {
    if (const int error = qf::take_tile_counter(on, schedule.counter)) return error;
    schedule.next = static_cast<unsigned*>(p->workspace);
    if (schedule.counter < 0)
      if (const cudaError_t error = cudaMemsetAsync(schedule.next, 0, sizeof(unsigned), on)) return error;
  }

  if (stage.bytes > 0) {
    const qf::Launch how = {3 * stage.blocks(processors), kStageThreads, 0, on};
    if (const int status =
            qf::launch(how, qf_sm90_fwd_stage_kernel<Element>, *p, stage, memory, qf::rope_tables_vectorise(p->rope)))
      return status;
  }
  TensorMaps maps{};
  if (const int error = stage.map<Config::QTile>(maps.q, kQ, memory, p->head_dim, Config::kBlockM)) return error;
  if (const int error = stage.map<Config::KTile>(maps.k, kK, memory, p->head_dim, Config::kBlockN)) return error;
  if (const int error = stage.map<Config::VTile>(maps.v, kV, memory, p->head_dim, Config::kBlockN)) return error;

  auto* const kernel = qf::scales_plainly(p->scale, p->softcap)
                           ? qf_sm90_fwd_kernel<qf::sm90_fwd::Kernel<Element, QF_HEAD_DIM, true>>
                           : qf_sm90_fwd_kernel<qf::sm90_fwd::Kernel<Element, QF_HEAD_DIM, false>>;
  const int blocks = schedule.count < processors ? schedule.count : processors;
  return qf::launch({blocks, Config::kThreads, Config::kSharedBytes, on}, kernel, *p, maps, schedule,
                    qf::chunks_aligned(p->out, p->head_dim, 2));
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("sm90_fwd", status); }
