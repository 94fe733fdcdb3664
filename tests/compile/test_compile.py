"""Every CUDA kernel compiled by nvcc for its architectures, without a GPU: registers, symbols, SASS, and how a library
behaves on a machine that has no driver."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from qflash import _native, dispatch
from qflash.backends import cuda
from qflash.backends.arch import ARCHES
from qflash.call.array import Array
from qflash.call.op import Plan
from qflash.call.spec import ACTIVATIONS, OP_DTYPES, Spec
from qflash.errors import KernelError, NoKernelError
from qflash.jit import runtime, toolchain
from qflash.jit.compiler import LIBRARY, LOG, Unit
from qflash.ops.attention import plan_of, plan_of_backward
from qflash.ops.attention_kv import ATTENTION_KEPT
from qflash.ops.kv import KV_FIELDS, QUANTIZE_KV
from qflash.ops.problem import Options, RopeArrays, check, check_packed
from qflash.testing.cuda_tools import cuobjdump, why_no_nvcc

MOST_BYTES = 150 * 2**20 // len(cuda.specialisations([90]))  # a library's share of what all may take
CSRC = Path(cuda.__file__).resolve().parent.parent / "csrc"
CUDA_ROWS = [row for row in dispatch.VARIANTS.values() if row.kernel.backend == "cuda"]
ATTENTION = [row.name for row in dispatch.variants_of("attention", "cuda") if row in CUDA_ROWS]
BACKWARD = [row.name for row in dispatch.variants_of("attention_backward", "cuda")]
# How the kernels that only stream move memory.
VECTORS = {
    "quantize": {"LDG.E.128", "STG.E.64"},
    "dequantize": {"LDG.E.64", "STG.E.128"},
    "sm90_quantize": {"LDG.E.128", "STG.E.128"},
    "sm90_quantize_fp8": {"LDG.E.128", "STG.E.128"},
    "kv_write_pages": {"LDG.E.128", "STG.E.128"},
    "kv_write_pages_int8": {"LDG.E.128", "STG.E.128"},
    "merge": {"LDG.E.128", "LDG.E.64", "STG.E.128"},
    "rope": {"LDG.E.NA.128", "LDG.E.128.CONSTANT", "STG.E.128"},  # x once, tables that L1 keeps
}
HOPPERS_OWN = [row for row in CUDA_ROWS if not row.kernel.later_arches]  # kernels of Hopper's own instructions
MULTIPLYING = [row.name for row in HOPPERS_OWN if row.kernel.op != "quantize_kv"]  # those of them that multiply
DECODING = [row.name for row in HOPPERS_OWN if row.kernel.few_rows]  # by a warp each: too few rows for a warpgroup
# those that make or take a QuantizedKV
KEPT = [row.name for row in HOPPERS_OWN if row.kernel.op == "quantize_kv" or row.kv == "kept"]
GEMM = [row.name for row in CUDA_ROWS if row.kernel.op == "linear" and row not in HOPPERS_OWN]
# Quantized kernels of Hopper: the instruction of PV, which is not that of QK^T.
PRODUCT_OF_V = {
    "sm90_int8": "HGMMA",
    "sm90_int8_fp8": "QGMMA",
    "sm90_int8_fp8_kv": "QGMMA",
    "sm90_int8_kv": "HGMMA",
}
# The instruction each kernel exists for, and how many of it the least there must be.
INSTRUCTION = {
    "decode": ("HMMA", 192),
    "decode_kv": ("IMMA", 96),
    "decode_pages": ("HMMA", 192),
    "decode_pages_int8": ("IMMA", 96),
    "dequantize": ("I2FP", 32),
    "fa": ("FFMA", 256),
    "fa_bwd": ("FFMA", 1024),
    "fa_int8": ("IMMA", 32),
    "fa_int8_quantized": ("IMMA", 96),
    "fa_mma": ("HMMA", 128),
    "fa_mma_bwd": ("HMMA", 512),
    "fa_mma_pages": ("HMMA", 128),
    "fa_mma_pages_int8": ("HMMA", 128),
    "fa_tc": ("HMMA", 32),
    "fa_warps": ("FFMA", 256),
    "gelu_linear_wmma": ("HMMA", 64),
    "gemm_mma": ("HMMA", 1024),
    "gemm_tiled": ("FFMA", 1024),
    "int8_gemm_tc": ("IMMA", 256),
    "kv_write_pages": ("ACQBULK", 4),  # waits for the grid before it; kernels of both kinds of pages do
    "kv_write_pages_int8": ("FADD", 128),
    "int8_gemm_tiled": ("IDP", 512),
    "linear_bwd": ("HMMA", 768),
    "merge": ("MUFU", 24),
    "quantize": ("FMUL", 256),
    "rope": ("FFMA", 80),  # of each rotated channel: four heads of one pair and of four, half-split and interleaved
    "sm90_bwd": ("HGMMA", 32),  # half of them of dK and dV, at head_dim 64
    "sm90_decode": ("HMMA", 192),
    "sm90_decode_kv": ("IMMA", 96),
    "sm90_decode_pages": ("HMMA", 192),
    "sm90_decode_pages_int8": ("IMMA", 96),
    "sm90_fwd": ("HGMMA", 12),
    "sm90_fwd_pages": ("HGMMA", 12),
    "sm90_fwd_pages_int8": ("HGMMA", 12),
    "sm90_gemm": ("HGMMA", 16),  # four a step, of two tiles and two layouts of w
    "sm90_gemm_int8": ("IGMMA", 8),
    "sm90_int8": ("IGMMA", 4),
    "sm90_int8_fp8": ("IGMMA", 4),
    "sm90_int8_fp8_kv": ("IGMMA", 4),
    "sm90_int8_kv": ("IGMMA", 4),
    "sm90_quantize": ("F2FP", 96),
    "sm90_quantize_fp8": ("F2FP", 96),
    "unfused": ("FFMA", 256),
    "softmax": ("SHFL", 20),
    "layer_norm": ("SHFL", 40),
    "cross_entropy": ("SHFL", 30),
    "softmax_bwd": ("SHFL", 20),
    "layer_norm_bwd": ("SHFL", 60),
    "cross_entropy_bwd": ("MUFU", 32),
}


ROW_KERNELS = ["softmax", "layer_norm", "cross_entropy", "softmax_bwd", "layer_norm_bwd", "cross_entropy_bwd"]
needs_nvcc = pytest.mark.skipif(why_no_nvcc() is not None, reason=f"compile test: {why_no_nvcc()}")


def units_of(row: dispatch.Variant, arch: int) -> list[Unit]:
    """The units that serve a variant; several variants may share them."""
    served = (row.precision, row.kv)
    specs = (
        spec
        for spec in cuda.specs(row.kernel, arch)
        if (spec.precision, spec.kv) == served and not spills(row.kernel, spec)
    )
    return list(dict.fromkeys(cuda.unit(row.kernel, spec) for spec in specs))


# `decode` with batch_invariant at head_dim 256: docs/log/decode.md, Open.
SPILLING = {75: ("arrays", "pages", "kept"), 86: ("pages_int8",), 89: ("pages_int8",), 90: ("arrays", "pages")}


def spills(kernel: dispatch.Kernel, spec: Spec) -> bool:
    found = kernel.name == "decode" and spec.batch_invariant and spec.head_dim == 256
    return found and spec.kv in SPILLING.get(spec.arch, ())


def folder_of(row: dispatch.Variant) -> Path:
    return cuda.unit_of(row, row.dtypes[0], 128, 90).source.parent


# Variants that have one code for all architectures. A kernel's own files are the only ones that may ask for QF_ARCH:
# test_one_code_asks_for_no_architecture.
ONE_CODE = [
    row.name for row in CUDA_ROWS if not any("QF_ARCH" in path.read_text() for path in folder_of(row).iterdir())
]


def covering() -> list[Unit]:
    """Few units in which every kernel, architecture, dtype and head_dim bucket occurs: each rung of attention on arrays
    once for each architecture, but for one of 8.6 and 8.9 in turn, which have the same tiles; those of ONE_CODE, and
    its other kinds of k and v, for the first, where tiles pass through registers, and the last; the operations beside
    it for two, those of ONE_CODE for Hopper alone (test_whole_matrix has the others); dtypes and buckets in turn, a
    different one first for every kernel; of Hopper's own `sm90_fwd` for four head dims, `sm90_decode` for two, and
    those that quantize, which nvcc takes long for, once. Hopper's are those that the other tests here look into."""
    kinds = (("float16", 64), ("float16", 112), ("bfloat16", 256))
    chosen = [cuda.unit_of(dispatch.VARIANTS["sm90_fwd"], *kind, 90) for kind in kinds]
    chosen.append(cuda.unit_of(dispatch.VARIANTS["sm90_fwd_pages"], "float16", 64, 90))  # 32 registers a producer
    chosen.append(cuda.unit_of(dispatch.VARIANTS["sm90_bwd"], "float16", 64, 90))  # another tile of dQ
    chosen += [hopper_unit(row.name) for row in HOPPERS_OWN]
    chosen += [cuda.unit_of(dispatch.VARIANTS[name], "bfloat16", 256, 90) for name in DECODING]  # all 255 registers
    scored = [row for row in HOPPERS_OWN if row.kernel.per_scores and row.kv == "arrays"]
    once = {row.kernel.name: row for row in reversed(scored)}.values()  # QK^T is the same in every precision
    chosen += [other_scores(row.name) for row in once]
    invariant = [row for row in CUDA_ROWS if row.kernel.per_batch_invariance and row.kv == "arrays"]
    chosen += [
        cuda.unit(row.kernel, replace(row.spec(90, *on_hopper(row.name)), batch_invariant=True)) for row in invariant
    ]
    chosen.append(cuda.unit_of(dispatch.VARIANTS["int8_gemm_tc"], "int32", 0, 90))  # a dtype of products alone
    chosen += [activated("gemm_mma", "float16", "swiglu"), activated("gemm_tiled", "float32", "swiglu", 80)]
    chosen += [activated("gemm_tiled", "float32", "silu"), activated("gelu_linear_wmma", "float16", "gelu_tanh")]
    for first, row in enumerate(row for row in CUDA_ROWS if row not in HOPPERS_OWN):
        older = [] if row.name in ONE_CODE else [ARCHES[first % 4]]
        if row.kernel.op in ("attention", "attention_backward"):
            few = row.kv != "arrays" or row.name in ONE_CODE
            older = [75] if few else [75, 80, (86, 89)[first % 2]]
        for turn, arch in enumerate(older, start=first):
            if units := units_of(row, arch):
                chosen.append(units[turn * 5 % len(units)])  # 5: prime to the number of units a variant has
        chosen.append(hopper_unit(row.name))
    chosen.append(cuda.unit_of(dispatch.VARIANTS["int8_gemm_tc"], "int32", 0, 80))  # a dtype that turns may pass over
    return list(dict.fromkeys(chosen))


