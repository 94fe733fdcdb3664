// softmax over rows, float32, one row at a time: the plainest kernel there can be.
#include <cmath>

#include "qflash_ops.h"
#include "status.h"
#include "threads.h"

extern "C" int qf_cpu_softmax(const QfRowsParams* params, void*) {
  const QfRowsParams& p = *params;
  if (p.struct_bytes != int32_t(sizeof(QfRowsParams))) return QF_BAD_ABI;
  if (p.dtype != QF_F32) return qf::fail(QF_UNSUPPORTED, "kernel 'cpu_softmax' takes float32");
  auto one_row = [&](int64_t row) {
    const float* x = static_cast<const float*>(p.x) + row * p.x_stride;
    float* out = static_cast<float*>(p.out) + row * p.out_stride;
    float greatest = p.scale * x[0];
    for (int64_t i = 1; i < p.columns; i++) greatest = std::fmax(greatest, p.scale * x[i]);
    float sum = 0;
    for (int64_t i = 0; i < p.columns; i++) sum += out[i] = std::exp(p.scale * x[i] - greatest);
    for (int64_t i = 0; i < p.columns; i++) out[i] /= sum;
    return int(QF_OK);
  };
  return qf::parallel_for(p.rows, p.num_threads, one_row);
}
