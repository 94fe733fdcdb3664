// Replaces CUDA's header of the same name: tensor maps, encoded for the emulated TMA (hopper/copy.h).
#pragma once

#include "emulate/hopper/copy.h"

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_INVALID_CONTEXT = 201 };
enum CUtensorMapDataType {  // bytes
  CU_TENSOR_MAP_DATA_TYPE_UINT8 = 1,
  CU_TENSOR_MAP_DATA_TYPE_UINT16 = 2,
  CU_TENSOR_MAP_DATA_TYPE_UINT32 = 4
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_64B = 64, CU_TENSOR_MAP_SWIZZLE_128B = 128 };  // bytes of a row
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
using CUtensorMap = emulate::TensorMap;

namespace emulate {

// Does the calling thread have a context? On a GPU the first call that needs the device creates one; here only
// cudaSetDevice does, so that no code relies on such a call.
extern thread_local bool has_context;

// Rejects what the driver rejects, and boxes that copy_box() does not support.
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType element, cuuint32_t rank, void* base,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle row, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill);

}  // namespace emulate
