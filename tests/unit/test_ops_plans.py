"""Plans of the operations beside attention: layouts from the header, packing, strides, results."""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path

import pytest

import qflash
from qflash import _native
from qflash.call.array import Array, row_stride
from qflash.call.op import Plan, Result
from qflash.call.prepare import Prepared, prepare
from qflash.call.spec import spec_of
from qflash.ops.attention_kv import ATTENTION_KEPT
from qflash.ops.kv import KV_FIELDS, QUANTIZE_KV
from qflash.ops.linear import SWIGLU
from qflash.ops.matmul import INT8_MATMUL
from qflash.ops.quantization import DEQUANTIZE, QUANTIZE
from qflash.ops.rows import CROSS_ENTROPY, LAYER_NORM, SOFTMAX

HEADERS = Path(qflash.__file__).parent / "csrc" / "include"
NESTED = {"QfTensor", "QfRope", "QfScales", "QfKv", "QfAttnParams"}


def array(*shape, dtype="float32", strides=None, device="cpu"):
    return Array(shape, strides, dtype, device)


def fields_in(header: str, name: str) -> list[tuple[str, str]]:
    """(type, field) of a struct, read from the header's text."""
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", header, re.DOTALL)[1]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    found = []
    for line in body.split(";"):
        words = line.replace("*", " * ").split()
        if words:
            names = " ".join(words).replace("const ", "").split(" ", 1)
            found += [(names[0], field.strip(" *")) for field in names[1].split(",")]
    return found


@pytest.mark.parametrize("name", sorted(_native.op_layouts))
def test_layouts_list_every_field_of_the_header(name):
    text = "".join((HEADERS / file).read_text() for file in ("qflash.h", "qflash_ops.h"))

    def names(struct_name: str, prefix: str = "") -> list[str]:
        found = []
        for kind, field in fields_in(text, struct_name):
            found += names(kind, f"{prefix}{field}.") if kind in NESTED else [prefix + field]
        return found

    wanted = names(name)
    size, layout = _native.op_layouts[name]
    assert list(layout) == wanted
    offsets = [offset for offset, _ in layout.values()]
    assert offsets == sorted(set(offsets)) and offsets[-1] < size


def test_every_struct_an_operation_takes_has_a_layout():
    text = "".join((HEADERS / file).read_text() for file in ("qflash.h", "qflash_ops.h"))
    of_the_cpu = set(re.findall(r"int qf_cpu\w*\(const (\w+)\*", text))
    assert of_the_cpu | {"QfQuantizeKvParams"} == set(_native.op_layouts)  # that one: CUDA alone


def test_params_are_packed_by_name():
    plan = SOFTMAX.plan(array(3, 5, dtype="bfloat16"), 0.5, None)
    size, layout = _native.op_layouts["QfRowsParams"]
    packed = plan.params()
    assert len(packed) == size

    def read(name):
        offset, kind = layout[name]
        return struct.unpack_from(kind, packed, offset)[0]

    wanted = {"struct_bytes": size, "dtype": 2, "rows": 3, "columns": 5, "x_stride": 5, "out_stride": 5, "scale": 0.5}
    assert {name: read(name) for name in layout if read(name)} == wanted


def test_a_field_that_is_not_there_is_an_error():
    plan = Plan(spec_of("softmax", "cpu", "float32"), "cpu", None, "QfRowsParams", (("columnz", 1),), (), ())
    with pytest.raises(KeyError, match="columnz"):
        plan.params()
    params = SOFTMAX.plan(array(1, 1), 1.0, None).params()
    with pytest.raises(KeyError, match="QfRowsParams has no pointer rows"):
        _native.Call("QfRowsParams", params, ["rows"], 1, 1, 0)
    with pytest.raises(KeyError, match="no operation takes a struct QfNothing"):
        _native.Call("QfNothing", params, [], 1, 1, 0)
    with pytest.raises(ValueError, match=f"given as {len(params) - 1} bytes; allowed: {len(params)}"):
        _native.Call("QfRowsParams", params[:-1], [], 1, 1, 0)


