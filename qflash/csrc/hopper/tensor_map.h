// Tensor maps for the copy engine, made on the host. The encoder is the driver's, found at run time, so that a library
// needs no driver to be loaded.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

#include "hopper/descriptor.cuh"
#include "qflash.h"

namespace qf {

// Can the copy engine walk it: 16-bit elements, strides of whole 16 bytes? Those of dimensions that have one element do
// not count.
inline bool strides_map(const QfTensor& x, int64_t rows, int heads, int batch) {
  const auto whole = [](int64_t elements) { return elements % 8 == 0 && elements >= 0 && elements < (1ll << 38); };
  return (rows <= 1 || whole(x.stride_t)) && (heads <= 1 || whole(x.stride_h)) && (batch <= 1 || whole(x.stride_b));
}

// [batch, rows, heads, columns], of which columns are contiguous, in boxes of one panel of Tile: box_rows rows of one
// head, swizzled. Of 16-bit elements or, where Tile is, of bytes. x begins at whole 16 bytes. Returns a cudaError_t.
template <class Tile>
inline int encode_tensor_map(CUtensorMap& map, const QfTensor& x, int64_t columns, int64_t rows, int heads, int batch,
                             int box_rows) {
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
  const cuuint64_t sizes[4] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(heads), cuuint64_t(batch)};
  const auto bytes = [](int64_t stride, bool counts) { return cuuint64_t(counts ? stride * kElementBytes : 16); };
  const cuuint64_t strides[3] = {bytes(x.stride_t, rows > 1), bytes(x.stride_h, heads > 1),
                                 bytes(x.stride_b, batch > 1)};
  const cuuint32_t box[4] = {cuuint32_t(Tile::kPanelColumns), cuuint32_t(box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  // Their bits are copied as they are, so any type of that size does.
  const auto type = kElementBytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const auto swizzle = Tile::kRowBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const CUresult result = encode(&map, type, 4, x.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? int(cudaSuccess) : int(cudaErrorInvalidValue);
}

}  // namespace qf
