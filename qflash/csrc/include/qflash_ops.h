/* Parameter structs of the operations other than attention: quantization, linear layers, row reductions.
 *
 * As in qflash.h: plain C, strides count elements, optional pointers are NULL when absent, `num_threads` is for CPUs.
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

/* x [batch, length, heads, head_dim] -> int8 of the same shape, and the parameters that invert it:
 * x ~ scale * (value - zero_point) + mean. Symmetric: values -127 .. 127, zero_point 0; a nonfinite token is -128 in
 * all channels, and the scale of a group that has no other tokens is NaN. Asymmetric (per tensor only): values
 * -128 .. 127; NaN or an infinity anywhere makes the scale NaN and every value 0. Tokens from lens[b] on do not exist:
 * their values are 0, and scales ignore them. docs/kernels/quantize.md defines every step bit for bit.
 *
 * Packed (cu_seqlens given): x and values are [total, heads, head_dim] with stride_b = 0, `length` is the longest
 * sequence, groups begin at each sequence's start, and scale, sums and q_dot_mean keep their padded shapes, indexed by
 * the token's index in its sequence. A sequence whose cu_seqlens or lens are out of range is not read: its scales are
 * NaN. */
typedef struct QfQuantizeParams {
  int32_t struct_bytes, dtype;
  int32_t batch, length, heads, head_dim;
  int32_t granularity, group, symmetric, rounding;
  int32_t num_threads;
  int32_t smooth;   /* 1: mean is computed and subtracted */
  int32_t reserved; /* 0 */
  int32_t queries;  /* position of token t: 0: t, or rope.positions_k. 1: t + len_k - len_q, or rope.positions_q */
  uint64_t seed;    /* of stochastic rounding */
  QfTensor x, values;
  float* scale;              /* per tensor: [1]; per group: [batch, heads, ceil(length / group)] */
  int32_t* zero_point;       /* [1]; NULL when symmetric */
  int32_t* sums;             /* [batch, heads, length]: sum of a token's values; NULL: not wanted */
  float* mean;               /* [batch, heads, head_dim]: what smoothing subtracts; NULL without it */
  const int32_t* lens;       /* [batch]; NULL: every token exists */
  const int32_t* cu_seqlens; /* [batch+1]; NULL: not packed */
  int64_t total;             /* tokens of packed x; unused otherwise */
  QfRope rope;
  const int32_t* key_lens; /* with `queries`: the source of len_k. As kv_lens, cu_seqlens_k, k_len of QfAttnParams */
  const int32_t* cu_seqlens_k;
  int32_t key_length;
  int32_t kv_heads;    /* heads is a multiple of it */
  const float* k_mean; /* [batch, kv_heads, head_dim] */
  float* q_dot_mean;   /* [batch, heads, length]: rotated token . k_mean of its head's group; NULL: not wanted */
  int32_t* nonfinite;  /* [batch, heads]: number of nonfinite tokens; NULL: not wanted. Only with smooth; CUDA */
  void* workspace;
  int64_t workspace_bytes;
} QfQuantizeParams;

/* The inverse: out <- scale * (value - zero_point) + mean, in `dtype`. Symmetric: -128 is NaN. */
typedef struct QfDequantizeParams {
  int32_t struct_bytes, dtype;
  int32_t batch, length, heads, head_dim;
  int32_t granularity, group, symmetric, num_threads;
  QfTensor values, out;
  const float* scale;
  const int32_t* zero_point;
  const float* mean;
} QfDequantizeParams;

/* Quantizes k and v, arrays of `dtype`, to the form that `kv` describes: QF_KV_KEPT, whose arrays are all written.
 * precision is QF_INT8 (v stays unquantized: it is not read, and kv.v is not written) or QF_INT8_FP8. The other fields
 * are those of QfAttnParams. */
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

/* Writes new tokens of k and v, arrays of `dtype`, to the pages that `kv` describes (QF_KV_PAGES, QF_KV_PAGES_INT8).
 * kv_lens already includes them: of sequence b's n new tokens, token t becomes token kv_lens[b] - n + t, and rope
 * rotates k by that position, or by rope.positions_k. n is k_len, or packed cu_seqlens_k[b + 1] - cu_seqlens_k[b]. A
 * sequence with a new token below 0, past the table or in a page outside 0 .. pages - 1 is rejected on the CPU; on a
 * GPU such tokens are not written. Nothing else in the pages is written. */
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

enum QfActivation {
  QF_IDENTITY = 0,
  QF_GELU = 1,      /* h (1 + erf(h / sqrt(2))) / 2 */
  QF_GELU_TANH = 2, /* h (1 + tanh(sqrt(2 / pi) (h + 0.044715 h^3))) / 2 */
  QF_SILU = 3,      /* h / (1 + exp(-h)) */
  QF_SWIGLU = 4     /* silu(h) u, where u is computed from `up` as h is from w */
};

/* A linear layer: out <- activation(h) + residual with h[i, j] = x_scale[i] w_scale[j] sum_k x[i, k] w[k, j] + bias[j].
 * Accumulators are float32; for integers they are int32 and exact (then k is at most 131071). Only integers have
 * scales. */
