// qf_cpu_merge: rows in blocks, on all threads.
#include "merge.h"

#include <algorithm>

#include "sizes.h"
#include "status.h"
#include "threads.h"

namespace {

constexpr int64_t kBlockElements = 1 << 15;  // worth a thread's while

}  // namespace

extern "C" int qf_cpu_merge(const QfMergeParams* params, void*) {
  const QfMergeParams& p = *params;
  if (p.struct_bytes != int32_t(sizeof p)) return QF_BAD_ABI;
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  const int64_t rows = int64_t(p.batch) * p.length * p.heads;
  const int64_t block = std::max<int64_t>(1, kBlockElements / std::max(1, p.head_dim));
  auto task = [&, merge = QF_PICK(isa, merge_rows)](int64_t i) {
    return merge(p, i * block, std::min(rows, (i + 1) * block));
  };
  return qf::parallel_for(qf::ceil_div(rows, block), p.num_threads, task);
}
