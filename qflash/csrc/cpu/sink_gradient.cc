// The gradient of sinks: every head's sum over its rows, in blocks that depend on the problem alone.
#include <algorithm>
#include <vector>

#include "backward.h"
#include "threads.h"

namespace qf {

int sink_gradient(const QfAttnBwdParams& params, const BackwardKernels& kernels) {
  constexpr int64_t kRows = 256;
  const QfAttnParams& p = params.fwd;
  struct Block {
    Sequence sequence;
    int64_t first, count;
  };
  std::vector<Block> blocks;
  for (int64_t batch = 0; batch < p.batch; batch++) {
    const Sequence s = sequence_of(p, batch);
    for (int64_t first = 0; first < s.len_q; first += kRows)
      blocks.push_back({s, first, std::min(kRows, s.len_q - first)});
  }
  const int64_t of_head = int64_t(blocks.size());
  std::vector<double> shares(size_t(p.q_heads * of_head));
  auto task = [&](int64_t i) {
    const Block& block = blocks[size_t(i % of_head)];
    shares[size_t(i)] = kernels.sink_share(params, block.sequence, int(i / of_head), block.first, block.count);
    return int(QF_OK);
  };
  if (int status = parallel_for(int64_t(shares.size()), p.num_threads, task)) return status;
  for (int head = 0; head < p.q_heads; head++) {
    double total = 0.0;
    for (int64_t i = 0; i < of_head; i++) total += shares[size_t(head * of_head + i)];
    params.dsinks[head] = float(total);
  }
  return QF_OK;
}

}  // namespace qf
