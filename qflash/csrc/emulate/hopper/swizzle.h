// Where bytes of a swizzled panel lie, for those who write them and those who read them.
#pragma once

namespace emulate {

// Where byte i of a line lies whose rows of row_bytes make a swizzled panel, 8 lines every `eights` bytes.
inline unsigned swizzled(unsigned start, unsigned line, unsigned i, unsigned eights, unsigned row_bytes) {
  const unsigned byte = start + line / 8 * eights + line % 8 * row_bytes + i;
  return byte ^ (byte >> 7 & (row_bytes / 16 - 1)) << 4;
}

}  // namespace emulate
