// qf_cpu_int8_matmul: checks, packs b, and passes blocks of out to this machine's kernel. See int8_matmul.h.
#include "int8_matmul.h"

#include <algorithm>

#include "isa.h"
#include "memory.h"
#include "sizes.h"
#include "status.h"
#include "threads.h"

namespace qf {
namespace {

constexpr int64_t kMostK = 131071;                   // -128 * -128 * k must fit an int32
constexpr int64_t kPackedBytes = int64_t(32) << 20;  // of b at a time, or one block of columns if that is more

int check(const QfLinearParams& p) {
  if (p.struct_bytes != int32_t(sizeof(QfLinearParams)))
    return fail(QF_BAD_ABI, "struct_bytes is %d; this library was built for %d", p.struct_bytes,
                int(sizeof(QfLinearParams)));
  if (p.m < 0 || p.n < 0 || p.k < 0)
    return fail(QF_UNSUPPORTED, "m, n, k are %lld, %lld, %lld; allowed: 0 and up", static_cast<long long>(p.m),
                static_cast<long long>(p.n), static_cast<long long>(p.k));
  if (p.k > kMostK)
    return fail(QF_UNSUPPORTED, "k is %lld; allowed: up to %lld, beyond which int32 sums could overflow",
                static_cast<long long>(p.k), static_cast<long long>(kMostK));
  if (p.out_dtype != QF_F32 && p.out_dtype != QF_F16 && p.out_dtype != QF_BF16 && p.out_dtype != QF_I32)
    return fail(QF_UNSUPPORTED, "out_dtype is %d; allowed: float32, float16, bfloat16, int32", p.out_dtype);
  if (p.bias_dtype != QF_F32 && p.bias_dtype != p.out_dtype)
    return fail(QF_UNSUPPORTED, "bias_dtype is %d; allowed: float32 or that of out, %d", p.bias_dtype, p.out_dtype);
  if (p.activation < QF_IDENTITY || p.activation > QF_SWIGLU)
    return fail(QF_UNSUPPORTED, "activation is %d; allowed: %d to %d", p.activation, QF_IDENTITY, QF_SWIGLU);
  return QF_OK;
}

const Int8MatmulKernel& kernel_for(Isa isa) {
#if defined(__x86_64__)
  if (has_amx()) return amx::int8_matmul_kernel;
  if (isa == Isa::kAvx512 && has_avx512_vnni()) return avx512::int8_matmul_kernel;
  if (isa != Isa::kGeneric) return avx2::int8_matmul_kernel;
#else
  (void)isa;
#endif
  return generic::int8_matmul_kernel;
}

// One task per block of columns: packed b is read once, from the cache.
int run_few_rows(const QfLinearParams& p, const Int8MatmulKernel& kernel) {
  auto multiply = [&](int64_t block) {
    char* const scratch = static_cast<char*>(thread_scratch(size_t(kernel.scratch_bytes(p))));
    if (!scratch) return fail(QF_NO_MEMORY, "no memory for a thread's scratch");
    kernel.multiply(p, 0, block * kernel.columns, nullptr, scratch);
    return int(QF_OK);
  };
  return parallel_for(ceil_div(p.n, kernel.columns), p.num_threads, multiply);
}

// All rows times as many blocks of columns as fit the memory for packed b; then the next.
int run(const QfLinearParams& p, const Int8MatmulKernel& kernel) {
  const int64_t block_bytes = kernel.block_bytes(p);
  const int64_t blocks = ceil_div(p.n, kernel.columns), row_tasks = ceil_div(p.m, kernel.rows);
  const int64_t at_once = std::min(blocks, std::max<int64_t>(1, kPackedBytes / std::max<int64_t>(1, block_bytes)));
  char* const packed = static_cast<char*>(call_scratch(size_t(at_once * block_bytes)));
  if (!packed)
    return fail(QF_NO_MEMORY, "no memory for %lld bytes of packed b", static_cast<long long>(at_once * block_bytes));
  int status = QF_OK;
  for (int64_t first = 0; first < blocks && status == QF_OK; first += at_once) {
    const int64_t count = std::min(at_once, blocks - first);
    auto pack = [&](int64_t task) {
      kernel.pack(p, (first + task) * kernel.columns, packed + task * block_bytes);
      return int(QF_OK);
    };
    // Rows innermost: concurrent threads read the same packed columns.
    auto multiply = [&](int64_t task) {
      const int64_t block = task / row_tasks, row = task % row_tasks * kernel.rows;
      char* const scratch = static_cast<char*>(thread_scratch(size_t(kernel.scratch_bytes(p))));
      if (!scratch) return fail(QF_NO_MEMORY, "no memory for a thread's scratch");
      kernel.multiply(p, row, (first + block) * kernel.columns, packed + block * block_bytes, scratch);
      return int(QF_OK);
    };
    status = parallel_for(count, p.num_threads, pack);
    if (status == QF_OK) status = parallel_for(count * row_tasks, p.num_threads, multiply);
  }
  release_call_scratch();
  return status;
}

}  // namespace
}  // namespace qf

extern "C" int qf_cpu_int8_matmul(const QfLinearParams* params, void*) {
  if (int status = qf::check(*params)) return status;
  if (params->m == 0 || params->n == 0) return QF_OK;
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  const qf::Int8MatmulKernel& kernel = qf::kernel_for(isa);
  return params->m <= kernel.rows ? qf::run_few_rows(*params, kernel) : qf::run(*params, kernel);
}
