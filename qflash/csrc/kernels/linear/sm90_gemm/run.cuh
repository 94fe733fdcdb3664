// The launches of one problem on one tile: copy what TMA cannot address, make tensor maps, multiply. Host side.
#pragma once

#include "common/launch.cuh"
#include "kernels/linear/sm90_gemm/kernel.cuh"

namespace qf {
namespace sm90_gemm {

using gemm::count_of;
using gemm::Problem90;
using gemm::wgmma::Relayout;
using gemm::wgmma::Rows;

inline bool has_words(const QfLinearParams& p) { return p.out_dtype == QF_F32 || p.out_dtype == QF_I32; }  // of out

template <class Config>
Problem90 problem_of(const QfLinearParams& p) {
  return {p.m, (Config::kTwoProducts ? 2 : 1) * p.n, gemm::wgmma::steps_of<Config>(p)};
}

// The workspace: counters for a call that gets none of the library's, partial results, copies.
struct Workspace {
  static constexpr int64_t kCounterBytes = sizeof(unsigned) * gemm::wgmma::kPlaces;
  int64_t partials, copies_at;

  explicit Workspace(const Problem90& problem)
      : partials(gemm::most_partial_bytes(problem, gemm::wgmma::kMostProcessors)),
        copies_at(partials > 0 ? kCounterBytes + partials : 0) {}
};

template <class Config>
int64_t workspace_bytes(const QfLinearParams& p) {
  return Workspace(problem_of<Config>(p)).copies_at + Relayout::of<Config>(p, false).bytes;
}

// Clusters that run concurrently on the current device, queried once. On the emulator, whose number of SMs may change,
// queried after each change.
template <class Config>
int resident_clusters(const Launch& how, int processors, int& count) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // count + kOfEach * processors; a count of 0 where none fit
  constexpr int kOfEach = 1 << 10;
  count = processors;
  if (Config::kCluster == 1) return QF_OK;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  const int before = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  count = before % kOfEach;
  if (before == 0 || before / kOfEach != processors) {
    auto* const kernel = qf_sm90_gemm_kernel<Config>;
    const LaunchConfig with(how);
    if (allow_shared_memory(reinterpret_cast<const void*>(kernel), how.shared_bytes) ||
        cudaOccupancyMaxActiveClusters(&count, kernel, &with.config)) {
      cudaGetLastError();  // clears the thread's last error
      count = 0;           // from now on, even if the error passes, so that a problem has the same bits in every call
    }
    if (count >= kOfEach) count = kOfEach - 1;
    if (device < kDevices) known[device].store(count + kOfEach * processors, std::memory_order_relaxed);
  }
  return count > 0 ? int(QF_OK) : int(cudaErrorInvalidConfiguration);
}

template <class Config>
Launch launch_of(cudaStream_t stream) {
  return {Config::kCluster, Config::kThreads, Config::kSharedBytes, stream, false, Config::kCluster};
}

// Copies of what TMA cannot address: of operands before the product, of results after it (kBack).
template <class Config, bool kBack>
int relayout_pass(const Relayout& relayout, const QfLinearParams& p, char* copies, int processors,
                  cudaStream_t stream) {
  constexpr int kThreads = gemm::wgmma::kRelayoutThreads;
  constexpr int kFirst = kBack ? Relayout::kOut : Relayout::kX, kLast = kBack ? Relayout::kPreUp : Relayout::kResidual;
  for (int which = kFirst; which <= kLast; ++which) {
    if (!relayout.copied[which]) continue;
    const Rows& given = relayout.given[which];
    const bool operand = which <= Relayout::kUp;
    auto* const kernel = operand && Config::kIntegers ? qf_sm90_gemm_relayout_kernel<uint8_t, kBack>
                         : !operand && has_words(p)   ? qf_sm90_gemm_relayout_kernel<uint32_t, kBack>
                                                      : qf_sm90_gemm_relayout_kernel<uint16_t, kBack>;
    const int64_t blocks = count_of(given.pitch() / 16 * given.rows, kThreads), most = 16 * processors;
    if (const int status = launch({blocks < most ? blocks : most, kThreads, 0, stream}, kernel, given,
                                  copies + relayout.offset[which]))
      return status;
  }
  return QF_OK;
}

template <class Config>
int make_maps(const Relayout& relayout, const QfLinearParams& p, char* copies, gemm::wgmma::TensorMaps& maps) {
  using namespace gemm::wgmma;
  using X = typename Config::X;
  using W = typename Config::W;
  if (const int error = relayout.map<typename X::Tile>(maps.x, Relayout::kX, copies, X::box_rows(p.m))) return error;
  if (const int error = relayout.map<typename W::Tile>(maps.w, Relayout::kW, copies, W::kBoxRows)) return error;
  if (has_up<Config>(p))
    if (const int error = relayout.map<typename W::Tile>(maps.up, Relayout::kUp, copies, W::kBoxRows)) return error;
  const auto map_result = [&](CUtensorMap& map, Relayout::Which which) {
    return has_words(p) ? relayout.map<OutPanel<float>>(map, which, copies, kWarpRows)
                        : relayout.map<OutPanel<F16>>(map, which, copies, kWarpRows);
  };
  if (const int error = map_result(maps.out, Relayout::kOut)) return error;
  if (const int error = map_result(maps.pre, Relayout::kPre)) return error;
  return map_result(maps.pre_up, Relayout::kPreUp);
}

// Runs a problem of at least one element. k is cut into `splits` after the first `whole` tiles, counted in clusters.
// processors: up to kMostProcessors.
template <class Config>
int run(const QfLinearParams& given, int processors, int splits, int64_t whole, cudaStream_t stream) {
  using namespace gemm::wgmma;
  const Walk walk = walk_of<Config>(given, splits, whole);
  if (walk.count == Walk::kTooMany) return QF_UNSUPPORTED;
  const Relayout reserved = Relayout::of<Config>(given, false), relayout = Relayout::of<Config>(given, true);
  const Workspace layout(problem_of<Config>(given));
  const int64_t needed = layout.copies_at + reserved.bytes;
  const int64_t blocks_of_splits = int64_t(walk.count - walk.whole) * Config::kCluster;
  const int64_t places = blocks_of_splits / splits * Config::kConsumerWarps;
  const int64_t partial_bytes = blocks_of_splits * Config::kRows * Config::kColumns * 4;
  if (splits > 1 && (partial_bytes > layout.partials || places > kPlaces)) return QF_UNSUPPORTED;
  if (needed > 0 && (!given.workspace || given.workspace_bytes < needed)) return QF_NO_MEMORY;
  char* const workspace = static_cast<char*>(given.workspace);
  Borrowed borrowed{stream};  // for copies that only the addresses require
  if (relayout.bytes > reserved.bytes)
    if (const cudaError_t error = borrowed.take(relayout.bytes)) return error;
  char* const copies = borrowed.memory ? static_cast<char*>(borrowed.memory) : workspace + layout.copies_at;

  TensorMaps maps{};
  if (const int error = make_maps<Config>(relayout, given, copies, maps)) return error;
  QfLinearParams p = given;  // as the kernel sees it
  const Rows residual = relayout.seen(Relayout::kResidual, copies);
  p.residual = residual.g_data;
  p.residual_stride_m = residual.stride / (has_words(given) ? 4 : 2);
  PartialSums partials{workspace + Workspace::kCounterBytes, -1, nullptr};
  if (splits > 1)
    if (const int error = take_places(stream, int(places), reinterpret_cast<unsigned*>(workspace), partials))
      return error;
  Launch how = launch_of<Config>(stream);
  int clusters = 0;
  if (const int error = resident_clusters<Config>(how, processors, clusters)) return error;
  how.blocks = int64_t(walk.count < clusters ? walk.count : clusters) * Config::kCluster;
  how.overlaps = splits == 1 || !partials.was_cleared();
  if (const int status = relayout_pass<Config, false>(relayout, p, copies, processors, stream)) return status;
  if (const int status = launch(how, qf_sm90_gemm_kernel<Config>, p, maps, walk, partials)) return status;
  return relayout_pass<Config, true>(relayout, p, copies, processors, stream);
}

template <class Problem>
using LargeTile = gemm::wgmma::TileConfig<Large<Problem>>;
template <class Problem>
using SmallTile = gemm::wgmma::TileConfig<Small<Problem>>;

// The same on the tile that policy.h estimates to be fastest.
template <class Problem>
int run_fastest(const QfLinearParams& p, cudaStream_t stream) {
  if (p.m == 0 || p.n == 0) return QF_OK;
  int processors = 0;
  if (const int error = multiprocessors(processors)) return error;
  if (processors > gemm::wgmma::kMostProcessors) processors = gemm::wgmma::kMostProcessors;
  using Large = LargeTile<Problem>;
  const Problem90 problem = problem_of<SmallTile<Problem>>(p);
  int pairs = 0;  // concurrent clusters of large tiles; not queried if the small tile is used in any case
  if (processors >= Large::kCluster && gemm::fills_clusters(problem, gemm::kLargeTile))
    if (resident_clusters<Large>(launch_of<Large>(stream), processors, pairs)) pairs = 0;  // the small tile runs
  if (pairs > processors / Large::kCluster) pairs = processors / Large::kCluster;
  const gemm::Choice90 choice = gemm::choose_tile(problem, processors, pairs);
  return choice.large ? run<Large>(p, processors, choice.splits, choice.whole, stream)
                      : run<SmallTile<Problem>>(p, processors, choice.splits, choice.whole, stream);
}

}  // namespace sm90_gemm
}  // namespace qf
