/* The one header that all parts share: parameter structs, status codes, entry prototypes.
 *
 * Plain C with no framework and no CUDA header, so the CPU engine, each CUDA kernel library, the pybind11
 * module and the XLA handlers all see the same bytes. docs/numerics.md defines the terms; strides count elements,
 * never bytes. Optional pointers are NULL when absent.
 */
#ifndef QFLASH_H_
#define QFLASH_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum QfDtype { QF_F32 = 0, QF_F16 = 1, QF_BF16 = 2 };
/* Elements beyond QfDtype, of keys, values and the arrays of other operations. */
enum QfOpDtype { QF_I8 = 3, QF_I32 = 4, QF_E4M3 = 5 };
enum QfPrecision { QF_NATIVE = 0, QF_INT8 = 1, QF_INT8_FP8 = 2 };
enum QfRounding { QF_NEAREST = 0, QF_STOCHASTIC = 1 };

/* Status of an entry. Values below QF_BAD_VALUE are cudaError_t codes. */
enum QfStatus {
  QF_OK = 0,
  QF_BAD_VALUE = 100000,   /* an array holds a value out of range: qf_status_text() names it */
  QF_UNSUPPORTED = 100001, /* the entry cannot serve these parameters; dispatch should have rejected them */
  QF_NO_MEMORY = 100002,   /* scratch memory could not be allocated */
  QF_BAD_ABI = 100003,     /* struct_bytes does not match: caller and library were built from different headers */
  QF_INTERRUPTED = 100004, /* the caller asked a CPU entry to stop: results are incomplete */
};

/* [batch, length, heads, head_dim]; head_dim is contiguous. Packed (varlen) tensors have stride_b = 0. */
typedef struct QfTensor {
  void* data;
  int64_t stride_b, stride_t, stride_h;
} QfTensor;

/* Rotary embedding. Pair p of a head is (x[p], x[p + rotary_dim/2]) or, interleaved, (x[2p], x[2p+1]);
 * it is rotated by the angle whose cosine and sine are at [position, p]. Channels >= rotary_dim pass through.
 * The position of key j is j, that of query i is i + len_k - len_q, unless positions_* are given. A negative position
 * rotates backwards: row |position|, sine negated. */
typedef struct QfRope {
  const float* cos; /* [rows, rotary_dim/2] contiguous; NULL: no rope */
  const float* sin;
  const int32_t* positions_q; /* [batch, q_len], or [total_q] when packed */
  const int32_t* positions_k;
  int64_t stride_positions_q_b, stride_positions_k_b; /* 0 if one row applies to the whole batch, or packed */
  int32_t rows, rotary_dim, interleaved, reserved;
} QfRope;

/* Quantization parameters of one of q, k, v: x ~ scale * (value - zero_point). A token's scale is scale[b * stride_b +
 * h * stride_h + t / group]; one scale per tensor has stride_b = stride_h = 0 and a group larger than any token. */
typedef struct QfScales {
  float* scale;              /* NULL: not quantized */
  const int32_t* zero_point; /* [1]; NULL: symmetric, where a token of -128s is nonfinite */
  const int32_t* sums;       /* [batch, heads, length], of q and k if one of them has a zero point */
  int64_t stride_b, stride_h;
  int32_t group, reserved;
} QfScales;

/* The form of k and v. */
enum QfKvKind {
  QF_KV_ARRAYS = 0,    /* two arrays of QfAttnParams.dtype */
  QF_KV_QUANTIZED = 1, /* q and k are qflash.Quantized, and v may be */
  QF_KV_KEPT = 2,      /* the output of quantize_kv */
  QF_KV_PAGES = 3,     /* pages of a cache, elements of QfAttnParams.dtype */
  QF_KV_PAGES_INT8 = 4 /* pages of a cache in int8, with a scale for each token and head */
};

/* Keys and values. Fields that `kind` does not use are 0.
 *
 * QF_KV_ARRAYS: k and v.
 * QF_KV_QUANTIZED: k holds int8 with k_scales, less k_mean if that is given; v holds int8 with v_scales, or elements
 * of QfAttnParams.dtype.
 * QF_KV_KEPT: docs/kernels/sm90_int8.md has the layouts. k is [batch, k_len, kv_heads, head_dim rounded up to 16] in
 * int8, contiguous: smoothed, then multiplied by a Hadamard matrix in every 16 channels. k_scales.scale is
 * [batch, kv_heads, ceil(k_len / 64)], group is 64. v is an array of QfAttnParams.dtype, or in E4M3
 * [batch, kv_heads, head_dim, k_len rounded up to 128], keys permuted in every 16, of which only `data` is read; then
 * v_scales.scale is [batch, kv_heads] and v ~ byte * scale * 2^exponent + v_mean.
 * QF_KV_PAGES: k and v are pools of `pages` pages of page_size tokens; in their strides the page replaces the batch.
 * Token j of sequence b is token j % page_size of page page_table[b * page_table_stride + j / page_size]. kv_lens has
 * the number of tokens and is NULL only if there are no sequences. k_len is an upper bound on it: page_size times the
 * columns of the table, which is NULL if it has none. Entries of the table that no visible token needs are not read;
 * the contents of a page past the last token never affect a result. A needed entry outside 0 .. pages - 1 is rejected
 * on the CPU; on a GPU it makes the sequence's rows NaN, except that rows that see no key may be zeros. It is never
 * dereferenced.
 * QF_KV_PAGES_INT8: the same with int8 elements. Token t of a page has k_scales.scale[page * stride_b + h * stride_h +
 * t], and v_scales likewise; group is 1. k, rotated, less k_mean, then multiplied by the normalised Hadamard matrix in
 * every 16 channels (so head_dim is a multiple of 16), is ~ scale * value; v ~ scale * value. A nonfinite token has a
 * scale of NaN. k_mean is [kv_heads, head_dim], one for all sequences, or NULL. */