# dtype and bucket of units for Hopper, where not the kernel's first dtype and 128: large ones, as registers are scarce.
HOPPER = {
    "fa_int8": ("float16", 192),
    "fa_int8_quantized": ("float16", 256),
    "fa_mma": ("bfloat16", 256),
    "fa_tc": ("bfloat16", 128),
    "fa_warps": ("float32", 96),
    "gelu_linear_wmma": ("bfloat16", 128),
    "gemm_mma": ("bfloat16", 128),
    "linear_bwd": ("bfloat16", 128),
    **{row.name: ("bfloat16", 128) for row in HOPPERS_OWN},
}


def on_hopper(kernel: str) -> tuple[str, int]:
    return HOPPER.get(kernel, (dispatch.VARIANTS[kernel].dtypes[0], 128))


def hopper_unit(kernel: str) -> Unit:
    return cuda.unit_of(dispatch.VARIANTS[kernel], *on_hopper(kernel), 90)


def other_scores(kernel: str) -> Unit:
    """As hopper_unit, for scores with a softcap."""
    variant = dispatch.VARIANTS[kernel]
    return cuda.unit(variant.kernel, replace(variant.spec(90, *on_hopper(kernel)), plain_scores=False))


def activated(kernel: str, dtype: str, activation: str, arch: int = 90) -> Unit:
    """The unit of a linear layer's activation."""
    variant = dispatch.VARIANTS[kernel]
    return cuda.unit(variant.kernel, replace(variant.spec(arch, dtype), activation=activation))


