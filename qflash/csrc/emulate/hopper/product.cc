#include "emulate/hopper/product.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "emulate/complaint.h"
#include "emulate/floats.h"
#include "emulate/hopper/swizzle.h"

namespace emulate {

// Reads an operand as [lines][k] by its descriptor. transposed: each row in shared memory has one k of all lines of a
// panel, and panels are consecutive.
static void read_matrix(float (*to)[32], int lines, uint64_t descriptor, bool transposed, const Product& product,
                        const char* s_block) {
  const unsigned start = descriptor << 4 & 0x3fff0, panels = descriptor >> 12 & 0x3fff0,
                 eights = descriptor >> 28 & 0x3fff0;
  const uint64_t swizzle = descriptor >> 62;
  if (swizzle != 1 && swizzle != 2) complain("a descriptor is of neither the 128-byte nor the 64-byte swizzle");
  const unsigned row_bytes = swizzle == 1 ? 128 : 64, bytes = unsigned(product.element_bytes);
  const int in_panel = int(row_bytes / bytes);
  for (int line = 0; line < lines; ++line)
    for (int k = 0; k < 32 / product.element_bytes; ++k) {
      const unsigned byte =
          transposed ? swizzled(start + line / in_panel * panels, k, line % in_panel * bytes, eights, row_bytes)
                     : swizzled(start, line, k * bytes, eights, row_bytes);
      uint16_t bits = 0;
      if (byte + bytes <= unsigned(block_shared_bytes) && !async_memory.knows(s_block + byte, bytes))
        complain("a product reads what a thread wrote, without a fence between (fence_proxy_async), at byte " +
                 std::to_string(byte) + " of shared memory");
      if (byte + bytes <= unsigned(block_shared_bytes))
        memcpy(&bits, async_memory.bytes + cluster_offset(s_block) + byte, bytes);
      else
        complain("a product reads outside shared memory");
      to[line][k] = product.convert(bits);
    }
}

static Held& held_by(int thread, float* sums) {
  for (Held& held : hopper.threads[thread].held)
    if (held.sums == sums) return held;
  abort();  // unreachable: start_product() has added it
}

typedef float Lanes __attribute__((vector_size(16)));

static void compute(const Product& product, int first_thread) {
  const int k_count = 32 / product.element_bytes, in_word = 4 / product.element_bytes, bits = 8 * product.element_bytes;
  async_memory.publish();
  float a[64][32], b_lines[256][32];
  alignas(16) float b[32][256], row_sums[256];
  const char* const s_block = shared_memory(first_thread / block_threads);
  read_matrix(b_lines, product.n, product.b, product.transposed, product, s_block);
  for (int k = 0; k < k_count; ++k)
    for (int j = 0; j < product.n; ++j) b[k][j] = b_lines[j][k];
  if (!product.a_in_registers) read_matrix(a, 64, product.a, product.a_transposed, product, s_block);
  for (int t = 0; product.a_in_registers && t < 128; ++t)
    for (int word = 0; word < 4; ++word)
      for (int i = 0; i < in_word; ++i)
        a[t / 32 * 16 + t % 32 / 4 + word % 2 * 8][t % 4 * in_word + word / 2 * (4 * in_word) + i] =
            product.convert(uint16_t(product.of[t].a_was[word] >> bits * i & ((1u << bits) - 1)));
  for (int row = 0; row < 64; ++row) {
    std::fill_n(row_sums, product.n, 0.0f);
    for (int k = 0; k < k_count; ++k)
      for (int j = 0; j < product.n; j += 4)
        *reinterpret_cast<Lanes*>(row_sums + j) += a[row][k] * *reinterpret_cast<const Lanes*>(b[k] + j);
    for (int quad = 0; quad < 4; ++quad) {
      const int thread = row / 16 * 32 + row % 8 * 4 + quad;
      std::vector<float>& value = held_by(first_thread + thread, product.of[thread].sums).value;
      for (int j = 0; j < product.n / 8; ++j)
        for (int e = 0; e < 2; ++e) {
          float& sum = value[4 * j + row % 16 / 8 * 2 + e];
          const float more = row_sums[8 * j + 2 * quad + e];
          if (product.integers)
            sum = from_bits((product.add ? to_bits(sum) : 0) + uint32_t(int32_t(more)));
          else
            sum = (product.add ? sum : 0.0f) + more;
        }
    }
  }
}

void compute_next(Warpgroup& group) {
  const int64_t warpgroup = &group - hopper.warpgroups;
  observe(Event::kProductsFinish, int64_t(group.next), reinterpret_cast<const void*>(128 * warpgroup));
  for (const unsigned end = group.groups[group.next++].end; group.computed < end; ++group.computed)
    compute(group.products[group.computed - group.first_product], int(warpgroup) * 128);
}

}  // namespace emulate