@pytest.mark.parametrize(
    ("numbers", "names", "text"),
    [
        ((0, 0), {}, "a call with 1 pointers was given 2 numbers and 0 names; allowed: 4"),
        ((0, 0, 0, 0, 0), {}, "given 5 numbers"),
        ((0, 0, 0), {"num_threads": 1}, "3 numbers and 1 names"),
        ((1.5, 0, 0, 0), {}, "argument 0 is 1.5; allowed: an address"),
        ((None, 0, 0, 0), {}, "argument 0 is None; allowed: an address"),
        ((-1, 0, 0, 0), {}, "argument 0 is -1; allowed: an address, an int from 0"),
        ((2**64, 0, 0, 0), {}, "argument 0 is 18446744073709551616"),
        ((0, "x", 0, 0), {}, "argument 1 is 'x'"),
        ((0, 0, -1, 0), {}, "argument 2 is -1"),
        ((0, 0, 0, 2**31), {}, "num_threads is 2147483648; allowed: an int of 32 bits"),
        ((0, 0, 0, 1.0), {}, "num_threads is 1.0"),
    ],
)
def test_a_call_takes_addresses_alone(numbers, names, text):
    """Nothing is run before all of them are ints."""
    params = SOFTMAX.plan(array(1, 1), 1.0, None).params()
    call = _native.Call("QfRowsParams", params, ["x"], 1, 1, 0)
    with pytest.raises(TypeError, match=re.escape(text)):
        call(*numbers, **names)


def test_a_call_is_made_of_words_of_their_types():
    for arguments in (("QfRowsParams",), (1, b"", [], 1, 1, 0), ("QfRowsParams", "", [], 1, 1, 0)):
        with pytest.raises(TypeError):
            _native.Call(*arguments)
    with pytest.raises(TypeError):
        type("Other", (_native.Call,), {})  # it has no room for more
    size = _native.op_layouts["QfAttnBwdParams"][0]
    call = _native.Call(
        struct="QfAttnBwdParams", params=bytes(size), pointers=("fwd.q.data",), entry=1, status_text=1, workspace=0
    )
    assert call.workspace_bytes == 0


def test_what_changes_from_call_to_call_is_put_in_its_place():
    """Pointers by their names, the workspace as large as was asked for, threads wherever the struct has them."""
    threads = {"QfAttnParams": "num_threads", "QfAttnBwdParams": "fwd.num_threads"}
    for name, field in threads.items():
        size, layout = _native.op_layouts[name]
        prefix = field.removesuffix("num_threads")
        seen = {}

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        def entry(params, stream, size=size, layout=layout, seen=seen):
            packed = ctypes.string_at(params, size)
            seen.update({field: struct.unpack_from(kind, packed, at)[0] for field, (at, kind) in layout.items()})
            seen["stream"] = stream
            return 0

        needed = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(lambda _: 4321)
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (entry, needed)]
        params = bytes(range(256)) * 4
        pointers = [f"{prefix}kv.v.data", f"{prefix}q.data"]
        call = _native.Call(name, params[:size], pointers, addresses[0], 0, addresses[1])
        assert call.workspace_bytes == 4321
        assert call(2**63 + 5, 7, 11, 13, -3) is None
        changed = {pointers[0]: 2**63 + 5, pointers[1]: 7, "workspace": 11, "workspace_bytes": 4321, field: -3}
        wanted = {key: struct.unpack_from(kind, params, at)[0] for key, (at, kind) in layout.items()} | changed
        assert seen.pop("stream") == 13
        for key, value in wanted.items():
            assert seen[key] == value or value != value, key


def test_the_abi_is_a_digest_of_the_layouts():
    assert re.fullmatch("[0-9a-f]{16}", _native.ABI)
    lines = []
    for name, (size, fields) in _native.op_layouts.items():
        lines.append(f"{name} {size}")
        lines += [f"{field} {offset} {kind}" for field, (offset, kind) in fields.items()]
    digest = 0xCBF29CE484222325  # FNV-1a
    for byte in "".join(f"{line}\n" for line in lines).encode():
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    assert f"{digest:016x}" == _native.ABI


@pytest.mark.parametrize(
    ("shape", "strides", "stride"),
    [
        ((3, 5), None, 5),
        ((5,), (1,), 5),
        ((3, 5), (8, 1), 8),
        ((2, 3, 5), (24, 8, 1), 8),
        ((2, 3, 5), (8, 16, 1), None),
        ((2, 1, 5), (8, 999, 1), 8),
        ((2, 3, 5), (1, 2, 6), None),
        ((4, 5), (0, 1), 0),
        ((4, 5), (-5, 1), None),
        ((4, 1), (7, 3), 7),
        ((0, 5), (99, 99), 5),
        ((2**20, 2**20, 2**12), (2**32, 2**12, 1), 2**12),
    ],
)
def test_row_stride(shape, strides, stride):
    assert row_stride(Array(shape, strides, "float32", "cpu")) == stride


