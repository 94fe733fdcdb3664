#include "emulate/runtime/cuda.h"

namespace emulate {

thread_local bool has_context = false;

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType element, cuuint32_t rank, void* base,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle row, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  bool good = rank == 4 && base && reinterpret_cast<uintptr_t>(base) % 16 == 0;
  good &= box[0] * element == cuuint32_t(row) && box[1] >= 1 && box[1] <= 256 && box[2] == 1 && box[3] == 1;
  for (int i = 0; i < 4; ++i) good &= sizes[i] >= 1 && sizes[i] <= uint64_t(1) << 32 && steps[i] == 1;
  for (int i = 0; i < 3; ++i) good &= strides[i] % 16 == 0 && strides[i] < uint64_t(1) << 40;
  if (!good) return CUDA_ERROR_INVALID_VALUE;
  *map = {static_cast<const char*>(base), {}, {element}, int(box[1]), row};
  for (int i = 0; i < 4; ++i) map->size[i] = int64_t(sizes[i]);
  for (int i = 0; i < 3; ++i) map->stride[i + 1] = int64_t(strides[i]);
  return CUDA_SUCCESS;
}

}  // namespace emulate
