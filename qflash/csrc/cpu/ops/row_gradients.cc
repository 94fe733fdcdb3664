// Entries of the gradients of softmax, layer_norm and cross_entropy: check, cut the rows into blocks, run them on all
// threads. Blocks depend on the shape alone, so sums over rows have one order, whatever the number of threads.
#include "row_gradients.h"

#include <algorithm>
#include <cstdint>

#include "row_checks.h"
#include "threads.h"

namespace qf {
namespace {

// Rows whose share of dweight and dbias is summed in float32. Shares are added up in double.
constexpr int64_t kLeastSummedRows = 16, kMostSummedRows = 64;
constexpr int64_t kColumnsOfTask = 4096;

int layer_norm_bwd(const QfLayerNormBwdParams& p, Isa isa) {
  const int64_t block =
      p.sums ? std::clamp(rows_of_block(p.columns), kLeastSummedRows, kMostSummedRows) : rows_of_block(p.columns);
  const int64_t blocks = (p.rows + block - 1) / block;
  float* sums = nullptr;
  if (p.sums && blocks > 0) {
    sums = static_cast<float*>(call_scratch(size_t(blocks * p.columns) * 2 * sizeof(float)));
    if (!sums) return QF_NO_MEMORY;
  }
  const auto rows = QF_PICK(isa, layer_norm_bwd_rows);
  const auto columns = QF_PICK(isa, layer_norm_bwd_columns);
  auto of_rows = [&](int64_t i) {
    return rows(p, i * block, std::min(p.rows, (i + 1) * block), sums ? sums + 2 * i * p.columns : nullptr);
  };
  auto of_columns = [&](int64_t i) {
    columns(p, sums, blocks, i * kColumnsOfTask, std::min(p.columns, (i + 1) * kColumnsOfTask));
    return int(QF_OK);
  };
  int status = parallel_for(blocks, p.num_threads, of_rows);
  if (status == QF_OK && p.sums)
    status = parallel_for((p.columns + kColumnsOfTask - 1) / kColumnsOfTask, p.num_threads, of_columns);
  if (sums) release_call_scratch();
  return status;
}

// What the gradient of the total adds to that of each loss.
float share_of_total(const QfCrossEntropyBwdParams& p) {
  if (!p.dtotal) return 0.0f;
  if (!p.mean) return *p.dtotal;
  int64_t count = 0;
  for (int64_t row = 0; row < p.rows; row++) count += p.targets[row] != p.ignore_index;
  return float(*p.dtotal / double(count));
}

}  // namespace
}  // namespace qf

extern "C" int qf_cpu_softmax_bwd(const QfSoftmaxBwdParams* params, void*) {
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  if (int status = qf::check_rows(*params, "x")) return status;
  return qf::run_rows(*params, QF_PICK(isa, softmax_bwd_rows));
}

extern "C" int qf_cpu_layer_norm_bwd(const QfLayerNormBwdParams* params, void*) {
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  if (int status = qf::check_rows(*params, "x")) return status;
  return qf::layer_norm_bwd(*params, isa);
}

extern "C" int qf_cpu_cross_entropy_bwd(const QfCrossEntropyBwdParams* params, void*) {
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  if (int status = qf::check_rows(*params, "logits")) return status;
  if (int status = qf::check_targets(*params)) return status;
  return qf::run_rows(*params, QF_PICK(isa, cross_entropy_bwd_rows), qf::share_of_total(*params));
}
