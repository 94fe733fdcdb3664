// What the entries of row operations share, forward and backward: checks, and rows cut into blocks for the threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "isa.h"
#include "status.h"
#include "threads.h"

namespace qf {

constexpr int64_t kBlockElements = 1 << 15;  // worth a thread's while
constexpr int64_t kMostColumns = 0x7fffffff;

// Params, here and below: one of the structs of row operations.
template <class Params>
int check_rows(const Params& p, const char* array) {
  if (p.struct_bytes != int32_t(sizeof(Params))) return QF_BAD_ABI;
  if (p.columns > kMostColumns)
    return fail(QF_UNSUPPORTED, "%s has %lld columns; allowed: up to 2^31 - 1", array,
                static_cast<long long>(p.columns));
  return QF_OK;
}

template <class Params>
int check_targets(const Params& p) {
  for (int64_t row = 0; row < p.rows; row++) {
    const int32_t target = p.targets[row];
    if (target == p.ignore_index || (target >= 0 && target < p.columns)) continue;
    // The ends of int32 also stand for int64 targets beyond them.
    const char* beyond = target == INT32_MAX ? " or more" : target == INT32_MIN ? " or less" : "";
    return fail(QF_BAD_VALUE, "targets has %d%s at row %lld; allowed: 0 to %lld, or ignore_index %d", target, beyond,
                static_cast<long long>(row), static_cast<long long>(p.columns - 1), p.ignore_index);
  }
  return QF_OK;
}

inline int64_t rows_of_block(int64_t columns) {
  return std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, columns));
}

// rows(p, begin, end, more...) for every block.
template <class Params, class Rows, class... More>
int run_rows(const Params& p, Rows rows, More... more) {
  const int64_t block = rows_of_block(p.columns);
  auto task = [&](int64_t i) { return rows(p, i * block, std::min(p.rows, (i + 1) * block), more...); };
  return parallel_for((p.rows + block - 1) / block, p.num_threads, task);
}

}  // namespace qf
