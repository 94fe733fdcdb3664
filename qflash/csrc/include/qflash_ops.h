/* Parameter structs of the operations beside attention: quantization, INT8 products, row reductions.
 *
 * As in qflash.h: plain C, strides count elements, optional pointers are NULL when absent, `num_threads` is the CPU's.
 * Every kernel NAME of an operation exports, with that operation's struct P,
 *   int     qf_NAME(const P*, void* stream);
 *   int64_t qf_NAME_workspace(const P*);     (CUDA only)
 *   const char* qf_status_text(int status);  (CUDA: one per library; the CPU engine: qf_cpu_status_text)
 */
#ifndef QFLASH_OPS_H_
#define QFLASH_OPS_H_

#include "qflash.h"

#ifdef __cplusplus
extern "C" {
#endif

enum QfGranularity { QF_PER_TENSOR = 0, QF_PER_GROUP = 1 }; /* of scales; group: `group` consecutive tokens of a head */

/* x [batch, length, heads, head_dim] -> int8 of the same shape, and what undoes it: x ~ scale * (value - zero_point)
 * + mean. Symmetric: values -127 .. 127, zero_point 0; a token that holds NaN or an infinity is -128 throughout, and
 * the scale of a group that has no other tokens is NaN. Asymmetric (per tensor only): values -128 .. 127; NaN or an
 * infinity anywhere makes the scale NaN and every value 0. Tokens from lens[b] on do not exist: value 0, no part in
 * scales. docs/kernels/quantize.md defines every step to the bit.
 *
 * Packed (cu_seqlens given): x and values are [total, heads, head_dim] with stride_b = 0, `length` is the longest
 * sequence, groups count from each sequence's start, and scale, sums and q_dot_mean keep their padded shapes, indexed
 * by the token's place in its sequence. A sequence whose description is out of range is not read: its scales are NaN.
 */
typedef struct QfQuantizeParams {
  int32_t struct_bytes, dtype;
  int32_t batch, length, heads, head_dim;
  int32_t granularity, group, symmetric, rounding;
  int32_t num_threads;
  int32_t smooth;   /* 1: mean is found and taken off */
  int32_t reserved; /* 0 */
  int32_t queries; /* 0: token t stands at t, or at rope.positions_k. 1: at t + len_k - len_q, or at rope.positions_q */
  uint64_t seed;   /* of stochastic rounding */
  QfTensor x, values;
  float* scale;              /* per tensor: [1]; per group: [batch, heads, ceil(length / group)] */
  int32_t* zero_point;       /* [1]; NULL when symmetric */
  int32_t* sums;             /* [batch, heads, length]: sum of a token's values; NULL: not wanted */
  float* mean;               /* [batch, heads, head_dim]: what smoothing takes off; NULL without it */
  const int32_t* lens;       /* [batch]; NULL: every token exists */
  const int32_t* cu_seqlens; /* [batch+1]; NULL: not packed */
  int64_t total;             /* tokens of packed x; unused otherwise */
  QfRope rope;
  const int32_t* key_lens; /* with `queries`: where len_k comes from. As kv_lens, cu_seqlens_k, k_len of QfAttnParams */
  const int32_t* cu_seqlens_k;
  int32_t key_length;
  int32_t kv_heads;    /* heads is a multiple of it */
  const float* k_mean; /* [batch, kv_heads, head_dim] */
  float* q_dot_mean;   /* [batch, heads, length]: rotated token . k_mean of its head's group; NULL: not wanted */
  int32_t* nonfinite;  /* [batch, heads]: how many tokens are not finite; NULL: not wanted. Only with smooth; CUDA */
  void* workspace;
  int64_t workspace_bytes;
} QfQuantizeParams;

/* The way back: out <- scale * (value - zero_point) + mean, in `dtype`. Symmetric: -128 is NaN. */
typedef struct QfDequantizeParams {
  int32_t struct_bytes, dtype;
  int32_t batch, length, heads, head_dim;
  int32_t granularity, group, symmetric, num_threads;
  QfTensor values, out;
  const float* scale;
  const int32_t* zero_point;
  const float* mean;
} QfDequantizeParams;

/* k and v, arrays of `dtype`, to what `kv` describes: QF_KV_KEPT, of which every array is written. precision is QF_INT8
 * (kv.v is not written: v is kept as it is, and not read here) or QF_INT8_FP8. The other fields are those of
 * QfAttnParams. */
typedef struct QfQuantizeKvParams {
  int32_t struct_bytes, dtype, precision;
  int32_t batch, k_len, kv_heads, head_dim;
  int32_t rounding, num_threads, reserved;
  uint64_t seed;
  QfTensor k, v;
  const int32_t* kv_lens;
  const int32_t* cu_seqlens_k;
  int64_t total_k;
  QfRope rope;
  QfKv kv;
} QfQuantizeKvParams;

/* New tokens of k and v, arrays of `dtype`, into the pages that `kv` describes (QF_KV_PAGES, QF_KV_PAGES_INT8). kv_lens
 * counts them already: of sequence b's n new tokens, token t becomes token kv_lens[b] - n + t, and rope rotates k by
 * that position, or by rope.positions_k. n is k_len, or packed cu_seqlens_k[b + 1] - cu_seqlens_k[b]. A sequence of
 * which a new token would fall below 0, past the table or into a page outside 0 .. pages - 1 is refused on the CPU; on
 * a GPU such tokens are not written. Nothing else of the pages is touched. */
typedef struct QfKvWriteParams {
  int32_t struct_bytes, dtype;
  int32_t batch, k_len, kv_heads, head_dim; /* packed: k_len is a bound */
  int32_t columns;                          /* of kv.page_table */
  int32_t num_threads;
  QfTensor k, v;
  const int32_t* kv_lens;      /* [batch] */
  const int32_t* cu_seqlens_k; /* [batch + 1]; NULL: not packed */
  int64_t total_k;
  QfRope rope;
  QfKv kv;
} QfKvWriteParams;

/* out[i, j] = a_scale[i] * b_scale[j] * sum_k a[i, k] b[k, j] + bias[j]; sums are exact in int32. */
typedef struct QfInt8MatmulParams {
  int32_t struct_bytes, out_dtype; /* QF_F32, QF_F16, QF_BF16, or QF_I32 (no scales, no bias) */
  int64_t m, n, k;
  const int8_t *a, *b;
  int64_t a_stride_m; /* k is contiguous in a */
  int64_t b_stride_k, b_stride_n;
  const float *a_scale, *b_scale;         /* NULL: 1 */
  int64_t a_scale_stride, b_scale_stride; /* 0: one scale for all rows (columns); 1: one each */
  const float* bias;                      /* [n]; NULL: 0 */
  void* out;
  int64_t out_stride_m; /* n is contiguous in out */
  int32_t num_threads, reserved;
  void* workspace;
  int64_t workspace_bytes;
} QfInt8MatmulParams;

/* Attention on some keys (a) and on others (b) to attention on both: out <- a exp(a_lse - lse) + b exp(b_lse - lse)
 * with lse <- log(exp(a_lse) + exp(b_lse)). A row of lse -inf takes no part. Packed tensors are a batch of one. */
typedef struct QfMergeParams {
  int32_t struct_bytes;
  int32_t dtype, b_dtype; /* QfDtype of a and out; of b */
  int32_t batch, length, heads, head_dim;
  int32_t num_threads;
  QfTensor a, b, out;
  const float *a_lse, *b_lse; /* [batch, heads, length], of any strides */
  int64_t a_lse_stride_b, a_lse_stride_h, a_lse_stride_t;
  int64_t b_lse_stride_b, b_lse_stride_h, b_lse_stride_t;
  float* lse; /* [batch, heads, length], contiguous */
} QfMergeParams;

/* out <- x with every head of a token rotated by the token's position; with `inverse` rotated back, which is the
 * gradient of that. Token t of sequence b stands at positions[b, t] where these are given, else where rope.positions_k
 * says, else at t. A position outside the table is refused on the CPU; on a GPU the channels it rotates become NaN.
 * Packed tensors are a batch of one. */
typedef struct QfRopeParams {
  int32_t struct_bytes, dtype;
  int32_t batch, length, heads, head_dim;
  int32_t inverse, num_threads;
  QfTensor x, out;
  const int32_t* positions;   /* [batch, length]; NULL: none */
  int64_t stride_positions_b; /* 0: one row serves the whole batch */
  QfRope rope;
} QfRopeParams;

/* softmax and layer_norm: one result row per row of x [rows, columns], columns contiguous. */
typedef struct QfRowsParams {
  int32_t struct_bytes, dtype;
  int64_t rows, columns;
  const void* x;
  int64_t x_stride;
  void* out;
  int64_t out_stride;
  float scale;               /* softmax of scale * x */
  float eps;                 /* layer_norm */
  const void *weight, *bias; /* layer_norm: [columns] in dtype; NULL: 1 and 0 */
  float *mean, *rstd;        /* layer_norm: [rows]; NULL: not wanted */
  int32_t num_threads, reserved;
} QfRowsParams;

/* losses[i] = lse_i - (1 - label_smoothing) logits[i, targets[i]] - label_smoothing mean(logits[i]); 0 where ignored.
 */
typedef struct QfCrossEntropyParams {
  int32_t struct_bytes, dtype;
  int64_t rows, columns;
  const void* logits;
  int64_t logits_stride;
  const int32_t* targets; /* [rows]; ignore_index, or 0 .. columns-1 (else: the loss is NaN, on the CPU a refusal) */
  int32_t ignore_index;
  float label_smoothing;
  float* losses; /* [rows] */
  float* lse;    /* [rows]; NULL: not wanted */
  float* total;  /* [1]: sum of the losses, or their mean over rows not ignored; NULL: not wanted */
  int32_t mean, num_threads;
} QfCrossEntropyParams;

/* dx <- scale * out * (dout - rowsum(out * dout)): the gradient of softmax, from its result. */
typedef struct QfSoftmaxBwdParams {
  int32_t struct_bytes, dtype;
  int64_t rows, columns;
  const void *out, *dout; /* [rows, columns], columns contiguous */
  int64_t out_stride, dout_stride;
  void* dx;
  int64_t dx_stride;
  float scale;
  int32_t num_threads;
} QfSoftmaxBwdParams;

/* Gradients of layer_norm. With z = (x - mean) rstd and g = dout * weight
 *   dx = rstd (g - rowmean(g) - z rowmean(g z)) + dmean / columns - z drstd rstd^2 / columns
 *   dweight = sum over rows of dout z,   dbias = sum over rows of dout
 * The sums over rows are taken in an order that depends on the shape alone. */
typedef struct QfLayerNormBwdParams {
  int32_t struct_bytes, dtype;
  int64_t rows, columns;
  const void *x, *dout; /* [rows, columns], columns contiguous */
  int64_t x_stride, dout_stride;
  const void* weight;         /* [columns] in dtype; NULL: 1 */
  const float *mean, *rstd;   /* [rows], as the forward pass gave them */
  const float *dmean, *drstd; /* [rows]: gradients of these; NULL: zero */
  void* dx;
  int64_t dx_stride;
  void *dweight, *dbias; /* [columns] in dtype; NULL: not wanted */
  int32_t num_threads;
  int32_t sums; /* 1: dweight or dbias is wanted, and there is a workspace for them */
  void* workspace;
  int64_t workspace_bytes;
} QfLayerNormBwdParams;

/* dlogits[i] <- (w_i + dlse[i]) softmax(logits[i]) - w_i ((1 - label_smoothing) [j = targets[i]] + label_smoothing /
 * columns). w_i is dlosses[i] and dtotal, which `mean` divides by the number of rows not ignored; 0 where row i is. */
typedef struct QfCrossEntropyBwdParams {
  int32_t struct_bytes, dtype;
  int64_t rows, columns;
  const void* logits;
  int64_t logits_stride;
  const int32_t* targets;     /* as in QfCrossEntropyParams; a bad one makes its row NaN, on the CPU it is refused */
  const float* lse;           /* [rows], as the forward pass gave it */
  const float* dlosses;       /* [rows] */
  const float *dlse, *dtotal; /* [rows]; [1]; NULL: zero */
  void* dlogits;
  int64_t dlogits_stride;
  int32_t ignore_index;
  float label_smoothing;
  int32_t mean, num_threads;
  void* workspace;
  int64_t workspace_bytes;
} QfCrossEntropyBwdParams;

int qf_cpu_softmax(const QfRowsParams* params, void* stream);
int qf_cpu_layer_norm(const QfRowsParams* params, void* stream);
int qf_cpu_cross_entropy(const QfCrossEntropyParams* params, void* stream);
int qf_cpu_softmax_bwd(const QfSoftmaxBwdParams* params, void* stream);
int qf_cpu_layer_norm_bwd(const QfLayerNormBwdParams* params, void* stream);
int qf_cpu_cross_entropy_bwd(const QfCrossEntropyBwdParams* params, void* stream);
int qf_cpu_int8_matmul(const QfInt8MatmulParams* params, void* stream);
int qf_cpu_quantize(const QfQuantizeParams* params, void* stream);
int qf_cpu_dequantize(const QfDequantizeParams* params, void* stream);
int qf_cpu_merge(const QfMergeParams* params, void* stream);
int qf_cpu_rope(const QfRopeParams* params, void* stream);
int qf_cpu_kv_write(const QfKvWriteParams* params, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* QFLASH_OPS_H_ */
