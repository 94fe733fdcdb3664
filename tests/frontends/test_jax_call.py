"""`qflash_call`, the XLA handler of every kernel: what it makes of a struct, and what it refuses.

A program is data: what reaches the handler need not come from this front end.
"""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest

from qflash import _native

pytest.importorskip("jax")
import jax
import jax.numpy as jnp

import qflash
import qflash.frontends.jax
from qflash.reference import attention as attention_in_float64

ROWS, ATTENTION, BACKWARD = "QfRowsParams", "QfAttnParams", "QfAttnBwdParams"


def at(takes: str, field: str) -> int:
    return _native.op_layouts[takes][1][field][0]


def packed(takes: str, fields: dict[str, int | float]) -> np.ndarray:
    """A struct as the words of an attribute."""
    size, layout = _native.op_layouts[takes]
    params = bytearray(size)
    for name, value in {"struct_bytes": size, **fields}.items():
        struct.pack_into(layout[name][1], params, layout[name][0], value)
    return np.frombuffer(bytes(params), np.int64)


def words(*records: int) -> np.ndarray:
    return np.array(records, np.int64)


def size_of(takes: str, field: str, *factors: tuple[int, int]) -> list[int]:
    """A tuple of `sizes`; factors: (array, dimension)."""
    return [at(takes, field), struct.calcsize(_native.op_layouts[takes][1][field][1]), len(factors), *sum(factors, ())]


def call(takes, kernel, results, operands, pointers, fields, sizes=(), bounds=(), changes=()):
    """The results of the kernel behind `kernel`, with one byte of workspace. changes: to what the program says."""
    attributes = {
        "kernel": kernel,
        "takes": takes,
        "params": packed(takes, fields),
        "pointers": words(*(at(takes, field) for field in pointers)),
        "num_bytes": words(*[-1] * len(pointers)),
        "sizes": words(*sizes),
        "bounds": words(*bounds),
    }
    results = [*results, jax.ShapeDtypeStruct((1,), jnp.uint8)]
    return jax.ffi.ffi_call("qflash_call", results)(*operands, **{**attributes, **dict(changes)})[:-1]


def registered(takes: str, entry: int, workspace: int = 0) -> str:
    key = f"test {takes} {entry} {workspace}"
    _native.register_xla_kernel(key, entry, _native.cpu_entries["status_text"], workspace, takes)
    return key


class Probe:
    """A kernel that keeps the struct it was given."""

    def __init__(self, takes: str, needs: int | None = None):
        self.takes, self.seen = takes, {}
        self._entry = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self._run)
        self._needs = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(lambda _: needs or 0)
        entry, workspace = (ctypes.cast(x, ctypes.c_void_p).value for x in (self._entry, self._needs))
        self.key = registered(takes, entry, 0 if needs is None else workspace)

    def _run(self, params: int, _stream: int) -> int:
        size, layout = _native.op_layouts[self.takes]
        given = ctypes.string_at(params, size)
        self.seen = {field: struct.unpack_from(kind, given, offset)[0] for field, (offset, kind) in layout.items()}
        return 0

    def run(self, x: jax.Array, fields=(), **words_of_call) -> dict[str, int | float]:
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
        jax.block_until_ready(call(self.takes, self.key, results, [x], ["x", "out"], dict(fields), **words_of_call))
        return self.seen


def test_fields_are_as_the_program_has_them_but_for_addresses():
    seen = Probe(ROWS).run(jnp.ones((3, 8)), {"dtype": 2, "rows": 3, "columns": 8, "scale": 0.5, "num_threads": 7})
    assert (seen["dtype"], seen["rows"], seen["columns"], seen["scale"], seen["num_threads"]) == (2, 3, 8, 0.5, 7)
    assert seen["x"] != 0 and seen["out"] not in (0, seen["x"]) and seen["weight"] == 0


