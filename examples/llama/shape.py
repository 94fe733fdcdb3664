"""The model's sizes, and its initial weights: NumPy arrays, so that every framework starts from the same ones."""

from dataclasses import dataclass

import numpy as np

BYTES = 256  # the vocabulary


@dataclass(frozen=True)
class Shape:
    """Sizes. A key head is shared by heads / kv_heads query heads; `hidden` is the width of SwiGLU."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 256
    length: int = 128
    batch: int = 8
    eps: float = 1e-5  # of RMSNorm

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def first_weights(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """float32 weights by name. Matrices are [in, out]; the last linear layer of each block starts small."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(rows)).astype(np.float32)

    last = 1 / np.sqrt(2 * shape.layers)
    of_kv = shape.kv_heads * shape.head_dim
    weights = {"embedding": matrix(BYTES, shape.width, np.sqrt(BYTES) * 0.02)}
    for layer in range(shape.layers):
        weights |= {
            f"{layer}.attention_norm": np.ones(shape.width, np.float32),
            f"{layer}.q": matrix(shape.width, shape.width),
            f"{layer}.k": matrix(shape.width, of_kv),
            f"{layer}.v": matrix(shape.width, of_kv),
            f"{layer}.o": matrix(shape.width, shape.width, last),
            f"{layer}.mlp_norm": np.ones(shape.width, np.float32),
            f"{layer}.gate": matrix(shape.width, shape.hidden),
            f"{layer}.up": matrix(shape.width, shape.hidden),
            f"{layer}.down": matrix(shape.hidden, shape.width, last),
        }
    return weights | {"norm": np.ones(shape.width, np.float32), "head": matrix(shape.width, BYTES)}
