// qf_cpu_linear: checks, cuts out into blocks, and passes them to this machine's kernel. See linear.h.
#include "linear.h"

#include <algorithm>

#include "memory.h"
#include "sizes.h"
#include "status.h"
#include "threads.h"

namespace qf {
namespace {

constexpr int64_t kBlocksPerThread = 4;  // the target, so that no thread waits long for the last

int check(const QfLinearParams& p) {
  if (p.struct_bytes != int32_t(sizeof(QfLinearParams)))
    return fail(QF_BAD_ABI, "struct_bytes is %d; this library was built for %d", p.struct_bytes,
                int(sizeof(QfLinearParams)));
  if (p.m < 0 || p.n < 0 || p.k < 0)
    return fail(QF_UNSUPPORTED, "m, n, k are %lld, %lld, %lld; allowed: 0 and up", static_cast<long long>(p.m),
                static_cast<long long>(p.n), static_cast<long long>(p.k));
  if (p.dtype != QF_F32 && p.dtype != QF_F16 && p.dtype != QF_BF16)
    return fail(QF_UNSUPPORTED, "dtype is %d; allowed: float32, float16, bfloat16", p.dtype);
  if (p.out_dtype != QF_F32 && p.out_dtype != p.dtype)
    return fail(QF_UNSUPPORTED, "out_dtype is %d; allowed: float32 or the dtype, %d", p.out_dtype, p.dtype);
  if (p.bias_dtype != QF_F32 && p.bias_dtype != p.dtype)
    return fail(QF_UNSUPPORTED, "bias_dtype is %d; allowed: float32 or the dtype, %d", p.bias_dtype, p.dtype);
  if (p.activation < QF_IDENTITY || p.activation > QF_SWIGLU)
    return fail(QF_UNSUPPORTED, "activation is %d; allowed: %d to %d", p.activation, QF_IDENTITY, QF_SWIGLU);
  return QF_OK;
}

// `extent` in equal parts of at most `most`, each a multiple of `step`.
int64_t part_of(int64_t extent, int64_t most, int64_t step) {
  return round_up(ceil_div(extent, ceil_div(extent, most)), step);
}

// Blocks of out: as large as they may be, and smaller where there would be too few of them for all threads.
struct Cut {
  int64_t rows, columns, row_blocks, column_blocks;

  Cut(const QfLinearParams& p, const LinearKernel& kernel, int products) {
    const int32_t threads = resolve_threads(p.num_threads);
    const int64_t wanted = threads == 1 ? 1 : threads * kBlocksPerThread;
    const bool few = p.dtype == QF_F32 && p.m <= kernel.few_rows && p.w_stride_n != 1;
    const int64_t column_step = few ? kernel.few_columns : kernel.column_step;
    int64_t most_rows = kernel.most_rows / products, most_columns = few ? column_step : kernel.most_columns;
    while (true) {
      rows = part_of(p.m, most_rows, kernel.row_step);
      columns = part_of(p.n, most_columns, column_step);
      row_blocks = ceil_div(p.m, rows);
      column_blocks = ceil_div(p.n, columns);
      const bool more_rows = rows > 4 * kernel.row_step, more_columns = columns > column_step;
      if (row_blocks * column_blocks >= wanted || !(more_rows || more_columns)) return;
      if (more_columns && (columns > rows || !more_rows))
        most_columns = round_up(columns / 2, column_step);
      else
        most_rows = round_up(rows / 2, kernel.row_step);
    }
  }
};

// The kernel of this machine for arrays of `dtype`.
const LinearKernel& kernel_for(Isa isa, int32_t dtype) {
#if defined(__x86_64__)
  if (dtype == QF_BF16 && has_amx()) return amx_bf16::linear_bf16;
  if (dtype == QF_BF16 && has_avx512_bf16()) return avx512_bf16::linear_bf16;
#endif
  (void)dtype;
  return QF_PICK(isa, linear_floats);
}

}  // namespace

int run_linear(const LinearCall& call, Isa isa) {
  const QfLinearParams& p = call.p;
  if (p.m == 0 || p.n == 0) return QF_OK;
  const LinearKernel& kernel = kernel_for(isa, p.dtype);
  const int products = p.activation == QF_SWIGLU ? 2 : 1;
  const Cut cut(p, kernel, products);
  // Rows innermost: concurrent threads read the same columns of w.
  auto multiply = [&](int64_t task) {
    const int64_t row = task % cut.row_blocks * cut.rows, column = task / cut.row_blocks * cut.columns;
    const LinearBlock block = {row, column, int(std::min(cut.rows, p.m - row)),
                               int(std::min(cut.columns, p.n - column))};
    void* const scratch = thread_scratch(size_t(kernel.scratch_bytes(int(cut.rows), int(cut.columns), products)));
    if (!scratch) return fail(QF_NO_MEMORY, "no memory for a thread's scratch");
    return kernel.multiply(call, block, scratch);
  };
  return parallel_for(cut.row_blocks * cut.column_blocks, p.num_threads, multiply);
}

}  // namespace qf

extern "C" int qf_cpu_linear(const QfLinearParams* params, void*) {
  if (int status = qf::check(*params)) return status;
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  return qf::run_linear({*params, nullptr}, isa);
}
