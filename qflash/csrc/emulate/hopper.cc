#include "emulate/hopper.h"

#include <vector>

#include "emulate/complaint.h"
#include "emulate/hopper/product.h"
#include "emulate/hopper/store.h"

namespace emulate {

bool Hopper::idle() {
  std::vector<Warpgroup*> ready;
  for (Warpgroup& group : warpgroups)
    if (group.next < group.groups.size() && group.groups[group.next].committed == 128) ready.push_back(&group);
  const size_t all = in_flight.size() + ready.size() + stores.size();
  if (all == 0) return false;
  size_t which = (*order)() % all;
  if (which < ready.size()) {
    compute_next(*ready[which]);
    return true;
  }
  which -= ready.size();
  if (which < stores.size()) {
    perform(stores[which]);
    stores.erase(stores.begin() + int(which));
    return true;
  }
  const auto copy = in_flight.begin() + int(which - stores.size());
  perform(*copy);
  in_flight.erase(copy);
  return true;
}

void Hopper::end() {
  if (!complaint.empty()) return;
  if (!in_flight.empty()) complain("a copy that nobody waited for was under way at the end of a block");
  if (!stores.empty()) complain("a store that nobody waited for was under way at the end of a block");
  for (int rank = 0; rank < cluster_blocks; ++rank) {
    int registers = 0;
    for (int i = 0; i * 128 < block_threads; ++i) {
      const Warpgroup& group = warpgroups[rank * block_threads / 128 + i];
      if (group.traded != 0 && group.traded != 128) complain("a part of a warpgroup traded registers");
      registers += group.traded ? 128 * group.registers : 0;
      if (group.traded && registers > 65536 / block_threads / 8 * 8 * block_threads)
        complain("more registers than the block has");
    }
  }
  for (int t = 0; t < cluster_blocks * block_threads; ++t)
    if (!threads[t].held.empty()) complain("a product was under way at the end of a block");
}

}  // namespace emulate
