// The two kernels of the quantization pass.
//
//   qf_sm90_quantize_sample_kernel   a block per head of K and of V: what each is smoothed and scaled by
//   qf_sm90_quantize_kernel          a block per tile of tokens and head (a few heads if they share cosines):
//                                    first those of q, then k, then v
//
// Threads keep their data in registers from load to store: 64 floats of q and k, 64 or 32 words of v. Nothing is read
// twice except the sample, rope's partners (which come from L1) and its tables. Shared memory: a word per warp, and the
// words of a tile of v staged for the store (16 KB at head_dim 128).
//
// The second kernel may start while the first still runs: its blocks for q need nothing from the sample except for
// q_dot_mean, and the others wait before they use it. Bound: memory.
#pragma once

#include "quant/sm90/keys.cuh"
#include "quant/sm90/queries.cuh"
#include "quant/sm90/sample.cuh"
#include "quant/sm90/values.cuh"

template <class Element, int kHeadDim, bool kRotated>
__global__ void __launch_bounds__(qf::sm90_quantize::Shape<kHeadDim>::kSampleThreads,
                                  (kRotated ? 512 : 1024) / qf::sm90_quantize::Shape<kHeadDim>::kSampleThreads)
    qf_sm90_quantize_sample_kernel(const __grid_constant__ qf::QuantizeAll all,
                                   const __grid_constant__ qf::sm90_quantize::Deal deal) {
  using namespace qf;
  extern __shared__ float4 s_memory[];
  let_next_grid_start();
  const int heads = all.attn.batch * all.attn.kv_heads;
  const bool of_keys = all.kv.k && int(blockIdx.x) < heads;
  const int head = int(blockIdx.x) - (all.kv.k && !of_keys ? heads : 0), b = head / all.attn.kv_heads;
  const int h = head - b * all.attn.kv_heads;
  if (of_keys)
    sm90_quantize::sample_keys<Element, kHeadDim, kRotated>(all, deal, b, h, reinterpret_cast<float*>(s_memory));
  else
    sm90_quantize::sample_values<Element, kHeadDim>(all, deal, b, h, reinterpret_cast<float*>(s_memory));
}

template <class Element, int kHeadDim, qf::sm90_quantize::Reads kReads>
__global__ void __launch_bounds__(qf::sm90_quantize::Shape<kHeadDim>::kThreads,
                                  qf::sm90_quantize::Shape<kHeadDim>::blocks(kReads))
    qf_sm90_quantize_kernel(const __grid_constant__ qf::QuantizeAll all,
                            const __grid_constant__ qf::sm90_quantize::Deal deal) {
  using namespace qf;
  extern __shared__ float4 s_memory[];
  const uint32_t block = blockIdx.x;
  if (block == 0 && threadIdx.x == 0 && all.counter) *all.counter = 0;
  const uint32_t before_v = deal.q.blocks + deal.k.blocks;
  if (block < deal.q.blocks)
    sm90_quantize::quantize_queries<Element, kHeadDim, kReads>(all, deal, block);
  else if (block < before_v)
    sm90_quantize::quantize_keys<Element, kHeadDim, kReads>(all, deal, block - deal.q.blocks,
                                                            reinterpret_cast<float*>(s_memory));
  else if (block < before_v + deal.v.blocks)
    sm90_quantize::quantize_values<Element, kHeadDim, kReads>(all, deal, block - before_v,
                                                              reinterpret_cast<uint32_t*>(s_memory));
}