@pytest.mark.parametrize(
    ("shape", "strides", "layout", "copied"),
    [
        ((4, 6), (6, 1), ("n", 6, 1), False),
        ((4, 6), (1, 4), ("k", 1, 4), False),
        ((4, 6), (9, 1), ("n", 9, 1), False),
        ((4, 6), (12, 2), ("n", 6, 1), True),
        ((4, 6), (-6, 1), ("n", 6, 1), True),
        ((4, 1), (1, 55), ("k", 1, 4), False),
        ((4, 1), (3, 55), ("n", 3, 1), False),
        ((1, 6), (55, 1), ("n", 6, 1), False),
        ((1, 6), (55, 3), ("k", 1, 3), False),
        ((1, 1), (7, 7), ("k", 1, 1), False),
        ((4, 6), (1, 1), ("k", 1, 1), False),  # windows that overlap
        ((0, 6), (7, 7), ("n", 6, 1), False),
    ],
)
def test_either_dimension_of_b_may_be_contiguous(shape, strides, layout, copied):
    a, b = array(2, shape[0], dtype="int8"), array(*shape, dtype="int8", strides=strides)
    plan = INT8_MATMUL.plan(a, b, None, None, None, None, None)
    fields = dict(plan.fields)
    assert (plan.spec(0).layout, fields["w_stride_k"], fields["w_stride_n"]) == layout
    assert plan.operands[1].contiguous == copied
    assert plan.spec(90).layout == layout[0]


def test_both_weights_run_the_way_that_kernels_take_the_first_to_run():
    """They look at its stride of k alone."""
    x = array(2, 4, dtype="float16")
    windows, rows = (array(4, 6, dtype="float16", strides=strides) for strides in ((1, 1), (6, 1)))
    for gate, up in ((windows, rows), (rows, windows), (windows, windows)):
        fields = dict(SWIGLU.plan(x, gate, up, None, None, None, None, False, None).fields)
        along = "k" if fields["w_stride_k"] == 1 else "n"
        assert fields[f"up_stride_{along}"] == 1


def test_results_of_each_operation():
    def results(plan):
        return plan.results

    x = array(2, 3, 8, dtype="float16")
    assert results(SOFTMAX.plan(x, 1.0, None)) == (Result("out", (2, 3, 8), "float16"),)
    stats = tuple(Result(name, (2, 3), "float32") for name in ("mean", "rstd"))
    assert results(LAYER_NORM.plan(x, None, None, 1e-5, True, None))[1:] == stats
    targets = array(2, 3, dtype="int64")
    plan = CROSS_ENTROPY.plan(x, targets, "mean", -100, 0.0, True, None)
    assert [(r.field, r.shape) for r in results(plan)] == [("losses", (2, 3)), ("lse", (2, 3)), ("total", ())]
    assert plan.operands[1].dtype == "int32"
    q = array(2, 50, 4, 8, dtype="bfloat16")
    plan = QUANTIZE.plan(q, None, None, None, None, "group", 16, True, True, "nearest", 0, False, None)
    assert [(r.field, r.shape) for r in results(plan)] == [
        ("values.data", (2, 50, 4, 8)), ("scale", (2, 4, 4)), ("mean", (2, 4, 8)),
    ]  # fmt: skip
    plan = QUANTIZE.plan(array(50, 8), None, None, None, None, "tensor", 16, False, False, "nearest", 0, False, None)
    assert [(r.field, r.shape) for r in results(plan)] == [
        ("values.data", (50, 8)), ("scale", ()), ("zero_point", ()), ("sums", (50,)),
    ]  # fmt: skip
    values, scale = array(50, 8, dtype="int8"), array(50)
    plan = DEQUANTIZE.plan(values, scale, None, None, "token", 16, True, "float16", None)
    assert results(plan) == (Result("out.data", (50, 8), "float16"),)
    assert plan.spec(0).dtype == "float16"


