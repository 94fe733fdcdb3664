// Which scores a library serves: with -DQF_PLAIN_SCORES=1 those that are a positive factor times q . k, with 0 the
// others (column `per_scores` of dispatch.KERNELS). Without the definition it serves both.
#pragma once

#include <type_traits>

#include "qflash.h"

namespace qf {

#ifdef QF_PLAIN_SCORES
constexpr bool kServesPlain = QF_PLAIN_SCORES, kServesOthers = !QF_PLAIN_SCORES;
#else
constexpr bool kServesPlain = true, kServesOthers = true;
#endif

// use(std::true_type) where scores are plain, use(std::false_type) where not. What the library does not serve is not
// compiled.
template <class Use>
int by_scores(bool plain, Use use) {
  if constexpr (kServesPlain)
    if (plain) return use(std::true_type());
  if constexpr (kServesOthers)
    if (!plain) return use(std::false_type());
  return QF_UNSUPPORTED;
}

}  // namespace qf
