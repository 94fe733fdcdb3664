// The backward pass in two halves: backward.cc decides which thread computes what and in which order; the kernels
// below, one set per instruction set, do the arithmetic of one tile.
//
// A tile is kBwdBlock queries of one head by kBwdBlock keys. With S = q k^T, P = exp(scale S - lse) and
// delta = rowsum(dout * out) - dlse, it contributes
//   dV += P^T dout     dS = P * (dout V^T - delta)     dK += scale dS^T q     dQ += scale dS k
// The factor `scale` of dK and dQ is applied once, when they are stored.
#pragma once

#include "isa.h"
#include "qflash.h"
#include "sequence.h"
#include "sizes.h"

namespace qf {

constexpr int kBwdBlock = 96;        // a multiple of every register block, rows and columns, of every instruction set
constexpr int kBwdRowMultiple = 24;  // register blocks are 6 or 8 rows high; rows of queries are padded for both

// Which pairs of a tile see each other: row + low <= column < row + high, inside rows x columns.
struct TileMask {
  int rows, columns, low, high;
};

// Up to kBwdBlock queries of one head as float32 rows of `pitch` floats; rotated, zero beyond head_dim.
struct QueryTile {
  float *q, *dout, *dq;      // [rows][pitch]
  float *minus_lse, *delta;  // [rows]; minus_lse in base 2, and -inf where a row sees nothing: P is 0 there
  bool* finite;              // whether q and dout hold neither NaN nor infinity
};

// Up to kBwdBlock keys and values of one head, and the products of the current tile: one thread's scratch.
struct KeyBlock {
  float* k;          // [kBwdBlock][pitch], rotated
  float *k_t, *v_t;  // [pitch][kBwdBlock]
  float *dk, *dv;    // [kBwdBlock][pitch]
  float *p, *ds;     // [kBwdBlock queries][kBwdBlock keys]
  bool finite;       // of k
};

struct BackwardKernels {
  int lanes;  // pitch is head_dim rounded up to a multiple of this
  // Not for a sequence without keys: there is no position to rotate its queries to.
  void (*load_queries)(const QfAttnBwdParams&, const Sequence&, int head, int64_t first, int count, const QueryTile&);
  void (*load_keys)(const QfAttnBwdParams&, const Sequence&, int kv_head, int64_t first, int count, KeyBlock&);
  // P and dS of one tile.
  void (*probabilities)(const QfAttnBwdParams&, const QueryTile&, const TileMask&, const KeyBlock&);
  void (*add_to_keys)(const QfAttnBwdParams&, const QueryTile&, const TileMask&, const KeyBlock&);
  void (*add_to_queries)(const QfAttnBwdParams&, const QueryTile&, const TileMask&, const KeyBlock&);
  // Zero for a sequence without keys, whatever the tile holds.
  void (*store_queries)(const QfAttnBwdParams&, const Sequence&, int head, int64_t first, int count, const QueryTile&);
  // Also writes zero to the rows from `count` to `rows`, which belong to no key.
  void (*store_keys)(const QfAttnBwdParams&, const Sequence&, int kv_head, int64_t first, int count, int rows,
                     const KeyBlock&);
  // The contribution of the rows [first, first + count) of a head to the gradient of its sink.
  double (*sink_share)(const QfAttnBwdParams&, const Sequence&, int head, int64_t first, int64_t count);
};

// dsinks[h] = sum over the rows of head h of exp(sinks[h] - lse) (dlse - rowsum(dout * out)), in the order of rows.
int sink_gradient(const QfAttnBwdParams& params, const BackwardKernels& kernels);

}  // namespace qf

QF_DECLARE_PER_ISA(extern const BackwardKernels backward_kernels)
