"""Attention and its gradient over tokens that are distributed over the devices of a mesh, inside shard_map.

Every strategy is compared with attention on one device. On a CPU, XLA creates as many devices as requested:

XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_context_parallel.py
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qflash
from qflash.parallel import jax as parallel

BATCH, LENGTH, Q_HEADS, KV_HEADS, HEAD_DIM = 1, 256, 8, 4, 64


def main() -> None:
    ranks = jax.device_count()
    mesh = jax.make_mesh((ranks,), ("context",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (Q_HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (jax.random.normal(key, (BATCH, LENGTH, h, HEAD_DIM)) for key, h in zip(keys, heads, strict=True))

    def loss(attend, q, k, v):
        return (attend(q, k, v) ** 2).sum()

    alone = partial(loss, partial(qflash.attention, causal=True))
    expected, gradients = jax.value_and_grad(alone, (0, 1, 2))(q, k, v)
    # Tokens in the order of the devices: two chunks for each, from both ends of the sequence.
    split = NamedSharding(mesh, P(None, "context"))
    spread = [jax.device_put(parallel.shard(x, ranks=ranks, causal=True), split) for x in (q, k, v)]
    for strategy in ("ring", "all_gather", "ulysses"):
        attend = jax.shard_map(
            partial(parallel.attention, axis_name="context", strategy=strategy, causal=True),
            mesh=mesh,
            in_specs=P(None, "context"),
            out_specs=P(None, "context"),
        )
        value, found = jax.jit(jax.value_and_grad(partial(loss, attend), (0, 1, 2)))(*spread)
        whole = [parallel.unshard(x, ranks=ranks, causal=True) for x in found]
        worst = max(float(jnp.abs(a - b).max()) for a, b in zip(whole, gradients, strict=True))
        print(f"{ranks} devices, {strategy}: loss {float(value):.4f}, worst difference of a gradient {worst:.1e}")
        assert abs(value - expected) < 1e-4 * expected and worst < 1e-3


if __name__ == "__main__":
    main()