def by_label(unit: Unit) -> str:
    return f"{unit.label}-sm_{unit.target}".replace(" ", "_")


def check_unit(unit: Unit, entry: Path) -> None:
    log = (entry / LOG).read_text()
    used = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert used, f"ptxas said nothing about registers:\n{log}"
    assert all(set(found) == {"0"} for found in used), f"{unit.label} uses local memory:\n{log}"
    assert "warning" not in log.lower(), log
    # (C7508): setmaxnreg is ignored; (C7510): products of wgmma wait for one another; and their like.
    assert not re.search(r"\(C75\d\d\)|Potential Performance Loss", log), log
    assert (entry / LIBRARY).stat().st_size < MOST_BYTES, "all libraries of an architecture are to stay below 150 MiB"
    library = ctypes.CDLL(str(entry / LIBRARY))
    for symbol in (f"qf_{unit.name}", f"qf_{unit.name}_workspace", "qf_status_text"):
        assert hasattr(library, symbol), f"{unit.label} does not export {symbol}"
    # Into hopper_unit() another test looks, which takes seconds.
    if cuobjdump() is None or unit in map(hopper_unit, MULTIPLYING):
        return
    served = [name for name in MULTIPLYING if unit in units_of(dispatch.VARIANTS[name], 90)]
    opcodes = opcodes_of(entry) if served else []
    for name in served:
        check_hopper_instructions(opcodes, name)