typedef struct QfKv {
  int32_t kind;             /* QfKvKind */
  int32_t k_dtype, v_dtype; /* QfDtype or QfOpDtype of the elements */
  int32_t page_size;        /* 0: no pages */
  QfTensor k, v;
  QfScales k_scales, v_scales;
  float *k_mean, *v_mean; /* [batch, kv_heads, head_dim] ([kv_heads, head_dim] of pages), subtracted; NULL: 0 */
  /* [batch, kv_heads]: number of nonfinite keys and values; NULL: unknown, every tile is checked */
  int32_t *k_nonfinite, *v_nonfinite;
  float* v_exponents;        /* [batch, kv_heads, ceil(k_len / 128)], integers */
  const int32_t* page_table; /* [batch, columns] */
  int64_t page_table_stride;
  int32_t pages, reserved; /* of a pool */
} QfKv;

/* rope rotates q and k before any other step. With QF_KV_QUANTIZED there is no rope, because it was applied before
 * quantization; with QF_KV_KEPT and pages it rotates only q. With pages, cu_seqlens_q is given without cu_seqlens_k: q
 * is packed, and the page table locates the keys. */
typedef struct QfAttnParams {
  int32_t struct_bytes;                                     /* sizeof(QfAttnParams) of the caller */
  int32_t dtype;                                            /* QfDtype of q (unless that is quantized) and out */
  int32_t precision;                                        /* QfPrecision */
  int32_t batch, q_len, k_len, q_heads, kv_heads, head_dim; /* packed: q_len, k_len are bounds */
  int32_t window_left, window_right; /* keys seen left/right of the diagonal j = i + len_k - len_q; -1 open.
                                        causal is window_right = 0 */
  float scale;                       /* multiplies q.k */
  float softcap;                     /* 0: none; else s -> softcap * tanh(s / softcap), before masking */
  int32_t num_threads;               /* CPU: 0 means the engine's default */
  int32_t rounding;                  /* QfRounding, if a kernel quantizes q and k to int8; stochastic uses seed */
  int32_t batch_invariant;           /* 1: the bits of a sequence's results do not depend on the rest of the batch */
  uint64_t seed;
  QfTensor q, out;
  float* lse; /* [batch, q_heads, q_len], or [q_heads, total_q] when packed; NULL: not wanted */
  int64_t lse_stride_b, lse_stride_h;
  const int32_t* kv_lens;      /* [batch]: number of keys of sequence b that exist; must be 0..len_k */
  const int32_t* cu_seqlens_q; /* [batch+1]: packed tensors; both or neither */
  const int32_t* cu_seqlens_k;
  QfRope rope;
  QfScales q_scales;       /* QF_KV_QUANTIZED: q holds int8. Both q and k have a zero point, or neither */
  const float* q_dot_mean; /* [batch, q_heads, q_len]: q . (what smoothing subtracted from k); NULL: use kv.k_mean */
  const float* sinks;      /* [q_heads]: an additional logit in each row's denominator, and in lse; NULL: none */
  QfKv kv;
  void* workspace; /* as many bytes as qf_<name>_workspace() returns; CUDA only */
  int64_t workspace_bytes;
  int64_t total_q, total_k; /* rows of packed q and k; unused otherwise */
} QfAttnParams;

/* Gradients. out and lse of `fwd` are inputs here (the forward pass's results); fwd's workspace is not used.
 * partial = 1: out, lse, dout and dlse are of attention over more keys than fwd has. dq, dk, dv and dsinks are then the
 * share of fwd's keys, and of the sinks if fwd has them: the shares of disjoint sets of keys add up to the gradients.
 */
typedef struct QfAttnBwdParams {
  int32_t struct_bytes; /* of this struct; fwd's own is checked too */
  int32_t partial;
  QfAttnParams fwd;
  QfTensor dout;       /* like out */
  const float* dlse;   /* like lse, same strides; NULL: zero */
  QfTensor dq, dk, dv; /* like q, k, v; every element is written */
  float* dsinks;       /* [q_heads]; NULL: not wanted, or there are no sinks */
  void* workspace;     /* as in QfAttnParams */
  int64_t workspace_bytes;
  int64_t ds_bytes; /* maximum size of dS in the workspace; 0: kernels recompute it for dq */
} QfAttnBwdParams;

/* Every forward kernel NAME exports
 *   int     qf_NAME(const QfAttnParams*, void* stream);
 *   int64_t qf_NAME_workspace(const QfAttnParams*);   (CUDA only)
 * and every kernel library exports
 *   const char* qf_status_text(int status);           (text of the last failure on this thread)
 * Entries never throw, never exit, never synchronise a device. */
int qf_cpu(const QfAttnParams* params, void* stream);
int qf_cpu_bwd(const QfAttnBwdParams* params, void* stream);
int qf_cpu_int8(const QfAttnParams* params, void* stream); /* QF_KV_ARRAYS and QF_KV_QUANTIZED */
const char* qf_cpu_status_text(int status);

/* "amx" (avx512 with AMX tiles), "avx512", "avx2" or "generic": what this machine runs, or what QFLASH_CPU_ISA
 * specified at load. */
const char* qf_cpu_isa(void);
int32_t qf_cpu_default_threads(void);
void qf_cpu_set_default_threads(int32_t n);

#ifdef __cplusplus
}
#endif

#endif /* QFLASH_H_ */
