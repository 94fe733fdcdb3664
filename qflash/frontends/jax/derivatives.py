"""Derivatives that do not exist raise errors that say so: an operation has one backward pass, or none.

JAX alone would report that some inner function cannot be differentiated, and name that function. The errors are raised
by the rules of identity primitives, one for each operand: partial evaluation (of a scan, for example) drops the rules
of a jax.custom_jvp, and custom_vmap drops the information which operands are differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from qflash.call.op import Op


def _identity(name: str) -> Primitive:
    """A primitive that is the identity, except for derivatives."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    batching.primitive_batchers[primitive] = lambda xs, dims, **params: (primitive.bind(*xs, **params), dims[0])
    return primitive


_constant_p = _identity("qflash_constant")


def constant(x: Any, text: str) -> Any:
    """x; any derivative with respect to it raises an error with this text."""
    return _constant_p.bind(x, text=text) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _refuse(primals, tangents, *, text: str):
    raise NotImplementedError(text)


ad.primitive_jvps[_constant_p] = _refuse


def forward_only(op: Op, name: str, x: Any) -> Any:
    """Argument `name` of an operation that has no gradient."""
    text = f"{op.spoken} is forward only and {name} is being differentiated; put jax.lax.stop_gradient around it"
    return constant(x, op.no_gradient or text)


def no_forward_mode(op: Op, differentiable: Sequence[str]) -> str:
    """The error when a forward-mode derivative of an operation is requested."""
    return (
        f"{op.spoken} has no forward-mode derivative (jvp, jacfwd, linearize); allowed: reverse mode (grad, vjp, "
        f"jacrev), or jax.lax.stop_gradient around {listed(differentiable)}"
    )


def listed(names: Sequence[str]) -> str:
    """Names as a phrase."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


_reverse_only_p = _identity("qflash_reverse_only")
_tangent_p = Primitive("qflash_reverse_only_tangent")


def reverse_only(x: Any, text: str) -> Any:
    """x; forward-mode derivatives with respect to it raise an error with this text."""
    return _reverse_only_p.bind(x, text=text)


def _refuse_forward(*_: Any, text: str, **__: Any):
    raise NotImplementedError(text)


# Reverse mode records the operations on a tangent and transposes them; forward mode executes them. So the tangent goes
# through an identity that can be transposed but not executed: not eagerly, not compiled, not batched.
ad.primitive_jvps[_reverse_only_p] = lambda primals, tangents, **text: (
    primals[0],
    _tangent_p.bind(tangents[0], **text),
)
_tangent_p.def_abstract_eval(lambda tangent, **_: tangent)
_tangent_p.def_impl(_refuse_forward)
mlir.register_lowering(_tangent_p, _refuse_forward)
batching.primitive_batchers[_tangent_p] = _refuse_forward
ad.deflinear2(_tangent_p, lambda cotangent, *_, **__: [cotangent])