typedef struct QfLinearParams {
  int32_t struct_bytes;
  int32_t dtype;      /* of x, w and up: QF_F32, QF_F16, QF_BF16 or QF_I8 */
  int32_t out_dtype;  /* of out, residual, pre and pre_up: `dtype` or QF_F32. Integers: QF_F32, QF_F16, QF_BF16, or
                         QF_I32 if only the accumulators are wanted */
  int32_t bias_dtype; /* of bias and up_bias: QF_F32, or the 16-bit type of x or out */
  int32_t activation; /* QfActivation */
  int32_t num_threads;
  int64_t m, n, k;
  const void *x, *w, *up;                    /* [m, k]; [k, n]; [k, n], only QF_SWIGLU */
  int64_t x_stride_m, x_stride_k;            /* one of them is 1; for integers, x_stride_k is */
  int64_t w_stride_k, w_stride_n;            /* one of them is 1 */
  int64_t up_stride_k, up_stride_n;          /* the same one is 1 as for w */
  const float *x_scale, *w_scale, *up_scale; /* NULL: 1 */
  int64_t x_scale_stride;                    /* 0: one scale for all rows; 1: one per row */
  int64_t w_scale_stride, up_scale_stride;   /* likewise for columns */
  const void *bias, *up_bias;                /* [n]; NULL: 0 */
  const void* residual;                      /* [m, n], n contiguous; NULL: 0 */
  int64_t residual_stride_m;
  void* out; /* [m, n], n contiguous */
  int64_t out_stride_m;
  void *pre, *pre_up; /* [m, n] contiguous: h and u, which the backward pass needs; NULL: not wanted */
  void* workspace;
  int64_t workspace_bytes;
} QfLinearParams;

/* Gradients of a linear layer, x and w of `dtype` QF_F32, QF_F16 or QF_BF16. With dh = dout activation'(pre), in
 * `dtype`,
 *   dx = dh w^T,   dw = x^T dh,   dbias = the sums of dh's columns,   dresidual = dout.
 * QF_SWIGLU: dh = dout u silu'(h) and du = dout silu(h); dx = dh w^T + du up^T, dup = x^T du, dup_bias likewise.
 * The order of summation depends on the shape and the device. */
typedef struct QfLinearBwdParams {
  int32_t struct_bytes, dtype, bias_dtype, activation; /* as in QfLinearParams */
  int32_t num_threads, reserved;
  int64_t m, n, k;
  const void *dout, *x, *w, *up, *pre, *pre_up; /* as above; dout, x, pre and pre_up of `dtype` */
  int64_t dout_stride_m, x_stride_m;            /* n and k are contiguous */
  int64_t w_stride_k, w_stride_n, up_stride_k, up_stride_n;
  void *dx, *dw, *dup, *dbias, *dup_bias, *dresidual; /* contiguous, [m, k], [k, n], [n], [m, n]; NULL: not wanted */
  void* workspace;
  int64_t workspace_bytes;
} QfLinearBwdParams;

/* Merges attention over some keys (a) and over others (b): out <- a exp(a_lse - lse) + b exp(b_lse - lse) with
 * lse <- log(exp(a_lse) + exp(b_lse)). A row with lse -inf does not contribute. Packed tensors are a batch of one. */
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
 * gradient of the rotation. The position of token t of sequence b is positions[b, t] if these are given, else that of
 * rope.positions_k if given, else t. A position outside the table is rejected on the CPU; on a GPU the channels it
 * rotates become NaN. Packed tensors are a batch of one. */
typedef struct QfRopeParams {
  int32_t struct_bytes, dtype;
  int32_t batch, length, heads, head_dim;
  int32_t inverse, num_threads;
  QfTensor x, out;
  const int32_t* positions;   /* [batch, length]; NULL: none */
  int64_t stride_positions_b; /* 0: one row applies to the whole batch */
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
  const int32_t* targets; /* [rows]; ignore_index, or 0 .. columns-1 (else the loss is NaN; on the CPU, an error) */
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
 * The order of the sums over rows depends only on the shape. */
typedef struct QfLayerNormBwdParams {
  int32_t struct_bytes, dtype;
  int64_t rows, columns;
  const void *x, *dout; /* [rows, columns], columns contiguous */
  int64_t x_stride, dout_stride;
  const void* weight;         /* [columns] in dtype; NULL: 1 */
  const float *mean, *rstd;   /* [rows], as returned by the forward pass */
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
 * columns). w_i is dlosses[i] plus dtotal, which `mean` divides by the number of rows not ignored; 0 if row i is
 * ignored. */
typedef struct QfCrossEntropyBwdParams {
  int32_t struct_bytes, dtype;
  int64_t rows, columns;
  const void* logits;
  int64_t logits_stride;
  const int32_t* targets;     /* as in QfCrossEntropyParams; an invalid one makes its row NaN, on the CPU an error */
  const float* lse;           /* [rows], as returned by the forward pass */
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
int qf_cpu_linear(const QfLinearParams* params, void* stream);
int qf_cpu_linear_bwd(const QfLinearBwdParams* params, void* stream);
int qf_cpu_int8_matmul(const QfLinearParams* params, void* stream);
int qf_cpu_quantize(const QfQuantizeParams* params, void* stream);
int qf_cpu_dequantize(const QfDequantizeParams* params, void* stream);
int qf_cpu_merge(const QfMergeParams* params, void* stream);
int qf_cpu_rope(const QfRopeParams* params, void* stream);
int qf_cpu_kv_write(const QfKvWriteParams* params, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* QFLASH_OPS_H_ */
