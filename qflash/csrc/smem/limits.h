// Shared memory per block, by architecture. Kernel configurations choose tiles that fit; the host does not check them.
#pragma once

namespace qf {

// Bytes a block may opt in to. arch: compute capability times ten.
constexpr int shared_limit(int arch) {
  return 1024 * (arch == 75                 ? 64
                 : arch == 86 || arch == 89 ? 99
                 : arch == 80 || arch == 87 ? 163
                 : arch >= 120              ? 99
                                            : 227);
}

}  // namespace qf