def opcodes_of(entry: Path) -> list[str]:
    """Every instruction in a library, with its suffixes."""
    command = [cuobjdump(), "-sass", str(entry / LIBRARY)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.]*)", sass)


def check_hopper_instructions(opcodes: list[str], kernel: str) -> None:
    """Products by warpgroups, and by one warp no more than the scores of a tile computed again take (8 keys an
    instruction), or all by warps; tiles by the copy engine, registers traded (where few rows are decoded, not for every
    head_dim), nothing in local memory."""
    names = [op.split(".")[0] for op in opcodes]
    instruction, least = INSTRUCTION[kernel]
    assert names.count(instruction) >= least, names.count(instruction)
    assert PRODUCT_OF_V.get(kernel, instruction) in names, set(names)
    if kernel in DECODING:
        assert not any(name.endswith("GMMA") for name in names), set(names)
    else:
        assert names.count("HMMA") <= 16 and "USETMAXREG" in names, (names.count("HMMA"), set(names))
    assert {"UTMALDG", "SYNCS"} <= set(names), set(names)
    if kernel == "sm90_decode_kv":  # K's integers, V's 16 bits
        assert {"HMMA", "IMMA"} <= set(names), set(names)
    if kernel == "sm90_decode_pages_int8":  # V's bytes are spread, not converted; scales come as runs of bytes
        assert {"HMMA", "PRMT", "UBLKCP"} <= set(names), set(names)
    assert not {"LDL", "STL"} & set(names), set(names)
    assert "STG.E.128" in opcodes


@needs_nvcc
@pytest.mark.parametrize("unit", covering(), ids=by_label)
def test_compiles_without_local_memory(compiled, unit):
    check_unit(unit, compiled(unit))


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("unit", cuda.specialisations(), ids=by_label)
def test_whole_matrix(compiled, unit):
    check_unit(unit, compiled(unit))


def test_the_covering_set_covers():
    """Every row of the table, and every value of each axis, is compiled by the default run."""
    units = covering()
    everything = cuda.specialisations()
    assert set(units) <= set(everything)
    assert {unit.name for unit in units} == {row.kernel.name for row in CUDA_ROWS}
    for row in CUDA_ROWS:
        assert set(units) & {unit for arch in ARCHES for unit in units_of(row, arch)}, row.name
    assert {unit.target for unit in units} == {unit.target for unit in everything}
    for axis in (
        "QF_DTYPE",
        "QF_HEAD_DIM",
        "QF_ARCH",
        "QF_PRECISION",
        "QF_KV_KIND",
        "QF_BATCH_INVARIANT",
        "QF_ACTIVATION",
        "QF_PLAIN_SCORES",
    ):
        values = [{dict(unit.defines).get(axis) for unit in some} for some in (units, everything)]
        assert values[0] == values[1], axis
    assert {row.name for row in CUDA_ROWS} == set(INSTRUCTION)


