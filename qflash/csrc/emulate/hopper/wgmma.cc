#include "emulate/hopper/wgmma.h"

#include <algorithm>
#include <cstring>

#include "emulate/complaint.h"
#include "emulate/floats.h"
#include "emulate/hopper/product.h"
#include "emulate/trace.h"

namespace emulate {

void start_product(float* sums, Product wanted, const uint32_t* a_registers) {
  wanted.a_in_registers = a_registers != nullptr;
  const int n = wanted.n;
  Warpgroup& group = own_warpgroup();
  ThreadProducts& own = own_products();
  if (!own.fenced) fail("wgmma without a fence since the last wait");
  wanted.copy = own.copy;
  const unsigned index = own.products++;
  if (index == group.first_product + group.products.size()) group.products.push_back(wanted);
  Product& product = group.products[index - group.first_product];
  if (product.n != n || product.a_in_registers != wanted.a_in_registers || product.transposed != wanted.transposed ||
      product.a_transposed != wanted.a_transposed || product.add != wanted.add || product.a != wanted.a ||
      product.b != wanted.b)
    fail("threads of a warpgroup start different products");
  if (product.copy != wanted.copy) fail("warps of a warpgroup go through different copies of the code");
  ++product.started;
  auto& mine = product.of[threadIdx.x % 128];
  mine.sums = sums;
  mine.a = a_registers;
  if (a_registers) memcpy(mine.a_was, a_registers, sizeof mine.a_was);
  for (Held& held : own.held)
    if (held.sums == sums) {
      held.last = index;
      return;
    }
  own.held.push_back({sums, n / 2, index, std::vector<float>(sums, sums + n / 2)});
  std::fill_n(sums, n / 2, from_bits(kTaken));
}

void wgmma_fence() { own_products().fenced = true; }

void wgmma_copy(int copy) { own_products().copy = copy; }

// Sets when the tensor cores finish a group, after all that was committed before it.
static void time_products(const Warpgroup& group, Group& mine) {
  uint64_t duration = 0;
  for (unsigned i = group.computed; i < mine.end; ++i)
    duration += uint64_t(group.products[i - group.first_product].n) / kWgmmaColumns;
  const bool from_registers =
      group.computed < mine.end && group.products[group.computed - group.first_product].a_in_registers;
  uint64_t& free = hopper.tensor_cores_free[rank_now()];
  const uint64_t begin = std::max(mine.committed_at, free);
  free = mine.finish = begin + duration;
  record("product", threadIdx.x / 32, begin, mine.finish, from_registers ? "A in registers" : "A in shared memory");
}

void wgmma_commit() {
  Warpgroup& group = own_warpgroup();
  ThreadProducts& own = own_products();
  const unsigned index = own.groups++;
  if (index == group.groups.size()) group.groups.push_back({own.products, (*order)() % 2 == 0});
  Group& mine = group.groups[index];
  observe(Event::kProductsCommit, index);
  if (mine.end != own.products) fail("threads of a warpgroup commit different products");
  mine.committed_at = std::max(mine.committed_at, now());
  if (++mine.committed < 128) return;
  if (timed) time_products(group, mine);
  if (!timed && !mine.early) return;
  while (group.next <= index) compute_next(group);
}

void wgmma_wait(int pending) {
  Warpgroup& group = own_warpgroup();
  ThreadProducts& own = own_products();
  const unsigned index = own.waits++;
  if (index == group.waits.size()) group.waits.push_back({pending, 0});
  if (group.waits[index].first != pending) fail("threads of a warpgroup wait for different products");
  const int done = int(own.groups) - pending;
  const unsigned end = done > 0 ? group.groups[done - 1].end : 0;
  if (++group.waits[index].second == 128) {  // all threads are done with the products of the previous wait
    for (; group.first_product < group.waited; ++group.first_product) group.products.pop_front();
    group.waited = end;
  }
  Condition condition;
  condition.happened = [](const void* object, unsigned end) {
    return static_cast<const Warpgroup*>(object)->computed >= end;
  };
  condition.name = [](const void* object, unsigned) {
    const auto* group = static_cast<const Warpgroup*>(object);
    return "products of warpgroup " + std::to_string((group - hopper.warpgroups) % (block_threads / 128)) +
           ", the next of which " + std::to_string(group->groups[group->next].committed) + " threads have started";
  };
  condition.object = &group;
  condition.argument = end;
  condition.since = [](const void* object, unsigned end) {
    uint64_t finish = 0;
    for (const Group& one : static_cast<const Warpgroup*>(object)->groups)
      if (one.end <= end) finish = std::max(finish, one.finish);
    return finish;
  };
  const uint64_t begin = now();
  wait_for(condition);
  waited(begin, "products");
  own.fenced = false;
  for (; own.done < end; ++own.done) {
    const auto& mine = group.products[own.done - group.first_product].of[threadIdx.x % 128];
    if (mine.a && memcmp(mine.a, mine.a_was, sizeof mine.a_was)) fail("A was changed before the wait for its product");
  }
  for (size_t i = own.held.size(); i-- > 0;) {
    Held& held = own.held[i];
    if (held.last >= end) continue;
    for (int e = 0; e < held.count; ++e) {
      if (memcmp(&held.sums[e], &kTaken, 4)) fail("sums were changed before the wait for their product");
      held.sums[e] = held.value[e];
    }
    own.held.erase(own.held.begin() + i);
  }
}

}  // namespace emulate
