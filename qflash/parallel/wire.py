"""What a ring transfers: keys and values unchanged or, if the call is quantized, in 8 bits.

The rank that owns them quantizes them, once; every other rank forwards what it received, and dequantizes it for its own
calls. These are ordinary calls with that precision: integers are the transfer format, and kernels do not read them
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
    """The arrays to transfer for a rank's k and v, stacked.

    Quantized: int8 with a scale per token and head, after subtracting the mean of each channel, which is sent as well.
    """
    if of.words.precision is None:
        return (block,)
    lens = of.keys_of(rank)
    if lens is not None:  # missing keys are not part of a mean
        lens = of.maths.concatenate([lens, lens])
    every_sequence = (prod(block.shape[:-3]), *block.shape[-3:])
    sent = quantize(block.reshape(every_sequence), granularity="token", smooth=True, lens=lens)
    return sent.values, sent.scale, sent.mean


def from_wire(wire: Wire, block: Any) -> Any:
    """k and v, stacked, from the received arrays, with the shape and dtype of `block`."""
    if len(wire) == 1:
        return wire[0]
    values, scale, mean = wire
    came = Quantized(values, scale, mean=mean, granularity="token")
    widened = dequantize(came, block.dtype).reshape(block.shape)
    if dtype_name("k", block.dtype) != "float16":
        return widened
    return widened.clip(-MOST_FLOAT16, MOST_FLOAT16)  # infinity arrives as NaN; here it is a rounded-up number