def test_one_code_asks_for_no_architecture():
    """What kernels include gets the architecture as an argument."""
    assert {"fa_bwd", "unfused", "softmax"} <= set(ONE_CODE) and not {"fa", "fa_mma", "decode"} & set(ONE_CODE)
    headers = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh")]
    outside = [path for path in headers if path.relative_to(CSRC).parts[0] not in ("kernels", "standalone")]
    assert not [path.name for path in outside if "QF_ARCH" in path.read_text()]


def test_the_hopper_check_can_fail():
    good = ["HGMMA.64x64x16.F32.BF16"] * 12 + ["UTMALDG.4D", "USETMAXREG.DEALLOC", "SYNCS.PHASECHK", "STG.E.128"]
    check_hopper_instructions(good, "sm90_fwd")
    for bad in (good[1:], good[:-4] + good[-3:], good + ["HMMA.16816.F32"] * 17, [*good, "LDL"], [*good, "STL.64"]):
        with pytest.raises(AssertionError):
            check_hopper_instructions(bad, "sm90_fwd")
    by_warps = ["HMMA.16816.F32.BF16"] * 192 + ["UTMALDG.4D", "SYNCS.PHASECHK", "STG.E.128"]
    check_hopper_instructions(by_warps, "sm90_decode")
    for bad in (by_warps[1:], by_warps[:192] + by_warps[193:], [*by_warps, good[0]], [*by_warps, "LDL"]):
        with pytest.raises(AssertionError):
            check_hopper_instructions(bad, "sm90_decode")
    integers = ["IGMMA.64x128x32.S8.S8"] * 4 + good[12:]
    for kernel, product in PRODUCT_OF_V.items():
        check_hopper_instructions([*integers, f"{product}.64x128x32.F32"], kernel)
        for bad in (integers, [*integers[1:], product]):
            with pytest.raises(AssertionError):
                check_hopper_instructions(bad, kernel)


@needs_nvcc
@pytest.mark.skipif(cuobjdump() is None, reason="compile test: no cuobjdump (pip install nvidia-cuda-cuobjdump)")
@pytest.mark.parametrize(
    "kernel", sorted({*ATTENTION, *BACKWARD, *MULTIPLYING, "fa_int8_quantized", *GEMM, "linear_bwd", *VECTORS})
)
def test_sass_has_the_instruction_the_kernel_exists_for(compiled, kernel):
    opcodes = opcodes_of(compiled(hopper_unit(kernel)))
    instruction, least = INSTRUCTION[kernel]
    count = {name: sum(op.split(".")[0] == name for op in opcodes) for name in (instruction, "LDL", "STL")}
    assert count[instruction] >= least and count["LDL"] == count["STL"] == 0, count
    if kernel in VECTORS:
        assert VECTORS[kernel] <= set(opcodes)
        return
    if kernel in MULTIPLYING:
        check_hopper_instructions(opcodes, kernel)
        return
    wide = {op for op in opcodes if ".128" in op}
    loads = ("LDG.E.128", "LDGSTS")
    assert {"LDS.128", "STS.128"} <= wide and any(op.startswith("STG.E.128") for op in wide), wide
    assert any(op.startswith(loads) for op in wide), wide


@needs_nvcc
@pytest.mark.skipif(cuobjdump() is None, reason="compile test: no cuobjdump (pip install nvidia-cuda-cuobjdump)")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ROW_KERNELS)
def test_rows_move_sixteen_bytes_at_a_time(compiled, kernel, dtype):
    """Past L1 on the way in, first to leave the caches on the way out, and reduced by shuffles, if at all."""
    opcodes = opcodes_of(compiled(cuda.unit_of(dispatch.VARIANTS[kernel], dtype, 0, 90)))
    instruction, least = INSTRUCTION[kernel]
    assert sum(op.split(".")[0] == instruction for op in opcodes) >= least
    assert opcodes.count("LDG.E.NA.128") >= 4 and not {"LDL", "STL"} & {op.split(".")[0] for op in opcodes}
    assert kernel == "cross_entropy" or opcodes.count("STG.E.EF.128") >= 4
    constant = opcodes.count("LDG.E.128.CONSTANT")  # of weight and bias, which L1 keeps
    assert not kernel.startswith("layer_norm") or constant >= 4


