"""A compiled library on a machine that has no driver: it opens, tells sizes, and says why it does not run."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import sys
import textwrap

import pytest

from qflash import _native, dispatch
from qflash.call.array import Array
from qflash.call.op import Plan
from qflash.call.spec import ACTIVATIONS, OP_DTYPES
from qflash.errors import KernelError, NoKernelError
from qflash.jit import runtime, toolchain
from qflash.jit.compiler import LIBRARY
from qflash.ops.attention import plan_of, plan_of_backward
from qflash.ops.attention_kv import ATTENTION_KEPT
from qflash.ops.kv import KV_FIELDS, QUANTIZE_KV
from qflash.ops.problem import Options, RopeArrays, check, check_packed
from qflash.testing.cuda_tools import why_no_nvcc
from qflash.testing.cuda_units import (
    ATTENTION,
    BACKWARD,
    GEMM,
    HOPPERS_OWN,
    SELDOM,
    hopper_unit,
    on_hopper,
    other_scores,
)

# those that make or take a QuantizedKV
KEPT = [row.name for row in HOPPERS_OWN if row.kernel.op == "quantize_kv" or row.kv == "kept"]
needs_nvcc = pytest.mark.skipif(why_no_nvcc() is not None, reason=f"compile test: {why_no_nvcc()}")


@needs_nvcc
@pytest.mark.parametrize(
    "kernel", [pytest.param(name, marks=pytest.mark.slow) if name in SELDOM else name for name in ATTENTION]
)
def test_a_library_opens_and_explains_itself_without_a_driver(compiled, kernel):
    """dlopen, the workspace and the texts need no GPU; a launch says what CUDA says. Where there is a driver the
    made-up addresses would be used, so no launch is tried there."""
    row = dispatch.VARIANTS[kernel]
    name = row.kernel.name
    library = ctypes.CDLL(str(compiled(hopper_unit(kernel)) / LIBRARY))
    text = library.qf_status_text
    text.restype = ctypes.c_char_p
    assert text(0) == b"success"
    assert f"kernel '{name}'".encode() in text(100001) and b"35" in text(35)
    assert text(100001).endswith(b"past what 32 bits count")  # and is not cut off
    wrong_abi = (ctypes.c_int32 * 512)(12345)
    assert getattr(library, f"qf_{name}")(wrong_abi, None) == 100003

    dtype, head_dim = on_hopper(kernel)
    array = Array((1, 16, 2, head_dim), None, dtype, "cuda:0")
    symbols = [f"qf_{name}", "qf_status_text", f"qf_{name}_workspace"]
    addresses = [ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value for symbol in symbols]
    precision = None if row.precision == "native" else row.precision
    plan = plan_of(check(array, array, array, Options(precision=precision)), (), False)
    call = _native.Call(plan.struct, plan.params(), list(plan.pointers), *addresses)
    if row.precision == "native":  # scores; flags, and two parts of each block's: two blocks of 16 rows, or four
        parts = 2 * 16 * (head_dim + 4) * 4
        workspaces = {"unfused": 4 * 2 * 16 * 16, "sm90_decode": 8 * 512 + 2 * parts, "decode": 8 * 512 + 4 * parts}
        assert call.workspace_bytes == workspaces.get(kernel, 0)
    if driver_present():
        return
    with pytest.raises(KernelError, match=f"CUDA error .* launching kernel '{name}': CUDA driver"):
        call(4096, 4096, 4096, 4096, 4096, 0, 0)


@needs_nvcc
@pytest.mark.parametrize("kernel", BACKWARD)
def test_a_backward_library_explains_itself_without_a_driver(compiled, kernel):
    """Its workspace holds a float for each row of lse; too small a struct, or none, is refused before any launch."""
    library = ctypes.CDLL(str(compiled(hopper_unit(kernel)) / LIBRARY))
    wrong_abi = (ctypes.c_int32 * 512)(12345)
    assert getattr(library, f"qf_{kernel}")(wrong_abi, None) == 100003
    dtype, head_dim = on_hopper(kernel)
    array = Array((3, 16, 2, head_dim), None, dtype, "cuda:0")
    plan = plan_of_backward(check(array, array, array, Options()), (), True)
    symbols = [f"qf_{kernel}", "qf_status_text", f"qf_{kernel}_workspace"]
    addresses = [ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value for symbol in symbols]
    call = _native.Call(plan.struct, plan.params(), list(plan.pointers), *addresses)
    assert call.workspace_bytes >= 3 * 2 * 16 * 4
    pointers = [4096] * len(plan.pointers)
    with pytest.raises(KernelError, match=f"kernel '{kernel}' was given no workspace"):
        call(*pointers, 0, 0, 0)
    if not driver_present():
        with pytest.raises(KernelError, match=f"CUDA error .* launching kernel '{kernel}': CUDA driver"):
            call(*pointers, 4096, 0, 0)


@needs_nvcc
@pytest.mark.parametrize("kernel", ["sm90_fwd", "sm90_int8"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_library_refuses_the_scores_it_was_not_built_for(compiled, kernel, plain):
    """Before it launches anything; those it was built for get as far as the driver."""
    row = dispatch.VARIANTS[kernel]
    dtype, head_dim = on_hopper(kernel)
    library = ctypes.CDLL(str(compiled(hopper_unit(kernel) if plain else other_scores(kernel)) / LIBRARY))
    symbols = [f"qf_{kernel}", "qf_status_text", f"qf_{kernel}_workspace"]
    addresses = [ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value for symbol in symbols]
    array = Array((1, 16, 2, head_dim), None, dtype, "cuda:0")
    precision = None if row.precision == "native" else row.precision
    for words in ({}, {"softcap": 5.0}, {"scale": -0.5}, {"scale": 0.0}, {"scale": 1e-60}):
        if driver_present():
            continue  # made-up addresses would be used
        problem = check(array, array, array, Options(precision=precision, **words))
        plan = plan_of(problem, (), False)
        assert plan.spec(90).plain_scores == (not words)
        call = _native.Call(plan.struct, plan.params(), list(plan.pointers), *addresses)
        expected = KernelError if plan.spec(90).plain_scores == plain else NoKernelError
        with pytest.raises(expected, match="CUDA driver" if expected is KernelError else "another dtype.* softcap"):
            call(4096, 4096, 4096, 4096, 4096, 0, 0)


@needs_nvcc
@pytest.mark.parametrize("kernel", ["unfused", "fa_warps", "fa_tc"])
def test_a_rung_refuses_what_it_leaves_out(compiled, kernel):
    """The entry itself, behind dispatch: before it would launch anything, so without a driver."""
    library = ctypes.CDLL(str(compiled(hopper_unit(kernel)) / LIBRARY))
    symbols = [f"qf_{kernel}", "qf_status_text", f"qf_{kernel}_workspace"]
    addresses = [ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value for symbol in symbols]
    dtype, head_dim = on_hopper(kernel)

    def array(*shape: int, dtype: str = dtype) -> Array:
        return Array(shape, None, dtype, "cuda:0")

    batch, packed, starts = array(1, 16, 2, head_dim), array(16, 2, head_dim), array(2, dtype="int32")
    odd = array(1, 16, 2, head_dim - 1)
    table = array(16, head_dim // 2, dtype="float32")
    rotated = check(batch, batch, batch, Options(), None, RopeArrays(table, table, False))
    plans = {
        "rope": plan_of(rotated, ("rope.cos", "rope.sin"), False),
        "packed": plan_of(
            check_packed(packed, packed, packed, starts, starts, 16, 16, Options()),
            ("cu_seqlens_q", "cu_seqlens_k"),
            False,
        ),
    }
    if kernel == "fa_tc":
        plans["head_dim"] = plan_of(check(odd, odd, odd, Options()), (), False)
    for plan in plans.values():
        call = _native.Call(plan.struct, plan.params(), list(plan.pointers), *addresses)
        with pytest.raises(NoKernelError, match=f"kernel '{kernel}' was built for .*, takes no rope"):
            call(*[4096] * len(plan.pointers), 4096, 0, 0)


@needs_nvcc
@pytest.mark.parametrize("kernel", GEMM)
def test_a_gemm_library_opens_and_explains_itself_without_a_driver(compiled, kernel):
    """As above; and what the checks in front of a launch refuse, which dispatch should never let through."""
    library = ctypes.CDLL(str(compiled(hopper_unit(kernel)) / LIBRARY))
    text = library.qf_status_text
    text.restype = ctypes.c_char_p
    assert text(0) == b"success"
    assert f"kernel '{kernel}'".encode() in text(100001) and b"131071" in text(100001) and b"35" in text(35)
    assert getattr(library, f"qf_{kernel}")((ctypes.c_int32 * 512)(12345), None) == 100003
    spec = dispatch.VARIANTS[kernel].spec(90, *on_hopper(kernel))
    integers = spec.precision == "int8"
    words = {
        "dtype": OP_DTYPES.index("int8" if integers else spec.dtype),
        "out_dtype": OP_DTYPES.index(spec.dtype),
        "activation": ACTIVATIONS.index(spec.activation),
        **{"m": 16, "n": 16, "k": 16, "x_stride_m": 16, "x_stride_k": 1, "w_stride_k": 16, "w_stride_n": 1},
        "out_stride_m": 16,
    }

    def launch(**fields: int) -> None:
        size, layout = _native.op_layouts["QfLinearParams"]
        packed = bytearray(size)
        for name, value in {"struct_bytes": size, **words, **fields}.items():
            struct.pack_into(layout[name][1], packed, layout[name][0], value)
        symbols = [f"qf_{kernel}", "qf_status_text", f"qf_{kernel}_workspace"]
        addresses = [ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value for symbol in symbols]
        call = _native.Call("QfLinearParams", bytes(packed), ["x", "w", "out"], *addresses)
        assert call.workspace_bytes == 0
        call(4096, 4096, 4096, 0, 0, 0)

    refusals = [{"m": -1}, {"n": 2**31 - 1}, {"dtype": 4}, {"out_dtype": 3}, {"activation": 4}, {"w_stride_n": 2}]
    refusals.append({"k": 131072} if integers else {"x_stride_k": 2})
    for refused in refusals:
        with pytest.raises(NoKernelError, match=f"kernel '{kernel}' was built for another dtype, out_dtype or activ"):
            launch(**refused)
    launch(m=0), launch(n=0)
    if not driver_present():
        with pytest.raises(KernelError, match=f"CUDA error .* launching kernel '{kernel}': CUDA driver"):
            launch()


@needs_nvcc
@pytest.mark.parametrize("kernel", ["linear_bwd", "sm90_linear_bwd"])
def test_a_library_of_linear_gradients_explains_itself_without_a_driver(compiled, kernel):
    """Its workspace holds shares of dbias and, where there is an activation, dh: whole vectors, of two whole steps. On
    Hopper, copies of rows that are no whole 16 bytes and of the result besides, for one product at a time."""
    library = ctypes.CDLL(str(compiled(hopper_unit(kernel)) / LIBRARY))
    assert getattr(library, f"qf_{kernel}")((ctypes.c_int32 * 512)(12345), None) == 100003
    size, layout = _native.op_layouts["QfLinearBwdParams"]
    words = {"dtype": 2, "m": 100, "n": 36, "k": 16, "dout_stride_m": 36, "x_stride_m": 16, "w_stride_k": 36}
    words |= {"w_stride_n": 1, "up_stride_k": 36, "up_stride_n": 1}

    def prepared(**fields: int) -> _native.Call:
        packed = bytearray(size)
        for name, value in {"struct_bytes": size, **words, **fields}.items():
            struct.pack_into(layout[name][1], packed, layout[name][0], value)
        symbols = [f"qf_{kernel}", "qf_status_text", f"qf_{kernel}_workspace"]
        addresses = [ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value for symbol in symbols]
        pointers = ["dout", "x", "w", "up", "pre", "pre_up", "dx", "dw"]
        return _native.Call("QfLinearBwdParams", bytes(packed), pointers, *addresses)

    def whole(*sizes: int) -> int:
        return sum(-(-size // 256) * 256 for size in sizes)

    shares = 2 * 2 * 36 * 4  # of two chunks of rows
    for activation, dh in ((0, 0), (1, 100 * 40 * 2), (4, 100 * 128 * 2)):
        own = whole(dh) + shares
        copies = whole(100 * 80, 16 * 80)  # of dh and w for dx, of dh and dw for dw
        expected = whole(own) + copies if kernel == "sm90_linear_bwd" else own
        assert prepared(activation=activation).workspace_bytes == expected
    for refused in ({"dtype": 0}, {"bias_dtype": 1}, {"activation": 5}, {"n": 2**31 - 1}, {"w_stride_n": 2}):
        with pytest.raises(NoKernelError, match=f"kernel '{kernel}' was built for another dtype"):
            prepared(**refused)(*[4096] * 8, 4096, 0, 0)
    with pytest.raises(KernelError, match=f"kernel '{kernel}' was given no workspace"):
        prepared()(*[4096] * 8, 0, 0, 0)
    if not driver_present():
        with pytest.raises(KernelError, match=f"CUDA error .* launching kernel '{kernel}': CUDA driver"):
            prepared()(*[4096] * 8, 4096, 0, 0)


@needs_nvcc
@pytest.mark.parametrize("kernel", ["quantize", "dequantize"])
def test_a_quantization_library_opens_and_explains_itself_without_a_driver(compiled, kernel):
    library = ctypes.CDLL(str(compiled(hopper_unit(kernel)) / LIBRARY))
    library.qf_status_text.restype = ctypes.c_char_p
    assert f"kernel '{kernel}'".encode() in library.qf_status_text(100001)
    assert getattr(library, f"qf_{kernel}")((ctypes.c_int32 * 512)(12345), None) == 100003
    kind = f"Qf{kernel.capitalize()}Params"
    size, layout = _native.op_layouts[kind]

    def prepared(**fields: int) -> _native.Call:
        packed = bytearray(size)
        words = {"batch": 1, "length": 100, "heads": 2, "head_dim": 64, "group": 16, "granularity": 1, "symmetric": 1}
        for name, value in {"struct_bytes": size, **words, **fields}.items():
            struct.pack_into(layout[name][1], packed, layout[name][0], value)
        symbols = [f"qf_{kernel}", "qf_status_text", f"qf_{kernel}_workspace"]
        addresses = [ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value for symbol in symbols]
        return _native.Call(kind, bytes(packed), ["values.data", "scale"], *addresses)

    assert prepared().workspace_bytes == 0
    if kernel == "quantize":  # two chunks of two heads: sums of 64 channels, and a count each
        assert prepared(smooth=1).workspace_bytes == 4 * (64 * 4 + 4)
        assert prepared(granularity=0).workspace_bytes == 16
        assert prepared(group=5000).workspace_bytes == 2 * 16
    for refused in ({"dtype": 1}, {"head_dim": 0}, {"group": 0}, {"length": 2**31 - 1, "heads": 2**20}):
        with pytest.raises(NoKernelError, match=f"kernel '{kernel}' was built for another dtype"):
            prepared(**refused)(4096, 4096, 4096, 0, 0)
    if not driver_present():
        with pytest.raises(KernelError, match=f"CUDA error .* launching kernel '{kernel}': CUDA driver"):
            prepared()(4096, 4096, 4096, 0, 0)


@needs_nvcc
@pytest.mark.parametrize("kernel", KEPT)
def test_a_library_of_kept_keys_opens_and_explains_itself_without_a_driver(compiled, kernel):
    library = ctypes.CDLL(str(compiled(hopper_unit(kernel)) / LIBRARY))
    variant = dispatch.VARIANTS[kernel]
    name = variant.kernel.name
    library.qf_status_text.restype = ctypes.c_char_p
    assert f"kernel '{name}'".encode() in library.qf_status_text(100001)
    assert getattr(library, f"qf_{name}")((ctypes.c_int32 * 512)(12345), None) == 100003
    symbols = [f"qf_{name}", "qf_status_text", f"qf_{name}_workspace"]
    addresses = [ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value for symbol in symbols]

    def call(dtype: str) -> None:
        plan = kept_plan(variant, Array((1, 200, 2, 128), None, dtype, "cuda:0"))
        prepared = _native.Call(plan.struct, plan.params(), list(plan.pointers), *addresses)
        prepared(*[4096] * len(plan.pointers), 4096, 0, 0)

    with pytest.raises(NoKernelError, match=f"kernel '{name}' was built for another dtype"):
        call("float16")
    if not driver_present():
        with pytest.raises(KernelError, match=f"CUDA error .* launching kernel '{name}': CUDA driver"):
            call("bfloat16")


def kept_plan(variant: dispatch.Variant, x: Array) -> Plan:
    """quantize_kv of x and x, or attention of x, or of a few rows like it, on that."""
    precision = variant.precision
    made = QUANTIZE_KV.plan(x, x, None, None, None, None, precision, "nearest", 0, False, None)
    if variant.kernel.op == "quantize_kv":
        return made
    parts = {result.field: Array(result.shape, None, result.dtype, x.device) for result in made.results}
    names = [name.removeprefix("kv.") for name in ATTENTION_KEPT.arrays[1:10]]
    kept = [parts.get(KV_FIELDS[name], x if name == "v" else None) for name in names]
    words = (precision, x.dtype, True, None, None, 0.1, None, None, False, True, False)
    q = Array((1, 4, *x.shape[2:]), None, x.dtype, x.device) if variant.kernel.few_rows else x
    return ATTENTION_KEPT.plan(q, *kept, *[None] * 5, *words)


def driver_present() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@needs_nvcc
def test_libraries_name_the_runtime_and_nothing_else_of_cuda(compiled):
    """By its SONAME, so that a library opens beside any framework's own; the driver is looked for at the first call."""
    library = compiled(hopper_unit("unfused")) / LIBRARY
    tools = toolchain.find()
    shared = runtime.find(tools)
    listed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    needed = {name for name in re.findall(r"NEEDED.*\[(.*)\]", listed) if "cu" in name}
    assert needed == ({runtime.name_of(tools)} if shared else set())
    assert not re.search(r"R(UN)?PATH", listed)  # what is opened is what the cache checked


@needs_nvcc
def test_a_fresh_process_opens_a_library_by_the_cache(compiled, shared_cache):
    compiled(hopper_unit("unfused"))
    code = f"""
        from pathlib import Path
        from qflash.jit.cache import Cache
        from qflash.jit.load import load
        from qflash.testing.cuda_units import hopper_unit
        text = load(hopper_unit("unfused"), Cache(Path({str(shared_cache.root)!r}))).qf_status_text
        print(text(0) != 0)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "True\n"
