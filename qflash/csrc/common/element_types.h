// The 16-bit element types, as bits: the types by which instructions and tiles are selected.
#pragma once

#include <stdint.h>

#include "qflash.h"

namespace qf {

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

template <class Element>
constexpr bool kIsF16 = false;
template <>
constexpr bool kIsF16<F16> = true;

template <int kDtype>
struct ElementOf;
template <>
struct ElementOf<QF_F32> {
  using Type = float;
};
template <>
struct ElementOf<QF_F16> {
  using Type = F16;
};
template <>
struct ElementOf<QF_BF16> {
  using Type = BF16;
};

}  // namespace qf
