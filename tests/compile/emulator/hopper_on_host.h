// What Hopper adds to cuda_on_host.h: mbarriers, the copy engine, products of warpgroups, registers that change hands.
// They are as unkind as the hardware may be:
// - Copies arrive at once, or when nobody can go on without them; drawn from the block's seed.
// - Products are computed when their group is committed, or when nobody can go on without; drawn from the seed as well.
//   Sums are seen after the wait and read as NaN until then. To write to them, or to A in registers, is an error
//   meanwhile.
// - The four warps of a warpgroup must start, commit and wait for the same products in the same order.
// Not modelled: the fence between ordinary accesses to shared memory and those of the copy engine and wgmma.
#pragma once

#include <deque>
#include <set>

namespace host {

inline unsigned shared_offset(const void* s_pointer) {
  return unsigned(static_cast<const char*>(s_pointer) - shared_base);
}
inline std::string at_byte(const void* s_pointer) {
  return "at byte " + std::to_string(shared_offset(s_pointer)) + " of shared memory";
}

// A tensor as cuTensorMapEncodeTiled describes it: dimensions from the inside out.
struct TensorMap {
  const char* base;  // nullptr: nothing was encoded
  int64_t size[4], stride[4];
  int rows, row_bytes;  // of a box; swizzled, 64 bytes or 128
};

struct MbarrierState {
  int32_t bytes;  // still to come in this phase
  uint16_t pending;
  uint16_t arrivals : 15, parity : 1;
};
static_assert(sizeof(MbarrierState) == 8, "an mbarrier is 64 bits");

struct BoxCopy {
  char* s_to;
  TensorMap map;
  int at[4];
  MbarrierState* barrier;
};

// One wgmma of a warpgroup: what its threads must agree on, and what each of them brings.
struct Product {
  int n, element_bytes;
  bool integers, transposed, add;  // integers: the sums are
  uint64_t a, b;
  float (*convert)(uint16_t);
  bool a_in_registers = false;
  int copy = 0;  // of the code
  int started = 0;
  struct {
    float* sums;
    const uint32_t* a;
    uint32_t a_was[4];
  } of[128];
};

struct Group {
  unsigned end;       // the product after its last
  bool early;         // computed once committed
  int committed = 0;  // by how many threads
};

struct Warpgroup {
  std::deque<Product> products;
  unsigned first_product = 0;  // products[0], counted from the beginning
  std::vector<Group> groups;
  std::vector<std::pair<int, int>> waits;  // how many groups may be under way, how many threads have come
  unsigned computed = 0, waited = 0;       // products
  size_t next = 0;                         // the first group that is not computed
  int registers = 0, traded = 0;           // of a thread; threads that said so
};

// Sums of one thread, from the first product that adds to them to the wait for the last.
struct Held {
  float* sums;
  int count;
  unsigned last;  // product
  std::vector<float> value;
};

struct Multiplier {
  unsigned products = 0, groups = 0, waits = 0;  // passed
  unsigned done = 0;                             // products waited for
  bool fenced = false;
  int copy = 0;  // of the code that starts products
  std::vector<Held> held;
};

constexpr uint32_t kTaken = 0x7fc0dead;  // sums that belong to the tensor cores

struct Hopper : Extension {
  std::mt19937* order = nullptr;
  int threads = 0;
  std::set<const void*> barriers;
  std::vector<BoxCopy> late;
  Warpgroup warpgroups[8];
  Multiplier multipliers[1024];

