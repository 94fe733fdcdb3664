"""What goes round a ring: keys and values as they are, or, where the call is quantized, in 8 bits.

The rank that has them quantizes them, once; every rank that they pass sends on what came, and widens it for its own
calls. These are the calls of any precision: integers are how keys and values travel, not what kernels read
(docs/decisions/0017-masks-over-ranks.md).
"""

from __future__ import annotations

from math import prod
from typing import Any

from qflash.call.array import dtype_name
from qflash.ops.quantization import Quantized, dequantize, quantize
from qflash.parallel.parts import Sequences

Wire = tuple[Any, ...]
MOST_FLOAT16 = 65504


def to_wire(of: Sequences, block: Any, rank: Any) -> Wire:
    """The arrays that travel, of a rank's k and v, stacked.

    Quantized: int8 with a scale for each token and head, less the mean of each channel, which travels beside them.
    """
    if of.words.precision is None:
        return (block,)
    lens = of.keys_of(rank)
    if lens is not None:  # what does not exist takes no part in a mean
        lens = of.maths.concatenate([lens, lens])
    every_sequence = (prod(block.shape[:-3]), *block.shape[-3:])
    sent = quantize(block.reshape(every_sequence), granularity="token", smooth=True, lens=lens)
    return sent.values, sent.scale, sent.mean


def from_wire(wire: Wire, block: Any) -> Any:
    """k and v, stacked, of the arrays that came; shaped, and typed, as `block` is."""
    if len(wire) == 1:
        return wire[0]
    values, scale, mean = wire
    came = Quantized(values, scale, mean=mean, granularity="token")
    widened = dequantize(came, block.dtype).reshape(block.shape)
    if dtype_name("k", block.dtype) != "float16":
        return widened
    return widened.clip(-MOST_FLOAT16, MOST_FLOAT16)  # an infinity came as NaN; here it is a number that was rounded up
