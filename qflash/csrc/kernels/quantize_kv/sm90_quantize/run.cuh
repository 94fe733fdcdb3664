// Host side of the quantization pass, as the library `sm90_quantize` and as the first pass of `sm90_int8`.
#pragma once

#include "kernels/quantize_kv/sm90_quantize/launches.cuh"
#include "quant/tokens.cuh"

namespace qf {
namespace sm90_quantize {

inline bool rows_aligned(const QfTensor& x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (x.stride_b | x.stride_t | x.stride_h) % 8 == 0;
}
inline bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// A block processes kHeads heads of its tokens in sequence, if that leaves enough blocks: it is set up once, and rope's
// cosines hit L1.
constexpr int kHeads = 4;
constexpr int64_t kManyBlocks = 4096;

// Tiles of one head times heads times batch; false if they are too many for a grid.
inline bool deal_part(Part& part, int64_t tiles, int heads, int heads_each, int64_t batch, int64_t& blocks) {
  const int64_t head_blocks = ceil_of(heads, heads_each), count = tiles * head_blocks * batch;
  blocks += count;
  if (blocks > kMostBlocks) return false;
  part.blocks = uint32_t(count);
  part.heads_each = heads_each;
  part.heads = divider(uint32_t(head_blocks > 0 ? head_blocks : 1));
  part.tiles = divider(uint32_t(tiles > 0 ? tiles : 1));
  return true;
}

}  // namespace sm90_quantize

// quantize_kv: can `p.kv` hold what the pass writes?
inline bool writes_kept(const QfQuantizeKvParams& p) {
  if (p.precision != QF_INT8 && p.precision != QF_INT8_FP8) return false;
  return p.cu_seqlens_k || is_kept(p.kv, p.precision, p.dtype, p.batch, p.k_len, p.kv_heads, p.head_dim);
}

// quantize_kv as a pass without q.
inline QuantizeAll quantization_of(const QfQuantizeKvParams& p) {
  QuantizeAll all{};
  all.attn.batch = p.batch, all.attn.k_len = p.k_len, all.attn.kv_heads = p.kv_heads, all.attn.head_dim = p.head_dim;
  all.attn.kv_lens = p.kv_lens, all.attn.cu_seqlens_k = p.cu_seqlens_k, all.attn.total_k = p.total_k;
  all.attn.rope = p.rope;
  all.attn.kv.k = p.k, all.attn.kv.v = p.v;
  all.kv = kept_of(p.kv);
  all.rounding = p.rounding, all.seed = p.seed;
  return all;
}

// One or two launches; nothing waits for the host. Later work on the stream sees all results. many_blocks: from how
// many blocks on a block takes several heads; tests lower it.
template <class Element, int kHeadDim>
int run_sm90_quantize(const QuantizeAll& all, cudaStream_t stream, int64_t many_blocks = sm90_quantize::kManyBlocks) {
  using namespace sm90_quantize;
  using S = Shape<kHeadDim>;
  const QfAttnParams& p = all.attn;
  if (p.head_dim < 8 || p.head_dim > kHeadDim || p.head_dim % 8 != 0) return QF_UNSUPPORTED;
  const bool q = all.q.values, k = all.kv.k, v = all.kv.v;
  if (!aligned16(all.q.values) || !aligned16(all.kv.k) || !aligned16(all.kv.k_mean) || !aligned16(all.kv.v) ||
      !aligned16(all.kv.v_mean))
    return QF_UNSUPPORTED;

  Deal deal{};
  deal.vector = !(q && !rows_aligned(p.q)) && !(k && !rows_aligned(p.kv.k)) && !(v && !rows_aligned(p.kv.v));
  deal.table_vectors = rotate_vectorises(p.rope);
  const bool rotates = p.rope.cos && (q || k);
  const bool halves =
      deal.table_vectors && !p.rope.interleaved && int64_t(p.rope.rows) * p.rope.rotary_dim < kMostBlocks;
  const Reads reads = !deal.vector || all.rounding == QF_STOCHASTIC ? Reads::kAny
                      : !rotates                                    ? Reads::kVectors
                      : halves                                      ? Reads::kHalves
                                                                    : Reads::kAny;
  const auto heads_each = [&](int64_t tiles, int heads) { return tiles * heads * p.batch < many_blocks ? 1 : kHeads; };
  // Packed, up to two tiles of V belong to no key: one where the next sequence begins, one at the end.
  const int64_t v_tiles = ceil_of(p.k_len, kValueTile) + (p.cu_seqlens_k ? 2 : 0);
  int64_t blocks = 0;
  const int64_t q_tiles = ceil_of(p.q_len, S::kTokens), k_tiles = ceil_of(p.k_len, S::kTokens);
  if (q && !deal_part(deal.q, q_tiles, p.q_heads, heads_each(q_tiles, p.q_heads), p.batch, blocks))
    return QF_UNSUPPORTED;
  if (k && !deal_part(deal.k, k_tiles, p.kv_heads, heads_each(k_tiles, p.kv_heads), p.batch, blocks))
    return QF_UNSUPPORTED;
  if (v && !deal_part(deal.v, v_tiles, p.kv_heads, 1, p.batch, blocks)) return QF_UNSUPPORTED;

  const int64_t samples = int64_t(p.batch) * p.kv_heads * (int(k) + int(v));
  if (samples > kMostBlocks) return QF_UNSUPPORTED;
  if (samples > 0) {
    const Launch how = {samples, S::kSampleThreads, S::kSampleSharedBytes, stream};
    if (const int status = Launches<Element, kHeadDim>::sample(how, all, deal)) return status;
  }
  if (blocks == 0 && all.counter) blocks = 1;
  if (blocks == 0) return QF_OK;
  const Launch how = {blocks, S::kThreads, S::kSharedBytes, stream, samples > 0};
  if (reads == Reads::kAny) return Launches<Element, kHeadDim>::quantize_any(how, all, deal);
  return Launches<Element, kHeadDim>::quantize_vectors(how, reads, all, deal);
}

}  // namespace qf
