"""The two JAX primitives, forward and backward, and how each is lowered to its XLA custom call.

They are primitives rather than `jax.ffi.ffi_call`s because only at lowering is the platform known: that is where the
kernel is chosen, loaded and registered, and where a problem no kernel of that platform serves is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from qflash import dispatch
from qflash.backends import Entry
from qflash.call.array import Array
from qflash.call.spec import Spec
from qflash.frontends.jax.call import Call
from qflash.frontends.jax.kernels import BACKWARD, FORWARD, cuda_arch, register
from qflash.ops.problem import Problem
from qflash.planning import entry_of, prepare

# (q, k, v, *optional) -> (out, lse)
attention_p = Primitive(FORWARD)
attention_p.multiple_results = True

# (q, k, v, out, lse, dout, *optional) -> (dq, dk, dv)
attention_bwd_p = Primitive(BACKWARD)
attention_bwd_p.multiple_results = True


def _lse_like(q: Any) -> Any:
    """The abstract lse: as q (so it varies over the same mesh axes), without head_dim and with heads before length."""
    *batch, length, heads, _ = range(q.ndim)
    order = (*batch, heads, length)
    spec = (*q.sharding.spec, *[None] * q.ndim)
    sharding = NamedSharding(q.sharding.mesh, PartitionSpec(*(spec[axis] for axis in order)))
    return q.update(shape=tuple(q.shape[axis] for axis in order), dtype=jax.numpy.float32, sharding=sharding)


@attention_p.def_abstract_eval
def _abstract(q, k, v, *optional, call: Call):
    q = q.update(weak_type=False)
    return q, _lse_like(q)


@attention_bwd_p.def_abstract_eval
def _abstract_bwd(q, k, v, out, lse, dout, *optional, call: Call):
    return tuple(x.update(weak_type=False) for x in (q, k, v))


def _arrays(avals: Any, platform: str) -> list[Array]:
    return [Array(aval.shape, None, aval.dtype.name, platform) for aval in avals]


def _register(problem: Problem, spec: Spec) -> tuple[str, Entry]:
    """Choose, load and register the kernel for a spec: its key and its addresses."""
    kernel = dispatch.plan(spec, problem.kernel)
    entry = entry_of(kernel, spec)
    return register(kernel.name, spec, entry), entry


def _workspace_bytes(problem: Problem, arch: int, entry: Entry) -> int:
    if entry.workspace == 0:
        return 0
    sizes = (problem.batch, problem.q_len, problem.k_len, problem.q_heads, problem.kv_heads, problem.head_dim)
    if not all(isinstance(size, int) for size in sizes):
        raise NotImplementedError(
            f"q, k and v have symbolic sizes ({', '.join(map(str, sizes))}); allowed on CUDA: numbers, "
            "because the kernel's workspace is part of the program"
        )
    return prepare(problem, arch).workspace_bytes


def _lower(ctx, *operands, call: Call, platform: str):
    problem = call.problem(_arrays(ctx.avals_in, platform))
    arch = cuda_arch() if platform == "cuda" else 0
    key, entry = _register(problem, problem.spec(arch))
    # The kernel's workspace is one more result, so that XLA knows the buffer as long as the program lives. It is never
    # empty: every platform has an address for a buffer of one byte.
    workspace = jax.core.ShapedArray((max(_workspace_bytes(problem, arch, entry), 1),), jax.numpy.uint8)
    ctx = ctx.replace(avals_out=[*ctx.avals_out, workspace])
    return jax.ffi.ffi_lowering(FORWARD)(ctx, *operands, **call.attributes(key))[:2]


def _lower_bwd(ctx, *operands, call: Call):
    problem = call.problem(_arrays([*ctx.avals_in[:3], *ctx.avals_in[6:]], "cpu"))
    key, _ = _register(problem, problem.spec(0, backward=True))
    return jax.ffi.ffi_lowering(BACKWARD)(ctx, *operands, **call.attributes(key))


def _refuse_bwd(ctx, *operands, call: Call):
    raise NotImplementedError(
        "qflash has no backward pass on CUDA; differentiate on the CPU (jax.device_put to jax.devices('cpu')), "
        "or put jax.lax.stop_gradient around q, k and v"
    )


def _evaluate(primitive: Primitive, *operands, call: Call):
    """Outside any transformation, which only jax.disable_jit() brings about: compile this one operation."""
    with jax.disable_jit(False):
        return jax.jit(partial(primitive.bind, call=call))(*operands)


for _primitive in (attention_p, attention_bwd_p):
    _primitive.def_impl(partial(_evaluate, _primitive))
mlir.register_lowering(attention_p, partial(_lower, platform="cpu"), platform="cpu")
mlir.register_lowering(attention_p, partial(_lower, platform="cuda"), platform="cuda")
mlir.register_lowering(attention_bwd_p, _lower_bwd, platform="cpu")
mlir.register_lowering(attention_bwd_p, _refuse_bwd, platform="cuda")
