// Entries of softmax, layer_norm and cross_entropy: check, cut the rows into blocks, run them on all threads.
#include "row_ops.h"

#include <cstdint>

#include "row_checks.h"

namespace qf {
namespace {

// The sum of the losses, or their mean over rows that are not ignored, in the order of rows.
float total_of(const QfCrossEntropyParams& p) {
  double sum = 0;
  int64_t count = 0;
  for (int64_t row = 0; row < p.rows; row++) {
    sum += p.losses[row];
    count += p.targets[row] != p.ignore_index;
  }
  return float(p.mean ? sum / double(count) : sum);
}

}  // namespace
}  // namespace qf

extern "C" int qf_cpu_softmax(const QfRowsParams* params, void*) {
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  if (int status = qf::check_rows(*params, "x")) return status;
  return qf::run_rows(*params, QF_PICK(isa, softmax_rows));
}

extern "C" int qf_cpu_layer_norm(const QfRowsParams* params, void*) {
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  if (int status = qf::check_rows(*params, "x")) return status;
  return qf::run_rows(*params, QF_PICK(isa, layer_norm_rows));
}

extern "C" int qf_cpu_cross_entropy(const QfCrossEntropyParams* params, void*) {
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  if (int status = qf::check_rows(*params, "logits")) return status;
  if (int status = qf::check_targets(*params)) return status;
  if (int status = qf::run_rows(*params, QF_PICK(isa, cross_entropy_rows))) return status;
  if (params->total) *params->total = qf::total_of(*params);
  return QF_OK;
}
