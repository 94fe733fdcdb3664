// Addresses in a swizzled panel, for writers and readers.
#pragma once

namespace emulate {

// The address of byte i of a line in a swizzled panel: rows have row_bytes, and 8 lines begin every `eights` bytes.
inline unsigned swizzled(unsigned start, unsigned line, unsigned i, unsigned eights, unsigned row_bytes) {
  const unsigned byte = start + line / 8 * eights + line % 8 * row_bytes + i;
  return byte ^ (byte >> 7 & (row_bytes / 16 - 1)) << 4;
}

}  // namespace emulate
