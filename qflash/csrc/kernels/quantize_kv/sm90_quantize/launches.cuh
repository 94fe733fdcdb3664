// The launches of the quantization pass, each in one part of its library: the kernel for arbitrary layouts takes nvcc
// as long as all the others.
#pragma once

#include "common/elements.cuh"
#include "common/launch.cuh"
#include "common/parts.h"
#include "quant/sm90/params.cuh"
#if QF_IN_PART(1) || QF_IN_PART(2)
#include "kernels/quantize_kv/sm90_quantize/kernel.cuh"
#endif

namespace qf {
namespace sm90_quantize {

template <class Element, int kHeadDim>
struct Launches {
  static int sample(const Launch& how, const QuantizeAll& all, const Deal& deal);
  // reads: kVectors or kHalves.
  static int quantize_vectors(const Launch& how, Reads reads, const QuantizeAll& all, const Deal& deal);
  static int quantize_any(const Launch& how, const QuantizeAll& all, const Deal& deal);
};

#if QF_IN_PART(1)
template <class Element, int kHeadDim>
int Launches<Element, kHeadDim>::sample(const Launch& how, const QuantizeAll& all, const Deal& deal) {
  auto* const kernel = all.attn.rope.cos ? qf_sm90_quantize_sample_kernel<Element, kHeadDim, true>
                                         : qf_sm90_quantize_sample_kernel<Element, kHeadDim, false>;
  return launch(how, kernel, all, deal);
}

template <class Element, int kHeadDim>
int Launches<Element, kHeadDim>::quantize_vectors(const Launch& how, Reads reads, const QuantizeAll& all,
                                                  const Deal& deal) {
  auto* const kernel = reads == Reads::kVectors ? qf_sm90_quantize_kernel<Element, kHeadDim, Reads::kVectors>
                                                : qf_sm90_quantize_kernel<Element, kHeadDim, Reads::kHalves>;
  return launch(how, kernel, all, deal);
}
#endif

#if QF_IN_PART(2)
template <class Element, int kHeadDim>
int Launches<Element, kHeadDim>::quantize_any(const Launch& how, const QuantizeAll& all, const Deal& deal) {
  return launch(how, qf_sm90_quantize_kernel<Element, kHeadDim, Reads::kAny>, all, deal);
}
#endif

#ifdef QF_PART  // another part calls them
#if QF_IN_PART(1)
template int Launches<ElementOf<QF_DTYPE>::Type, QF_HEAD_DIM>::sample(const Launch&, const QuantizeAll&, const Deal&);
template int Launches<ElementOf<QF_DTYPE>::Type, QF_HEAD_DIM>::quantize_vectors(const Launch&, Reads,
                                                                                const QuantizeAll&, const Deal&);
#elif QF_IN_PART(2)
template int Launches<ElementOf<QF_DTYPE>::Type, QF_HEAD_DIM>::quantize_any(const Launch&, const QuantizeAll&,
                                                                            const Deal&);
#endif
#endif

}  // namespace sm90_quantize
}  // namespace qf