def test_sizes_are_products_of_extents():
    """Of operands and results, 4 bytes or 8; ~dimension is one less; no factor is 1."""
    sizes = size_of(ROWS, "rows", (0, 0)) + size_of(ROWS, "columns", (1, 1), (0, 0), (1, 2))
    sizes += size_of(ROWS, "dtype", (0, ~2)) + size_of(ROWS, "x_stride") + size_of(ROWS, "out_stride", (0, 2), (0, ~1))
    seen = Probe(ROWS).run(jnp.ones((3, 1, 8)), {"rows": 99, "dtype": 99, "out_stride": 99}, sizes=sizes)
    assert (seen["rows"], seen["columns"], seen["dtype"], seen["x_stride"], seen["out_stride"]) == (3, 24, 7, 1, 0)


def test_bounds_lower_what_is_above_an_extent():
    bounds = [at(ROWS, "dtype"), 0, 1, at(ROWS, "num_threads"), 1, 0]
    for given, seen in (((100, 1), (8, 1)), ((8, 3), (8, 3)), ((7, 4), (7, 3))):
        found = Probe(ROWS).run(jnp.ones((3, 8)), {"dtype": given[0], "num_threads": given[1]}, bounds=bounds)
        assert (found["dtype"], found["num_threads"]) == seen


def test_the_workspace_is_as_large_as_the_kernel_asks_for():
    struct_with_one = "QfLinearParams"
    results = [jax.ShapeDtypeStruct((4, 4), jnp.int32)]

    def run(probe):
        operands = [jnp.ones((4, 4), jnp.int8)] * 2
        jax.block_until_ready(call(struct_with_one, probe.key, results, operands, ["x", "w", "out"], {}))
        return probe.seen

    seen = run(Probe(struct_with_one, needs=1))
    assert seen["workspace"] != 0 and seen["workspace_bytes"] == 1
    seen = run(Probe(struct_with_one))
    assert seen["workspace"] == 0 and seen["workspace_bytes"] == 0
    with pytest.raises(Exception, match=r"workspace of 1 bytes, kernel .* needs 2 here: lower it again"):
        run(Probe(struct_with_one, needs=2))


