"""Arrays and error measures shared by the JAX tests."""

from __future__ import annotations

import numpy as np


def arrays(batch=2, q_len=9, k_len=13, q_heads=4, kv_heads=2, head_dim=16, dtype="float32", seed=0):
    """q, k, v as JAX arrays on the default device."""
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)
    shapes = [(batch, q_len, q_heads, head_dim)] + [(batch, k_len, kv_heads, head_dim)] * 2
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes)


def put(mesh, spec, *operands):
    """The arrays on the devices of a mesh, sharded by `spec`."""
    import jax

    return tuple(jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x in operands)


def collectives(function, *operands) -> list[str]:
    """The communication in a compiled program."""
    import jax

    text = jax.jit(function).lower(*operands).compile().as_text()
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    return [kind for kind in kinds if f" {kind}(" in text or f" {kind}-start(" in text]


def relative_l2(got, want) -> float:
    """|got - want| / |want|, in float64."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def assert_close(got, want, bound: float) -> None:
    """Every pair of leaves within `bound` in relative L2 error; prints the errors."""
    import jax

    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert [x.shape for x in got] == [x.shape for x in want]
    errors = [relative_l2(a, b) for a, b in zip(got, want, strict=True)]
    print("relative L2 error:", ", ".join(f"{error:.2e}" for error in errors), f"(allowed {bound:.0e})")
    assert max(errors) <= bound