  void begin(int count, std::mt19937& seeded) override {
    order = &seeded;
    threads = count;
    barriers.clear();
    late.clear();
    for (auto& one : warpgroups) one = Warpgroup();
    for (auto& one : multipliers) one = Multiplier();
  }
  bool idle() override;
  void end() override;
};
inline Hopper hopper;

inline void complete_if_due(MbarrierState& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.parity ^= 1;
  barrier.pending = barrier.arrivals;
}

inline MbarrierState& mbarrier(uint64_t* s_barrier) {
  if (!hopper.barriers.count(s_barrier)) fail("no mbarrier was initialised " + at_byte(s_barrier));
  return *std::launder(reinterpret_cast<MbarrierState*>(s_barrier));
}

inline void mbarrier_init(uint64_t* s_barrier, int arrivals) {
  hopper.barriers.insert(s_barrier);
  new (s_barrier) MbarrierState{0, uint16_t(arrivals), uint16_t(arrivals), 0};
}

inline void mbarrier_arrive(uint64_t* s_barrier, int bytes) {
  MbarrierState& barrier = mbarrier(s_barrier);
  if (barrier.pending == 0) fail("one arrival too many at the mbarrier " + at_byte(s_barrier));
  barrier.bytes += bytes;
  --barrier.pending;
  complete_if_due(barrier);
}

inline bool mbarrier_test(uint64_t* s_barrier, unsigned parity) { return mbarrier(s_barrier).parity != parity; }

inline void mbarrier_wait(uint64_t* s_barrier, unsigned parity) {
  mbarrier(s_barrier);
  Event event;
  event.happened = [](const void* object, unsigned parity) {
    return static_cast<const MbarrierState*>(object)->parity != parity;
  };
  event.name = [](const void* object, unsigned parity) {
    const auto& now = *static_cast<const MbarrierState*>(object);
    return "parity " + std::to_string(parity) + " of the mbarrier " + at_byte(object) + " (" +
           std::to_string(now.pending) + " arrivals and " + std::to_string(now.bytes) + " bytes to come)";
  };
  event.object = s_barrier;
  event.argument = parity;
  wait_for(event);
}

// Where byte i of a line lies whose rows of row_bytes make a swizzled panel, 8 lines every `eights` bytes.
inline unsigned swizzled(unsigned start, unsigned line, unsigned i, unsigned eights, unsigned row_bytes) {
  const unsigned byte = start + line / 8 * eights + line % 8 * row_bytes + i;
  return byte ^ (byte >> 7 & (row_bytes / 16 - 1)) << 4;
}

inline void perform(const BoxCopy& copy) {
  const TensorMap& map = copy.map;
  for (int row = 0; row < copy.map.rows; ++row)
    for (int i = 0; i < map.row_bytes / map.stride[0]; ++i) {
      const int64_t at[4] = {copy.at[0] + i, copy.at[1] + row, copy.at[2], copy.at[3]};
      const char* from = map.base;
      bool inside = true;
      for (int dim = 0; dim < 4; ++dim) {
        inside &= at[dim] >= 0 && at[dim] < map.size[dim];
        from += at[dim] * map.stride[dim];
      }
      char* const to =
          shared_base + swizzled(shared_offset(copy.s_to), row, i * map.stride[0], 8 * map.row_bytes, map.row_bytes);
      if (inside)
        memcpy(to, from, map.stride[0]);
      else
        memset(to, 0, map.stride[0]);
    }
  copy.barrier->bytes -= map.rows * map.row_bytes;
  complete_if_due(*copy.barrier);
}

inline void copy_box(void* s_to, const void* map, const int (&at)[4], uint64_t* s_barrier) {
  const BoxCopy copy = {static_cast<char*>(s_to),
                        *static_cast<const TensorMap*>(map),
                        {at[0], at[1], at[2], at[3]},
                        &mbarrier(s_barrier)};
  if (!copy.map.base) fail("the tensor map was not encoded");
  if (shared_offset(s_to) % 1024) fail("a swizzled box begins " + at_byte(s_to) + ", not at whole 1024");
  if (int64_t(shared_offset(s_to)) + copy.map.rows * copy.map.row_bytes > shared_size)
    fail("a box leaves shared memory");
  if (at[0] * copy.map.stride[0] % 16)
    fail("a box begins at column " + std::to_string(at[0]) + ", not at whole 16 bytes");
  if ((*hopper.order)() % 2)
    perform(copy);
  else
    hopper.late.push_back(copy);
}

inline void set_registers(int registers) {
  Warpgroup& group = hopper.warpgroups[threadIdx.x / 128];
  if (registers % 8 || registers < 24 || registers > 256)
    fail("nobody has " + std::to_string(registers) + " registers");
  if (group.traded && group.registers != registers) fail("warps of a warpgroup ask for different registers");
  if (++group.traded > 128) fail("registers change hands twice");
  group.registers = registers;
}

// [lines][k] of a product from a descriptor; transposed: lines run along k in shared memory, panels one after another.
inline void read_matrix(float (*to)[32], int lines, uint64_t descriptor, bool transposed, const Product& product) {
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
      if (byte + bytes <= unsigned(shared_size))
        memcpy(&bits, shared_base + byte, bytes);
      else
        complain("a product reads outside shared memory");
      to[line][k] = product.convert(bits);
    }
}

inline Held& held_by(int thread, float* sums) {
  for (Held& held : hopper.multipliers[thread].held)
    if (held.sums == sums) return held;
  abort();  // start_product() has seen to it
}

typedef float Lanes __attribute__((vector_size(16)));