LARGE = [(0, 1)] * 11  # 8^11 = 2^33
REFUSED = {
    "struct": ({"takes": "QfQuantizeParams"}, "no kernel is registered as"),
    "params": ({"params": packed(ROWS, {})[:-1]}, "bytes; allowed: "),
    "fewer pointers": ({"pointers": words(0)}, "other operands and results than it names"),
    "fewer sizes of arrays": ({"num_bytes": words(96)}, "other operands and results than it names"),
    "bytes": ({"num_bytes": words(96, 100)}, "array 1 has 96 bytes; allowed: 100"),
    "pointer past the end": ({"pointers": words(at(ROWS, "x"), 4096)}, "no field of kind 'P' at offset 4096"),
    "pointer before it": ({"pointers": words(-8, at(ROWS, "out"))}, "no field of kind 'P' at offset -8"),
    "pointer in a number": ({"pointers": words(at(ROWS, "rows"), at(ROWS, "out"))}, "no field of kind 'P'"),
    "pointer in between": ({"pointers": words(at(ROWS, "x") + 4, at(ROWS, "out"))}, "no field of kind 'P'"),
    "size of 2 bytes": ({"sizes": words(at(ROWS, "rows"), 2, 0)}, "a size has 2 bytes; allowed: 4 or 8"),
    "size of a pointer": ({"sizes": words(at(ROWS, "x"), 8, 0)}, "no field of kind 'q'"),
    "size of another width": ({"sizes": words(at(ROWS, "rows"), 4, 0)}, "no field of kind 'i'"),
    "half a size": ({"sizes": words(at(ROWS, "rows"), 8, 2, 0, 0)}, "`sizes` ends within a tuple"),
    "size of no array": ({"sizes": words(*size_of(ROWS, "rows", (2, 0)))}, "from array 2; allowed: 0 to 1"),
    "size of array -1": ({"sizes": words(*size_of(ROWS, "rows", (-1, 0)))}, "from array -1; allowed"),
    "size of no dimension": ({"sizes": words(*size_of(ROWS, "rows", (0, 2)))}, "dimension 2 of array 0; allowed: 2"),
    "size of no ~dimension": ({"sizes": words(*size_of(ROWS, "rows", (0, ~2)))}, "dimension 2 of array 0; allowed: 2"),
    "size past int32": ({"sizes": words(*size_of(ROWS, "dtype", *LARGE))}, "dtype is 8589934592; allowed: 0 to 2"),
    "size past int64": ({"sizes": words(*size_of(ROWS, "rows", *LARGE, *LARGE))}, "rows is past what 64 bits count"),
    "half a bound": ({"bounds": words(at(ROWS, "dtype"), 0)}, "`bounds` ends within a tuple"),
    "bound of 8 bytes": ({"bounds": words(at(ROWS, "rows"), 0, 0)}, "no field of kind 'i'"),
    "bound of no array": ({"bounds": words(at(ROWS, "dtype"), 7, 0)}, "from array 7; allowed: 0 to 1"),
    "bound of no dimension": ({"bounds": words(at(ROWS, "dtype"), 1, 5)}, "dimension 5 of array 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_program_may_not_say(name):
    changes, text = REFUSED[name]
    with pytest.raises(Exception, match=text):
        Probe(ROWS).run(jnp.ones((3, 8)), changes=changes)


def test_a_negative_length_is_refused():
    sizes = size_of(ROWS, "dtype", (0, ~0))
    with pytest.raises(Exception, match="dtype is -1; allowed: 0 to 2"):
        Probe(ROWS).run(jnp.ones((0, 8)), sizes=sizes)
    with pytest.raises(Exception, match="dtype is -5; allowed: 0 to 2"):
        Probe(ROWS).run(jnp.ones((3, 8)), {"dtype": -5}, bounds=[at(ROWS, "dtype"), 0, 0])


def test_a_program_without_results_is_refused():
    attributes = {name: words() for name in ("params", "pointers", "num_bytes", "sizes", "bounds")}
    with pytest.raises(Exception, match="no result for the workspace"):
        jax.block_until_ready(
            jax.ffi.ffi_call("qflash_call", [], has_side_effect=True)(
                jnp.ones(3), kernel=Probe(ROWS).key, takes=ROWS, **attributes
            )
        )


def strides(takes: str, name: str, array: int) -> list[int]:
    """`sizes` of a tensor that is array `array`, [batch, length, heads, head_dim]."""
    of = lambda *dims: [(array, dim) for dim in dims]  # noqa: E731
    return (
        size_of(takes, f"{name}.stride_b", *of(1, 2, 3))
        + size_of(takes, f"{name}.stride_t", *of(2, 3))
        + size_of(takes, f"{name}.stride_h", *of(3))
    )


def attention_sizes(takes: str, prefix: str = "") -> list[int]:
    """Of QfAttnParams with q, k and v as arrays 0 to 2."""
    sizes = []
    for field, factor in (("batch", (0, 0)), ("q_len", (0, 1)), ("k_len", (1, 1)), ("q_heads", (0, 2))):
        sizes += size_of(takes, prefix + field, factor)
    sizes += size_of(takes, f"{prefix}kv_heads", (1, 2)) + size_of(takes, f"{prefix}head_dim", (0, 3))
    for name, array in (("q", 0), ("kv.k", 1), ("kv.v", 2), ("out", 0)):
        sizes += strides(takes, prefix + name, array)
    sizes += size_of(takes, f"{prefix}lse_stride_b", (0, 2), (0, 1)) + size_of(takes, f"{prefix}lse_stride_h", (0, 1))
    return sizes


OPEN = {"window_left": -1, "window_right": -1, "scale": 0.25}


def attend(q, k, v):
    """(out, lse) by way of the handler, every size of which is found at run time."""
    fields = ("q.data", "kv.k.data", "kv.v.data", "out.data", "lse")
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), "f4")]
    key = registered(ATTENTION, _native.cpu_entries["cpu"])
    return call(ATTENTION, key, results, [q, k, v], fields, OPEN, attention_sizes(ATTENTION))


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape, np.float32))


SHAPES = (((2, 5, 4, 16), (2, 9, 2, 16)), ((1, 70, 2, 24), (1, 33, 2, 24)), ((3, 1, 4, 8), (3, 1, 1, 8)))


