"""The operations beside attention. One module per family: public calls, checks, and the plan of a call.

plan          what every operation shares: the plan of a call, and the way from it to a kernel
rows          softmax, layer_norm, cross_entropy
matmul        int8_matmul
quantization  quantize, dequantize
attention     attention on what quantize returns
kv            quantize_kv
kv_attention  attention on what quantize_kv returns
"""
