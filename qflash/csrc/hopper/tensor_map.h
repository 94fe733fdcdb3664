// Tensor maps for TMA, encoded on the host. The encoder is the driver's, looked up at run time, so that a library can
// be loaded without a driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

#include "hopper/descriptor.cuh"

namespace qf {

// Four dimensions, innermost first; the innermost is contiguous. Strides are in elements; the stride of a dimension of
// size 1 is ignored.
struct TensorExtents {
  void* data;
  int64_t size[4];
  int64_t stride[3];  // of dimensions 1, 2 and 3
};

// Can TMA address it, with elements of `element_bytes`? The start of the data is not checked: the map requires 16-byte
// alignment.
inline bool strides_map(const TensorExtents& x, int element_bytes) {
  for (int i = 0; i < 3; ++i) {
    const int64_t bytes = x.stride[i] * element_bytes;
    if (x.size[i + 1] > 1 && (bytes % 16 != 0 || bytes < 0 || bytes >= (1ll << 39))) return false;
  }
  return true;
}

// Boxes of one panel of Tile: box_rows rows (dimension 1), swizzled. Elements are 16 bits or, if Tile's are, bytes or
// words. x.data is 16-byte aligned. promotion: how much L2 fetches if a box requests less. Returns a cudaError_t.
template <class Tile>
inline int encode_tensor_map(CUtensorMap& map, const TensorExtents& x, int box_rows,
                             CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static std::atomic<Encode> known{nullptr};  // the same for every thread that finds it
  Encode encode = known.load(std::memory_order_relaxed);
  if (!encode) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
    if (error != cudaSuccess) return error;
    if (status != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
    encode = reinterpret_cast<Encode>(found);
    known.store(encode, std::memory_order_relaxed);
  }
  constexpr int kElementBytes = Tile::kRowBytes / Tile::kPanelColumns;
  cuuint64_t sizes[4], strides[3];
  for (int i = 0; i < 4; ++i) sizes[i] = cuuint64_t(x.size[i]);
  for (int i = 0; i < 3; ++i) strides[i] = x.size[i + 1] > 1 ? cuuint64_t(x.stride[i] * kElementBytes) : 16;
  const cuuint32_t box[4] = {cuuint32_t(Tile::kPanelColumns), cuuint32_t(box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  // Element bits are copied unchanged, so any type of that size works.
  const auto type = kElementBytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : kElementBytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                         : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  const auto swizzle = Tile::kRowBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const auto encoded = [&] {
    return encode(&map, type, 4, x.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encoded();
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_INVALID_VALUE) {
    // A thread that has not used the GPU yet has no context: autograd's, for example. Several codes may say so.
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    if (const cudaError_t error = cudaSetDevice(device)) return error;
    result = encoded();
  }
  return int(result);  // an error that an earlier kernel left has the same number in cudaError_t
}

}  // namespace qf
