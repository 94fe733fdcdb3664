"""The accuracy of INT8: float32 and INT8 attention against float64, on easy and on difficult keys.

python examples/int8_accuracy.py
"""

import numpy as np

import qflash
from qflash import reference

B, T, H, D = 1, 512, 4, 64


def inputs(rng: np.random.Generator) -> dict[str, tuple[np.ndarray, ...]]:
    """Plain N(0, 1), and keys with a few channels far from zero, as in real models."""
    q, k, v = rng.standard_normal((3, B, T, H, D), dtype=np.float32)
    offset = np.zeros(D, np.float32)
    offset[::10] = 8 * rng.standard_normal(len(offset[::10]))
    return {"normal": (q, k, v), "biased keys": (q, k + offset, v)}


def main() -> None:
    print(f"{'keys':<12} {'precision':<10} {'relative L2':>12} {'cosine':>10}")
    for name, arrays in inputs(np.random.default_rng(0)).items():
        exact = reference.attention(*arrays, causal=True)[0].ravel()
        for precision in (None, "int8"):
            out = qflash.attention(*arrays, causal=True, precision=precision).astype(np.float64).ravel()
            error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
            cosine = out @ exact / (np.linalg.norm(out) * np.linalg.norm(exact))
            print(f"{name:<12} {precision or 'float32':<10} {error:>12.2e} {cosine:>10.7f}")


if __name__ == "__main__":
    main()
