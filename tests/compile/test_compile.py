"""Every CUDA kernel compiled by nvcc for its architectures, without a GPU: registers, symbols, SASS."""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from qflash import dispatch
from qflash.backends import cuda
from qflash.backends.arch import ARCHES
from qflash.call.spec import OP_DTYPES, Spec
from qflash.jit.compiler import LIBRARY, LOG, Unit
from qflash.testing.cuda_tools import cuobjdump, why_no_nvcc
from qflash.testing.cuda_units import (
    ATTENTION,
    BACKWARD,
    CUDA_ROWS,
    GEMM,
    HOPPERS_OWN,
    ROWS,
    SELDOM,
    activated,
    hopper_unit,
    other_scores,
)

MOST_BYTES = 150 * 2**20 // len(cuda.specialisations([90]))  # a library's share of what all may take
CSRC = Path(cuda.__file__).resolve().parent.parent / "csrc"
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
MULTIPLYING = [row.name for row in HOPPERS_OWN if row.kernel.op != "quantize_kv"]  # those of them that multiply
DECODING = [row.name for row in HOPPERS_OWN if row.kernel.few_rows]  # by a warp each: too few rows for a warpgroup
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
    "sm90_linear_bwd": ("HGMMA", 24),  # likewise, of two layouts of dx and of dw
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

# Kernels that ask no more than whether grids may overlap, which is off before Hopper: so it is in libraries of `merge`
# for 8.0 and of `kv_write` for 7.5. What `quantize` has for Turing alone the emulator runs.
AS_ON_HOPPER = ("kv_write_pages", "quantize", "rope")


def covering() -> list[Unit]:
    """Few units in which every kernel, architecture, dtype and head_dim bucket occurs; test_whole_matrix has all.

    Each rung of attention on arrays comes for the first architecture, where tiles pass through registers, the last, and
    one of 8.0, 8.6 and 8.9 in turn; INT8, gradients and other kinds of k and v for the first and the last, a library of
    two kinds once for each; decoding of arrays for the last, as nvcc takes long for it; the operations beside it for
    two; those of ONE_CODE and AS_ON_HOPPER for Hopper alone. Dtypes and buckets come in turn, a different one first for
    every kernel. Hopper's own `sm90_fwd` comes for four head dims, `sm90_decode` on arrays and on INT8 pages for two,
    and those that quantize, which nvcc takes long for, once, with a softcap for a small head_dim: Hopper's are those
    that the other tests here look into."""
    kinds = (("float16", 64), ("float16", 112), ("bfloat16", 256))
    chosen = [cuda.unit_of(dispatch.VARIANTS["sm90_fwd"], *kind, 90) for kind in kinds]
    chosen.append(cuda.unit_of(dispatch.VARIANTS["sm90_fwd_pages"], "float16", 64, 90))  # 32 registers a producer
    chosen.append(cuda.unit_of(dispatch.VARIANTS["sm90_bwd"], "float16", 64, 90))  # another tile of dQ
    chosen += [hopper_unit(row.name) for row in HOPPERS_OWN]
    full = ("sm90_decode", "sm90_decode_pages_int8")  # all 255 registers
    chosen += [cuda.unit_of(dispatch.VARIANTS[name], "bfloat16", 256, 90) for name in full]
    scored = [row for row in HOPPERS_OWN if row.kernel.per_scores and row.kv == "arrays"]
    for row in {row.kernel.name: row for row in reversed(scored)}.values():  # QK^T is the same in every precision
        small = replace(row.spec(90, "bfloat16", 64), plain_scores=False)
        chosen.append(other_scores(row.name) if row.precision == "native" else cuda.unit(row.kernel, small))
    # Those of the portable kernel come in turn. The largest head_dim is compiled soonest, and has no register to spare.
    invariant = [row for row in HOPPERS_OWN if row.kernel.per_batch_invariance and row.kv == "arrays"]
    chosen += [cuda.unit(row.kernel, replace(row.spec(90, "bfloat16", 256), batch_invariant=True)) for row in invariant]
    chosen += [activated("gemm_tiled", "float32", "swiglu", 80)]
    chosen += [activated("gelu_linear_wmma", "float16", "gelu_tanh")]
    for first, row in enumerate(row for row in CUDA_ROWS if row not in HOPPERS_OWN):
        # For 8.0 gemm_mma is what it is for Hopper; Turing has neither its copies nor its wide tiles.
        older = [] if row.name in (*ONE_CODE, *AS_ON_HOPPER) else [75 if row.name == "gemm_mma" else ARCHES[first % 4]]
        if row.kernel.op in ("attention", "attention_backward"):
            few = row.kv != "arrays" or row.precision == "int8" or row.kernel.op != "attention"
            older = [75] if few else [75, (80, 86, 89)[first % 3]]
            shared = row.kv in dict(row.kernel.shared_kvs)  # in the library of another kind
            if row.name in ONE_CODE or shared or (row.kernel.few_rows and row.kv == "arrays"):
                older = []
        for turn, arch in enumerate(older, start=first):
            if units := units_of(row, arch):
                chosen.append(units[turn * 5 % len(units)])  # 5: prime to the number of units a variant has
        if row.name not in SELDOM:
            chosen.append(hopper_unit(row.name))
    chosen.append(cuda.unit_of(dispatch.VARIANTS["int8_gemm_tc"], "int32", 0, 80))  # a dtype of products alone
    return list(dict.fromkeys(chosen))


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
        check_hopper_instructions(opcodes, name, at_least=0.5 if name in DECODING else 1)  # as head_dim is smaller