def kv_plans(precision, length=300, head_dim=40):
    """Of quantize_kv and of attention on what it returns."""
    k = array(2, length, 3, head_dim, dtype="float16")
    quantize = QUANTIZE_KV.plan(k, k, None, None, None, None, precision, "stochastic", 7, False, None)
    parts = {result.field: array(*result.shape, dtype=result.dtype) for result in quantize.results}
    names = [name.removeprefix("kv.") for name in ATTENTION_KEPT.arrays[1:10]]
    ordered = [parts.get(KV_FIELDS[name], k if name == "v" else None) for name in names]
    q = array(2, 20, 6, head_dim, dtype="float16")
    words = (precision, "float16", True, None, None, 0.5, None, None, False, True, False)
    return quantize, ATTENTION_KEPT.plan(q, *ordered, *[None] * 5, *words)


@pytest.mark.parametrize("precision", ["int8", "int8_fp8"])
def test_what_quantize_kv_writes_is_what_attention_reads(precision):
    quantize, attend = kv_plans(precision)
    written = {result.field: (result.shape, result.dtype) for result in quantize.results}
    assert written["kv.k.data"] == ((2, 300, 3, 48), "int8")
    assert written["kv.k_scales.scale"] == ((2, 3, 5), "float32")
    read = [operand.field for operand in attend.operands]
    assert set(written) | {"kv.v.data"} == {field for field in read if field.startswith("kv.")}
    if precision == "int8":
        assert "kv.v.data" not in written and [x.field for x in quantize.operands] == ["k.data"]
    else:
        assert [x.field for x in quantize.operands] == ["k.data", "v.data"]
        assert written["kv.v.data"] == ((2, 3, 40, 384), "uint8")
        assert written["kv.v_exponents"] == ((2, 3, 3), "float32")
        assert written["kv.v_mean"] == ((2, 3, 40), "float32")
    code = {"int8": 1, "int8_fp8": 2}[precision]
    for plan, name in ((quantize, "QfQuantizeKvParams"), (attend, "QfAttnParams")):
        fields = dict(plan.fields)
        assert (fields["precision"], fields["k_len"], fields["kv_heads"]) == (code, 300, 3)
        assert (fields["kv.kind"], fields["kv.k_dtype"], fields["kv.v_dtype"]) == (2, 3, 5 if code == 2 else 1)
        assert plan.struct == name and plan.spec(90).head_dim == 40
        assert len(plan.params()) == _native.op_layouts[plan.struct][0]
    assert (dict(quantize.fields)["rounding"], dict(quantize.fields)["seed"]) == (1, 7)
    assert attend.spec(90).precision == quantize.spec(90).precision == precision
    assert (attend.spec(90).kv, quantize.spec(90).op) == ("kept", "quantize_kv")
    assert [result.field for result in attend.results] == ["out.data", "lse"]


def test_without_keys_there_is_nothing_to_read():
    """Only attention runs, on means and counts that are 0: rows that see no key have results."""
    quantize, attend = kv_plans("int8_fp8", length=0)
    assert quantize.nothing_to_do and not attend.nothing_to_do


def test_results_known_to_be_zero_are(monkeypatch):
    torch = pytest.importorskip("torch")
    from qflash.frontends.torch import launch

    quantize, _ = kv_plans("int8_fp8", length=0)
    k = torch.zeros(2, 0, 3, 40, dtype=torch.float16)
    monkeypatch.setattr(launch, "prepare", lambda plan, arch: Prepared(quantize, None, None))
    arrays, words = (k, k, None, None, None, None), ("int8_fp8", "stochastic", 7, False, None)
    made = launch.launch(QUANTIZE_KV, launch.make_ready(QUANTIZE_KV, arrays, words, None), arrays)
    assert [x.numel() for x in made] == [0, 0, 240, 6, 0, 6, 0, 6, 240] and not any(x.any() for x in made)


def test_sizes_beyond_int32_are_kept():
    plan = SOFTMAX.plan(array(2**40, 2**33), 1.0, None)
    assert dict(plan.fields)["rows"] == 2**40 and dict(plan.fields)["columns"] == 2**33
    assert len(plan.params()) == _native.op_layouts["QfRowsParams"][0]


def test_a_call_without_elements_needs_no_kernel_call():
    assert not isinstance(prepare(SOFTMAX.plan(array(0, 5), 1.0, None)).call, _native.Call)
    assert not isinstance(prepare(SOFTMAX.plan(array(5, 0), 1.0, None)).call, _native.Call)
    assert isinstance(prepare(SOFTMAX.plan(array(5, 1), 1.0, None)).call, _native.Call)
