// What Hopper adds to a block, as adversarial as the hardware may be: README.md lists how, and what is not modelled.
#pragma once

#include "emulate/hopper/cluster.h"
#include "emulate/hopper/copy.h"
#include "emulate/hopper/mbarrier.h"
#include "emulate/hopper/registers.h"
#include "emulate/hopper/store.h"
#include "emulate/hopper/wgmma.h"