@lru_cache(maxsize=4)  # kernels whose names are neighbours may share a library
def opcodes_of(entry: Path) -> list[str]:
    """Every instruction in a library, with its suffixes."""
    command = [cuobjdump(), "-sass", str(entry / LIBRARY)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.]*)", sass)


def check_hopper_instructions(opcodes: list[str], kernel: str, at_least: float = 1) -> None:
    """Products by warpgroups, and by one warp no more than the scores of a tile computed again take (8 keys an
    instruction), or all by warps; tiles by the copy engine, registers traded (where few rows are decoded, not for every
    head_dim), nothing in local memory."""
    names = [op.split(".")[0] for op in opcodes]
    instruction, least = INSTRUCTION[kernel]
    assert names.count(instruction) >= at_least * least, names.count(instruction)
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
    # Partial sums of a few rows are seen 16 bytes at a time, or not at all.
    assert ("STG.E.128.STRONG.GPU" if kernel in DECODING else "STG.E.128") in opcodes


@needs_nvcc
@pytest.mark.parametrize("unit", covering(), ids=by_label)
def test_compiles_without_local_memory(compiled, unit):
    check_unit(unit, compiled(unit))


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("unit", cuda.specialisations(), ids=by_label)
def test_whole_matrix(compiled, unit):
    check_unit(unit, compiled(unit))
    if cuobjdump() is not None:
        check_products(unit, compiled(unit))


def products_of(unit: Unit) -> set[str]:
    """The instructions by which a unit of an architecture before Hopper multiplies 16 bits or integers."""
    if unit.target == "90a":
        return set()  # check_hopper_instructions
    rows = [row for row in CUDA_ROWS if row.kernel.name == unit.name and unit in units_of(row, int(unit.target))]
    found = {INSTRUCTION[row.name][0] for row in rows} & {"HMMA", "IMMA"}
    dtype = OP_DTYPES[int(dict(unit.defines)["QF_DTYPE"])]
    by_cores = dtype == "float32" or (dtype == "bfloat16" and unit.target == "75")
    return found - {"HMMA"} if by_cores else found


def check_products(unit: Unit, entry: Path) -> None:
    names = [op.split(".")[0] for op in opcodes_of(entry)]
    for instruction in products_of(unit):
        assert names.count(instruction) >= 32, (unit.label, instruction, names.count(instruction))


def first_of_each_product() -> list[Unit]:
    """Of covering(), for each architecture before Hopper and each of its instructions."""
    found = {(unit.target, product): unit for unit in reversed(covering()) for product in products_of(unit)}
    return list(dict.fromkeys(found.values()))


@needs_nvcc
@pytest.mark.skipif(cuobjdump() is None, reason="compile test: no cuobjdump (pip install nvidia-cuda-cuobjdump)")
@pytest.mark.parametrize("unit", first_of_each_product(), ids=by_label)
def test_older_tensor_cores_multiply(compiled, unit):
    """All other units are looked into by test_whole_matrix."""
    check_products(unit, compiled(unit))


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
    by_warps = ["HMMA.16816.F32.BF16"] * 192 + ["UTMALDG.4D", "SYNCS.PHASECHK", "STG.E.128.STRONG.GPU"]
    check_hopper_instructions(by_warps, "sm90_decode")
    check_hopper_instructions(by_warps[96:], "sm90_decode", at_least=0.5)
    for bad in (by_warps[1:], by_warps[:-1], by_warps[:192] + by_warps[193:], [*by_warps, good[0]], [*by_warps, "LDL"]):
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
    "kernel",
    [
        pytest.param(kernel, marks=pytest.mark.slow) if kernel in SELDOM else kernel
        for kernel in sorted({*ATTENTION, *BACKWARD, *MULTIPLYING, "fa_int8_quantized", *GEMM, "linear_bwd", *VECTORS})
    ],
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
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("kernel", ROWS)
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
@pytest.mark.skipif(cuobjdump() is None, reason="compile test: no cuobjdump (pip install nvidia-cuda-cuobjdump)")
@pytest.mark.parametrize("arch", [pytest.param(75, marks=pytest.mark.slow), 80])
def test_ptx_libraries_hold_no_machine_code(compiled, arch):
    """So what a newer GPU runs under QFLASH_CUDA_ARCH is the older one's code path, and nothing else."""
    unit = replace(cuda.unit_of(dispatch.VARIANTS["fa"], "float32", 32, arch), ptx=True)
    library = str(compiled(unit) / LIBRARY)
    listed = [
        subprocess.run([cuobjdump(), flag, library], capture_output=True, text=True) for flag in ("-lelf", "-lptx")
    ]
    assert "ELF" not in listed[0].stdout, listed[0].stdout
    assert f"sm_{arch}.ptx" in listed[1].stdout, listed[1].stdout