inline void compute(const Product& product, int first_thread) {
  const int k_count = 32 / product.element_bytes, in_word = 4 / product.element_bytes, bits = 8 * product.element_bytes;
  float a[64][32], b_lines[256][32];
  alignas(16) float b[32][256], row_sums[256];
  read_matrix(b_lines, product.n, product.b, product.transposed, product);
  for (int k = 0; k < k_count; ++k)
    for (int j = 0; j < product.n; ++j) b[k][j] = b_lines[j][k];
  if (!product.a_in_registers) read_matrix(a, 64, product.a, false, product);
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

inline void compute_next(Warpgroup& group) {
  for (const unsigned end = group.groups[group.next++].end; group.computed < end; ++group.computed)
    compute(group.products[group.computed - group.first_product], int(&group - hopper.warpgroups) * 128);
}

inline bool Hopper::idle() {
  std::vector<Warpgroup*> ready;
  for (Warpgroup& group : warpgroups)
    if (group.next < group.groups.size() && group.groups[group.next].committed == 128) ready.push_back(&group);
  if (late.empty() && ready.empty()) return false;
  const size_t which = (*order)() % (late.size() + ready.size());
  if (which < ready.size()) {
    compute_next(*ready[which]);
    return true;
  }
  const auto copy = late.begin() + int(which - ready.size());
  perform(*copy);
  late.erase(copy);
  return true;
}

inline void start_product(float* sums, Product wanted, const uint32_t* a_registers) {
  wanted.a_in_registers = a_registers != nullptr;
  const int n = wanted.n;
  Warpgroup& group = hopper.warpgroups[threadIdx.x / 128];
  Multiplier& self = hopper.multipliers[threadIdx.x];
  if (!self.fenced) fail("wgmma without a fence since the last wait");
  wanted.copy = self.copy;
  const unsigned index = self.products++;
  if (index == group.first_product + group.products.size()) group.products.push_back(wanted);
  Product& product = group.products[index - group.first_product];
  if (product.n != n || product.a_in_registers != wanted.a_in_registers || product.transposed != wanted.transposed ||
      product.add != wanted.add || product.a != wanted.a || product.b != wanted.b)
    fail("threads of a warpgroup start different products");
  if (product.copy != wanted.copy) fail("warps of a warpgroup go through different copies of the code");
  ++product.started;
  auto& mine = product.of[threadIdx.x % 128];
  mine.sums = sums;
  mine.a = a_registers;
  if (a_registers) memcpy(mine.a_was, a_registers, sizeof mine.a_was);
  for (Held& held : self.held)
    if (held.sums == sums) {
      held.last = index;
      return;
    }
  self.held.push_back({sums, n / 2, index, std::vector<float>(sums, sums + n / 2)});
  std::fill_n(sums, n / 2, from_bits(kTaken));
}

inline void wgmma_fence() { hopper.multipliers[threadIdx.x].fenced = true; }

inline void wgmma_copy(int copy) { hopper.multipliers[threadIdx.x].copy = copy; }

inline void wgmma_commit() {
  Warpgroup& group = hopper.warpgroups[threadIdx.x / 128];
  Multiplier& self = hopper.multipliers[threadIdx.x];
  const unsigned index = self.groups++;
  if (index == group.groups.size()) group.groups.push_back({self.products, (*hopper.order)() % 2 == 0});
  Group& mine = group.groups[index];
  if (mine.end != self.products) fail("threads of a warpgroup commit different products");
  if (++mine.committed < 128 || !mine.early) return;
  while (group.next <= index) compute_next(group);
}

inline void wgmma_wait(int pending) {
  Warpgroup& group = hopper.warpgroups[threadIdx.x / 128];
  Multiplier& self = hopper.multipliers[threadIdx.x];
  const unsigned index = self.waits++;
  if (index == group.waits.size()) group.waits.push_back({pending, 0});
  if (group.waits[index].first != pending) fail("threads of a warpgroup wait for different products");
  const int done = int(self.groups) - pending;
  const unsigned end = done > 0 ? group.groups[done - 1].end : 0;
  if (++group.waits[index].second == 128) {  // all have looked at what the wait before was for
    for (; group.first_product < group.waited; ++group.first_product) group.products.pop_front();
    group.waited = end;
  }
  Event event;
  event.happened = [](const void* object, unsigned end) {
    return static_cast<const Warpgroup*>(object)->computed >= end;
  };
  event.name = [](const void* object, unsigned) {
    const auto* group = static_cast<const Warpgroup*>(object);
    return "products of warpgroup " + std::to_string(group - hopper.warpgroups) + ", the next of which " +
           std::to_string(group->groups[group->next].committed) + " threads have started";
  };
  event.object = &group;
  event.argument = end;
  wait_for(event);
  self.fenced = false;
  for (; self.done < end; ++self.done) {
    const auto& mine = group.products[self.done - group.first_product].of[threadIdx.x % 128];
    if (mine.a && memcmp(mine.a, mine.a_was, sizeof mine.a_was)) fail("A was changed before the wait for its product");
  }
  for (size_t i = self.held.size(); i-- > 0;) {
    Held& held = self.held[i];
    if (held.last >= end) continue;
    for (int e = 0; e < held.count; ++e) {
      if (memcmp(&held.sums[e], &kTaken, 4)) fail("sums were changed before the wait for their product");
      held.sums[e] = held.value[e];
    }
    self.held.erase(self.held.begin() + i);
  }
}

inline void Hopper::end() {
  if (!complaint.empty()) return;
  if (!late.empty()) complain("a copy that nobody waited for was under way at the end of a block");
  int registers = 0;
  for (int i = 0; i * 128 < threads; ++i) {
    const Warpgroup& group = warpgroups[i];
    if (group.traded != 0 && group.traded != 128) complain("a part of a warpgroup traded registers");
    registers += group.traded ? 128 * group.registers : 0;
    if (group.traded && registers > 65536 / threads / 8 * 8 * threads) complain("more registers than the block has");
  }
  for (int t = 0; t < threads; ++t)
    if (!multipliers[t].held.empty()) complain("a product was under way at the end of a block");
}

}  // namespace host

inline void __trap() { host::fail("a trap"); }