@needs_nvcc
@pytest.mark.parametrize("kernel", ATTENTION)
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
def test_the_library_of_linear_gradients_explains_itself_without_a_driver(compiled):
    """Its workspace holds shares of dbias and, where there is an activation, dh: whole vectors, of two whole steps."""
    library = ctypes.CDLL(str(compiled(hopper_unit("linear_bwd")) / LIBRARY))
    assert library.qf_linear_bwd((ctypes.c_int32 * 512)(12345), None) == 100003
    size, layout = _native.op_layouts["QfLinearBwdParams"]
    words = {"dtype": 2, "m": 100, "n": 36, "k": 16, "dout_stride_m": 36, "x_stride_m": 16, "w_stride_k": 36}
    words |= {"w_stride_n": 1, "up_stride_k": 36, "up_stride_n": 1}

    def prepared(**fields: int) -> _native.Call:
        packed = bytearray(size)
        for name, value in {"struct_bytes": size, **words, **fields}.items():
            struct.pack_into(layout[name][1], packed, layout[name][0], value)
        symbols = ["qf_linear_bwd", "qf_status_text", "qf_linear_bwd_workspace"]
        addresses = [ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value for symbol in symbols]
        pointers = ["dout", "x", "w", "up", "pre", "pre_up", "dx", "dw"]
        return _native.Call("QfLinearBwdParams", bytes(packed), pointers, *addresses)

    shares = 2 * 2 * 36 * 4  # of two chunks of rows
    assert prepared().workspace_bytes == shares
    assert prepared(activation=1).workspace_bytes == -(-100 * 40 * 2 // 256) * 256 + shares
    assert prepared(activation=4).workspace_bytes == -(-100 * 128 * 2 // 256) * 256 + shares
    for refused in ({"dtype": 0}, {"bias_dtype": 1}, {"activation": 5}, {"n": 2**31 - 1}, {"w_stride_n": 2}):
        with pytest.raises(NoKernelError, match="kernel 'linear_bwd' was built for another dtype"):
            prepared(**refused)(*[4096] * 8, 4096, 0, 0)
    with pytest.raises(KernelError, match="kernel 'linear_bwd' was given no workspace"):
        prepared()(*[4096] * 8, 0, 0, 0)
    if not driver_present():
        with pytest.raises(KernelError, match=r"CUDA error .* launching kernel 'linear_bwd': CUDA driver"):
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
    unit = cuda.unit_of(dispatch.VARIANTS["unfused"], "float32", 32, 90)
    library = compiled(unit) / LIBRARY
    tools = toolchain.find()
    shared = runtime.find(tools)
    listed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    needed = {name for name in re.findall(r"NEEDED.*\[(.*)\]", listed) if "cu" in name}
    assert needed == ({runtime.name_of(tools)} if shared else set())
    assert not re.search(r"R(UN)?PATH", listed)  # what is opened is what the cache checked


@needs_nvcc
def test_a_fresh_process_opens_a_library_by_the_cache(compiled, shared_cache):
    unit = cuda.unit_of(dispatch.VARIANTS["unfused"], "float32", 32, 90)
    compiled(unit)
    code = f"""
        from pathlib import Path
        from qflash import dispatch
        from qflash.backends import cuda
        from qflash.jit.cache import Cache
        from qflash.jit.load import load
        unit = cuda.unit_of(dispatch.VARIANTS["unfused"], "float32", 32, 90)
        text = load(unit, Cache(Path({str(shared_cache.root)!r}))).qf_status_text
        print(text(0) != 0)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "True\n"


@needs_nvcc
@pytest.mark.skipif(cuobjdump() is None, reason="compile test: no cuobjdump (pip install nvidia-cuda-cuobjdump)")
@pytest.mark.parametrize("arch", [75, 80])
def test_ptx_libraries_hold_no_machine_code(compiled, arch):
    """So what a newer GPU runs under QFLASH_CUDA_ARCH is the older one's code path, and nothing else."""
    unit = replace(cuda.unit_of(dispatch.VARIANTS["fa"], "float32", 32, arch), ptx=True)
    library = str(compiled(unit) / LIBRARY)
    listed = [
        subprocess.run([cuobjdump(), flag, library], capture_output=True, text=True) for flag in ("-lelf", "-lptx")
    ]
    assert "ELF" not in listed[0].stdout, listed[0].stdout
    assert f"sm_{arch}.ptx" in listed[1].stdout, listed[1].stdout
