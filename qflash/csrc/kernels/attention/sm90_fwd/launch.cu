// C entry of `sm90_fwd`, for one type (-DQF_DTYPE: QF_F16 or QF_BF16), bucket of head dims (-DQF_HEAD_DIM) and kind of
// K and V (-DQF_KV_KIND: QF_KV_ARRAYS, or QF_KV_PAGES, which includes QF_KV_PAGES_INT8): gathers or relays out what
// needs it, makes tensor maps, attends.
#include "attn/entry.cuh"
#include "attn/plain_scores.h"
#include "kernels/attention/sm90_fwd/kernel.cuh"
#include "kernels/attention/sm90_fwd/pages.h"

namespace {

using namespace qf;
using Element = ElementOf<QF_DTYPE>::Type;
constexpr bool kPaged = QF_KV_KIND == QF_KV_PAGES;
template <bool kPlain>
using Kernel = sm90_fwd::Kernel<Element, QF_HEAD_DIM, kPlain, kPaged>;
constexpr int kBlockM = Kernel<true>::Config::kBlockM;

// The workspace begins with a counter for work tiles, for calls that get none of the library's; copies follow.
int64_t counter_bytes(const TileSchedule& schedule) { return schedule.dynamic ? 256 : 0; }

// The copies that a call makes before it attends: pages first, then tensors in another layout. addressed: as for
// Relayout.
struct Copies {
  bool gathers;
  int64_t gathered, relaid;

  Copies(const QfAttnParams& p, bool addressed) : gathers(kPaged && sm90_fwd::gathers(p, addressed)), gathered(0) {
    if (gathers) gathered = GatheredPages(p).bytes;
    relaid = wgmma::Relayout(on_copies(p, nullptr), addressed).bytes;
  }
  int64_t bytes() const { return gathered + relaid; }
  // The same problem, with pages replaced by their gathered copies.
  QfAttnParams on_copies(const QfAttnParams& p, char* memory) const {
    return gathers ? GatheredPages(p).place(p, memory) : p;
  }
};

template <class Kernel>
int attend(const QfAttnParams& given, cudaStream_t stream) {
  using namespace wgmma;
  using Config = typename Kernel::Config;
  static_assert(Config::kBlockM == kBlockM, "the workspace is reserved for any scores");
  if (given.head_dim < 1 || given.head_dim > Config::kHeadDim || given.head_dim % 8 != 0) return QF_UNSUPPORTED;
  TileSchedule schedule = schedule_of(given, kBlockM);
  if (schedule.count == 0) return QF_OK;
  if (schedule.count == schedule.kTooMany) return QF_UNSUPPORTED;
  const Copies reserved(given, false), copies(given, true);
  const int64_t counter = counter_bytes(schedule), needed = counter + reserved.bytes();
  if (needed > 0 && (!given.workspace || given.workspace_bytes < needed)) return QF_NO_MEMORY;
  int processors = 0;
  if (const int error = multiprocessors(processors)) return error;
  Borrowed borrowed{stream};  // for copies that become necessary once addresses are known
  if (copies.bytes() > reserved.bytes())
    if (const cudaError_t error = borrowed.take(copies.bytes())) return error;
  char* const gathered =
      borrowed.memory ? static_cast<char*>(borrowed.memory) : static_cast<char*>(given.workspace) + counter;
  char* const memory = gathered + copies.gathered;
  if (schedule.count <= processors) schedule.dynamic = false;  // at most one per block
  if (schedule.dynamic) {
    // Blocks count packed tiles themselves. If cu_seqlens is overwritten meanwhile, they may disagree, and would not
    // leave the counter at 0: such calls bring a counter of their own, so that no other call is affected.
    if (!given.cu_seqlens_q)
      if (const int error = take_tile_counter(stream, schedule.counter)) return error;
    schedule.next = static_cast<unsigned*>(given.workspace);
    if (schedule.counter < 0)
      if (const cudaError_t error = cudaMemsetAsync(schedule.next, 0, sizeof(unsigned), stream)) return error;
  }

  const QfAttnParams p = copies.on_copies(given, gathered);
  if constexpr (kPaged) {
    const auto gather = [&](auto* kernel) {
      return launch_gather(kernel, given, p, GatheredPages(given), gathered, stream);
    };
    const bool int8 = given.kv.kind == QF_KV_PAGES_INT8;
    if (copies.gathers)
      if (const int status = int8 ? gather(qf_sm90_fwd_gather_kernel<Element, true>)
                                  : gather(qf_sm90_fwd_gather_kernel<Element, false>))
        return status;
  }
  const Relayout relayout(p, true);
  if (relayout.bytes > 0)
    if (const int status =
            launch({3 * relayout.blocks(processors), kRelayoutThreads, 0, stream},
                   qf_sm90_fwd_relayout_kernel<Element, kPaged>, p, relayout, memory, rope_tables_vectorise(p.rope)))
      return status;
  TensorMaps maps{};
  using KTile = typename Config::KTile;
  const int kv_rows = kPaged ? page_box_rows(p.kv.page_size, Config::kFirstKey) : Config::kBlockN;
  if (const int error = relayout.map<typename Config::QTile>(maps.q, kQ, memory, p.head_dim, kBlockM)) return error;
  if (const int error = relayout.map<KTile>(maps.k, kK, memory, p.head_dim, kv_rows)) return error;
  if (const int error = relayout.map<KTile>(maps.v, kV, memory, p.head_dim, kv_rows)) return error;
  const int blocks = schedule.count < processors ? schedule.count : processors;
  return launch({blocks, Config::kThreads, Config::kSharedBytes, stream}, qf_sm90_fwd_kernel<Kernel>, p, maps, schedule,
                chunks_aligned(p.out, p.head_dim, 2));
}

bool serves(const QfAttnParams& p) {
  if constexpr (kPaged)
    return sm90_fwd::serves_pages(p);
  else
    return kv_is_arrays(p);
}

}  // namespace

QF_EXPORT int64_t qf_sm90_fwd_workspace(const QfAttnParams* p) {
  return counter_bytes(wgmma::schedule_of(*p, kBlockM)) + Copies(*p, false).bytes();
}

QF_EXPORT int qf_sm90_fwd(const QfAttnParams* p, void* stream) {
  if (const int status = check_params(p, QF_DTYPE)) return status;
  if (!serves(*p)) return QF_UNSUPPORTED;
  return by_scores(scales_plainly(p->scale, p->softcap), [&](auto plain) {
    return attend<Kernel<decltype(plain)::value>>(*p, static_cast<cudaStream_t>(stream));
  });
}

QF_EXPORT const char* qf_status_text(int status) { return status_text("sm90_fwd", status); }
