"""JAX arrays, on the CPU or CUDA: one XLA custom call that jit, vmap, grad, scan, remat and shard_map all see through.

__init__      argument checks, and the cached jit every call goes through
words         refuses words that are arrays
lengths       lists, NumPy integers and int64 as int32 arrays
call          what is static about a call
transforms    vmap and grad
derivatives   the derivatives that do not exist, and what is said of them
partitioning  how XLA may split a call over devices
primitives    the JAX primitives and their lowering per platform
kernels       keys by which compiled programs name kernels
ops           the operations beside attention
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qflash.call.array import Array
from qflash.frontends.jax.call import OPTIONAL, Call, call_of
from qflash.frontends.jax.kernels import arch_of_device, cuda_arch, platform_of
from qflash.frontends.jax.lengths import as_lengths
from qflash.frontends.jax.transforms import attend, vary_alike
from qflash.frontends.jax.words import require_known
from qflash.ops.problem import Options, Problem, RopeArrays, check, check_packed
from qflash.rope import Rope

_PLANS_LIMIT = 4096
_FAILED = "INVALID_ARGUMENT: qflash: "  # how XLA spells a handler's refusal of a value

jax.tree_util.register_dataclass(
    Rope, data_fields=["cos", "sin", "positions_q", "positions_k"], meta_fields=["interleaved"]
)


def _named(q, k, v, kv_lens, rope: Rope | None, cu_seqlens: tuple = ()) -> dict[str, Any]:
    """Every array of a call by its operand name, in operand order."""
    arrays = {"q": q, "k": k, "v": v}
    for name, offsets in zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=False):
        arrays[name] = as_lengths(name, offsets)
    if kv_lens is not None:
        arrays["kv_lens"] = as_lengths("kv_lens", kv_lens)
    if rope is not None:
        if not isinstance(rope, Rope):
            raise TypeError(f"rope is {type(rope).__name__}; allowed: None or qflash.Rope")
        arrays["cos"], arrays["sin"] = rope.cos, rope.sin
        if rope.positions_q is not None:
            arrays["positions_q"] = as_lengths("rope.positions_q", rope.positions_q)
        if rope.positions_k is not None:
            arrays["positions_k"] = as_lengths("rope.positions_k", rope.positions_k)
    return arrays


def _spoken(name: str) -> str:
    return f"rope.{name}" if name in ("cos", "sin", "positions_q", "positions_k") else name


def describe(arrays: dict[str, Any], decides: str = "q") -> dict[str, Array]:
    """Shape, dtype and platform of each array. Traced arrays have no platform yet: the default one stands for it.

    `decides`: the argument that decided the framework.
    """
    for name, x in arrays.items():
        if not isinstance(x, jax.Array):
            kind = f"{type(x).__module__}.{type(x).__qualname__}"
            like = "" if name == decides else f", as {decides} is"
            raise TypeError(f"{_spoken(name)} is {kind}; allowed: jax.Array{like}")
    if traced(arrays.values()):
        default = _default_platform()
        return {name: Array(x.shape, None, x.dtype.name, default) for name, x in arrays.items()}
    # An uncommitted array follows the committed ones, as it does in JAX itself.
    first = next((name for name, x in arrays.items() if x.committed), decides)
    anchor = arrays[first]
    platforms = {name: _platform(x if x.committed else anchor) for name, x in arrays.items()}
    for name, x in arrays.items():  # one platform, several devices: XLA would not name the argument
        if x.committed and platforms[name] == platforms[first] and x.devices() != anchor.devices():
            raise ValueError(
                f"{_spoken(name)} is on {_devices(x)}; allowed: {_spoken(first)}'s device, {_devices(anchor)}"
            )
    return {name: Array(x.shape, None, x.dtype.name, platforms[name]) for name, x in arrays.items()}


def traced(arrays) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def _platform(x: jax.Array) -> str:
    return platform_of(next(iter(x.devices())))


def _devices(x: jax.Array) -> str:
    return ", ".join(f"{platform_of(device)}:{device.id}" for device in sorted(x.devices(), key=lambda d: d.id))


def _default_platform() -> str:
    return "cuda" if jax.default_backend() == "gpu" else jax.default_backend()


def _check(arrays: dict[str, Any], options: Options, interleaved: bool, max_seqlens: tuple = ()) -> Problem:
    require_known({**options._asdict(), **dict(zip(("max_seqlen_q", "max_seqlen_k"), max_seqlens, strict=False))})
    described = describe(arrays)
    rope = None
    if "cos" in described:
        positions = described.get("positions_q"), described.get("positions_k")
        rope = RopeArrays(described["cos"], described["sin"], interleaved, *positions)
    q, k, v, kv_lens = described["q"], described["k"], described["v"], described.get("kv_lens")
    if max_seqlens:
        cu_seqlens = described["cu_seqlens_q"], described["cu_seqlens_k"]
        return check_packed(q, k, v, *cu_seqlens, *max_seqlens, options, kv_lens, rope)
    return check(q, k, v, options, kv_lens, rope)


@partial(jax.jit, static_argnums=(0, 1))
def _run(call, return_lse: bool, operands: Sequence[jax.Array]):
    operands = list(operands)
    for name in ("cos", "sin"):
        if name in call.operands:
            operands[call.index(name)] = operands[call.index(name)].astype(jnp.float32)
    out, lse = attend(call)(*vary_alike(operands))
    return (out, lse) if return_lse else out


class _Plan(NamedTuple):
    """A checked call. `verdict`: the CPU engine will check values as it runs, and an eager call waits for that."""

    call: Call
    verdict: bool


def _plan(arrays: dict[str, Any], options: Options, interleaved: bool, max_seqlens: tuple) -> _Plan:
    problem = _check(arrays, options, interleaved, max_seqlens)
    names = tuple(arrays)[3:]
    if "cos" in names and arrays["cos"].shape[0] == 0:  # tables without a row pass the checks when nothing reads them
        names = tuple(name for name in names if OPTIONAL[name] != "rope")
    verdict = problem.device == "cpu" and any(name not in ("cos", "sin") for name in names)
    return _Plan(call_of(problem, names), verdict)


_plans: dict[tuple, _Plan] = {}


def _plan_cached(arrays: dict[str, Any], options: Options, interleaved: bool, max_seqlens: tuple) -> _Plan:
    """`_plan` for arrays that exist: eager calls repeat, and checking costs several times the launch."""
    window = options.window if isinstance(options.window, (tuple, list)) else (options.window,)
    words = (options.causal, *window, *options[2:], interleaved, *max_seqlens)
    try:
        # With types, because to a dict True is 1 is 1.0, and to `check` they are not.
        key = (*arrays, *[(x.aval, x.sharding, x.committed) for x in arrays.values()], *words, *map(type, words))
        plan = _plans.get(key)
    except (AttributeError, TypeError):  # something is not what it should be; `_plan` says what
        return _plan(arrays, options, interleaved, max_seqlens)
    if plan is None:
        if len(_plans) >= _PLANS_LIMIT:
            _plans.clear()
        plan = _plans[key] = _plan(arrays, options, interleaved, max_seqlens)
    return plan


def _launch(arrays: dict[str, Any], options: Options, interleaved: bool, max_seqlens: tuple, return_lse: bool):
    is_traced = traced(arrays.values())
    plan = (_plan if is_traced else _plan_cached)(arrays, options, interleaved, max_seqlens)
    operands = (arrays["q"], arrays["k"], arrays["v"], *[arrays[name] for name in plan.call.operands])
    if is_traced or not plan.verdict:
        return _run(plan.call, return_lse, operands)
    return await_verdict(_run, plan.call, return_lse, operands)


def await_verdict(function: Callable, *args: Any) -> Any:
    """function(*args), waited for: where the CPU engine refuses a value, a ValueError with its text."""
    try:
        return jax.block_until_ready(function(*args))
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # which of the two depends on when XLA notices
        _, failed, text = str(error).partition(_FAILED)
        if failed:
            raise ValueError(text) from None
        raise


def problem_of(q, k, v, options: Options, kv_lens=None, rope: Rope | None = None, packed: tuple = ()) -> Problem:
    """The checked problem behind `attention`, or with `packed` behind `attention_varlen`, for `explain`."""
    arrays = _named(q, k, v, kv_lens, rope, packed[:2])
    return _check(arrays, options, rope is not None and rope.interleaved, packed[2:])


def attention(q, k, v, options: Options, kv_lens=None, rope: Rope | None = None, return_lse: bool = False):
    """See qflash.attention."""
    arrays = _named(q, k, v, kv_lens, rope)
    return _launch(arrays, options, rope is not None and rope.interleaved, (), return_lse)


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options, kv_lens=None, rope=None, return_lse=False
):
    """See qflash.attention_varlen."""
    arrays = _named(q, k, v, kv_lens, rope, (cu_seqlens_q, cu_seqlens_k))
    max_seqlens = max_seqlen_q, max_seqlen_k
    return _launch(arrays, options, rope is not None and rope.interleaved, max_seqlens, return_lse)


def arch_of(q: jax.Array) -> int:
    """Compute capability times ten of the array's device (0: CPU); of the default device while q is traced."""
    if traced([q]):
        return cuda_arch() if _default_platform() == "cuda" else 0
    return arch_of_device(next(iter(q.devices())))
