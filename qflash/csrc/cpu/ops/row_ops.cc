// Entries of softmax, layer_norm and cross_entropy: check, cut the rows into blocks, run them on all threads.
#include "row_ops.h"

#include <algorithm>
#include <cstdint>

#include "status.h"
#include "threads.h"

namespace qf {
namespace {

using LongLong = long long;

constexpr int64_t kBlockElements = 1 << 15;  // worth a thread's while
constexpr int64_t kMostColumns = 0x7fffffff;

template <class Params>
int check(const Params& p, const char* array) {
  if (p.struct_bytes != int32_t(sizeof(Params))) return QF_BAD_ABI;
  if (p.columns > kMostColumns)
    return fail(QF_UNSUPPORTED, "%s has %lld columns; allowed: up to 2^31 - 1", array, LongLong(p.columns));
  return QF_OK;
}

template <class Params>
int run(const Params& p, int (*rows)(const Params&, int64_t, int64_t)) {
  const int64_t block = std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, p.columns));
  auto task = [&](int64_t i) { return rows(p, i * block, std::min(p.rows, (i + 1) * block)); };
  return parallel_for((p.rows + block - 1) / block, p.num_threads, task);
}

int check_targets(const QfCrossEntropyParams& p) {
  for (int64_t row = 0; row < p.rows; row++) {
    const int32_t target = p.targets[row];
    if (target == p.ignore_index || (target >= 0 && target < p.columns)) continue;
    // The ends of int32 stand for int64 targets beyond it, too.
    const char* beyond = target == INT32_MAX ? " or more" : target == INT32_MIN ? " or less" : "";
    return fail(QF_BAD_VALUE, "targets has %d%s at row %lld; allowed: 0 to %lld, or ignore_index %d", target, beyond,
                LongLong(row), LongLong(p.columns - 1), p.ignore_index);
  }
  return QF_OK;
}

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
  if (int status = qf::check(*params, "x")) return status;
  return qf::run(*params, QF_PICK(isa, softmax_rows));
}

extern "C" int qf_cpu_layer_norm(const QfRowsParams* params, void*) {
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  if (int status = qf::check(*params, "x")) return status;
  return qf::run(*params, QF_PICK(isa, layer_norm_rows));
}

extern "C" int qf_cpu_cross_entropy(const QfCrossEntropyParams* params, void*) {
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  if (int status = qf::check(*params, "logits")) return status;
  if (int status = qf::check_targets(*params)) return status;
  if (int status = qf::run(*params, QF_PICK(isa, cross_entropy_rows))) return status;
  if (params->total) *params->total = qf::total_of(*params);
  return QF_OK;
}