def test_attention_of_symbolic_sizes(flatbuffers):
    b, t, s, h, g, d = jax.export.symbolic_shape("b, t, s, h, g, d")
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((b, t, h, d), (b, s, g, d), (b, s, g, d))]
    program = jax.export.deserialize(
        jax.export.export(jax.jit(attend), disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("qflash_call")])(
            *like
        ).serialize()
    )
    for q_shape, k_shape in SHAPES:
        q, k, v = random(*q_shape), random(*k_shape), random(*reversed(k_shape)).T
        out, lse = program.call(q, k, v)
        wanted, wanted_lse = qflash.attention(q, k, v, scale=0.25, return_lse=True)
        np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(lse, wanted_lse)


def test_packed_attention_whose_bounds_and_batch_come_from_its_arrays():
    q, k, v = random(50, 4, 16), random(70, 2, 16), random(70, 2, 16) + 1
    cu_q, cu_k = jnp.array([0, 20, 50], jnp.int32), jnp.array([0, 0, 70], jnp.int32)
    pointers = ("q.data", "kv.k.data", "kv.v.data", "cu_seqlens_q", "cu_seqlens_k", "out.data", "lse")
    of = lambda field, *factors: size_of(ATTENTION, field, *factors)  # noqa: E731
    sizes = of("batch", (3, ~0)) + of("q_heads", (0, 1)) + of("kv_heads", (1, 1)) + of("head_dim", (0, 2))
    sizes += of("total_q", (0, 0)) + of("total_k", (1, 0)) + of("lse_stride_h", (0, 0))
    for name, array in (("q", 0), ("kv.k", 1), ("kv.v", 2), ("out", 0)):
        sizes += of(f"{name}.stride_t", (array, 1), (array, 2)) + of(f"{name}.stride_h", (array, 2))
    bounds = [at(ATTENTION, "q_len"), 0, 0, at(ATTENTION, "k_len"), 1, 0]
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((4, 50), jnp.float32)]
    key = registered(ATTENTION, _native.cpu_entries["cpu"])
    fields = {**OPEN, "q_len": 1000, "k_len": 2**31 - 1}
    out, lse = call(ATTENTION, key, results, [q, k, v, cu_q, cu_k], pointers, fields, sizes, bounds)
    wanted = qflash.attention_varlen(q, k, v, cu_q, cu_k, 50, 70, scale=0.25, return_lse=True)
    np.testing.assert_array_equal(out, wanted[0])
    np.testing.assert_array_equal(lse, wanted[1])


def test_gradients():
    q, k, v = random(2, 5, 4, 16), random(2, 9, 2, 16), random(2, 9, 2, 16) + 1
    dout = random(2, 5, 4, 16) - 1
    out, lse = attend(q, k, v)
    pointers = ("fwd.q.data", "fwd.kv.k.data", "fwd.kv.v.data", "fwd.out.data", "fwd.lse", "dout.data")
    pointers += ("dq.data", "dk.data", "dv.data")
    fields = {f"fwd.{name}": value for name, value in OPEN.items()}
    fields["fwd.struct_bytes"] = _native.op_layouts[ATTENTION][0]
    sizes = attention_sizes(BACKWARD, "fwd.")
    for name, array in (("dout", 0), ("dq", 0), ("dk", 1), ("dv", 2)):
        sizes += strides(BACKWARD, name, array)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    key = registered(BACKWARD, _native.cpu_entries["cpu_bwd"])
    found = call(BACKWARD, key, results, [q, k, v, out, lse, dout], pointers, fields, sizes)
    _, pullback = jax.vjp(lambda *arrays: qflash.attention(*arrays, scale=0.25), q, k, v)
    for x, y in zip(found, pullback(dout), strict=True):
        np.testing.assert_array_equal(x, y)
    exact, _ = attention_in_float64(*map(np.asarray, (q, k, v)), scale=0.25)
    np.testing.assert_allclose(out, exact, atol=1e-5)


def test_a_kernel_that_refuses_is_an_error():
    q = random(1, 4, 1, 8)
    with pytest.raises(Exception, match="0 pages of 0 tokens; allowed: pages of 1 or more"):
        call(
            ATTENTION, registered(ATTENTION, _native.cpu_entries["cpu"]), [jax.ShapeDtypeStruct(q.shape, q.dtype)],
            [q], ["q.data", "out.data"], {**OPEN, "kv.kind": 3, "q_heads": 1, "kv_heads": 1, "head_dim": 8},
        )  # fmt: skip
