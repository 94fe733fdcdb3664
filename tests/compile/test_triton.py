"""Triton kernels compiled ahead of time, without a GPU: registers, shared memory, instructions, parameters."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest

from qflash import dispatch
from qflash.backends import triton as backend
from qflash.call.spec import Spec
from qflash.triton.launches import HAS, Launches, parameters_of

pytestmark = pytest.mark.skipif(bool(backend.why_not()), reason=backend.why_not())

ROWS = [row for row in dispatch.KERNELS if row.backend == "triton"]
ARCHES = (80, 90)
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}  # the least of what GPUs since Ampere, and Hopper's, let a block have
CAUSAL = {"window": True}
# What most calls are. Choices beside the first, and rarer words, may spill a little: docs/kernels/triton.md.
SPECS = {
    "triton_fwd": (
        *(Spec("cuda", 0, "bfloat16", head_dim, **CAUSAL) for head_dim in (64, 128, 256)),
        *(Spec("cuda", 0, "float16", head_dim, **CAUSAL) for head_dim in (64, 128)),
        Spec("cuda", 0, "bfloat16", 128),
        Spec("cuda", 0, "float32", 64, **CAUSAL),
        Spec("cuda", 0, "bfloat16", 128, rope="half", **CAUSAL),
    ),
    "triton_int8": tuple(Spec("cuda", 0, "bfloat16", head_dim, "int8", **CAUSAL) for head_dim in (64, 128)),
    "triton_decode": tuple(
        Spec("cuda", 0, "bfloat16", 128, kv=kv, kv_lens=True, few_rows=True) for kv in ("arrays", "pages")
    ),
    "triton_softmax": (Spec("cuda", 0, "float16", op="softmax"),),
    "triton_rope": (Spec("cuda", 0, "bfloat16", op="rope"),),
    "triton_linear": (
        Spec("cuda", 0, "bfloat16", op="linear", activation="gelu", layout="k"),
        Spec("cuda", 0, "bfloat16", op="linear", layout="n"),
        Spec("cuda", 0, "bfloat16", op="linear", activation="swiglu", layout="k"),
        Spec("cuda", 0, "bfloat16", precision="int8", op="linear", layout="k"),
    ),
}
# The choice that most calls take, where it is not the first: many rows; a result and a bias of x's type.
USUAL = {("triton_linear", "native"): 11, ("triton_linear", "int8"): 5}
# At head_dim 256 no register is free, and releases of Triton, from 3.6 to 3.9, differ by some words.
MOST_STACK = {0: 0, 64: 0, 128: 0, 256: 64}
# Few on the older one, of attention those whose products another test looks into; float16 at one head_dim.
FEW = {"triton_fwd": (1, 2, 6), "triton_int8": (1,), "triton_decode": (0,), "triton_linear": (0, 2)}


def is_slow(name: str, at: int, arch: int) -> bool:
    return at not in FEW.get(name, (0,)) if arch == 80 else (name, at) == ("triton_fwd", 3)


CASES = [
    pytest.param(
        *(name, replace(spec, arch=arch)),
        id=f"{name}-{spec.dtype}-{spec.head_dim}-{at}-sm{arch}",
        marks=[pytest.mark.slow] if is_slow(name, at, arch) else [],
    )
    for name, specs in SPECS.items()
    for at, spec in enumerate(specs)
    for arch in ARCHES
]


@pytest.fixture(autouse=True)
def cache(shared_cache, monkeypatch):
    """What Triton compiles is kept beside what else the tests compile."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shared_cache.folder.parent / "triton"))


def of(name: str, spec: Spec) -> Launches:
    return backend.launches(dispatch.BY_NAME[name], spec)


def stack_bytes(cubin: bytes, path) -> int:
    """What a thread keeps outside its registers."""
    import triton

    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    told = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", told).group(1))


def test_every_row_is_compiled_here():
    assert {row.name for row in ROWS} == set(SPECS)


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_nothing_spills(name, spec, tmp_path):
    assert dispatch.reasons(dispatch.BY_NAME[name], spec) == []
    launches = of(name, spec)
    for one in backend.compiled(launches, launches.choices[USUAL.get((name, spec.precision), 0)], spec.arch):
        assert stack_bytes(one.asm["cubin"], tmp_path / "cubin") <= MOST_STACK[spec.head_dim], one.metadata.name
        assert one.metadata.shared <= SHARED_BYTES[spec.arch]
        assert "local" not in one.asm["ptx"]


def products(name: str, spec: Spec) -> str:
    """The PTX of the pass that attends."""
    launches = of(name, spec)
    return next(
        one.asm["ptx"]
        for one in backend.compiled(launches, launches.choices[USUAL.get((name, spec.precision), 0)], spec.arch)
        if re.search("wgmma|mma.sync", one.asm["ptx"])
    )


def test_hopper_multiplies_by_its_own_instruction():
    forward = products("triton_fwd", Spec("cuda", 90, "bfloat16", 128, **CAUSAL))
    assert len(re.findall(r"wgmma\.mma_async\S*\.f32\.bf16\.bf16", forward)) >= 12
    quantized = products("triton_int8", Spec("cuda", 90, "bfloat16", 128, "int8", **CAUSAL))
    assert len(re.findall(r"wgmma\.mma_async\S*\.s32\.s8\.s8", quantized)) >= 4
    assert "cp.async" in forward and "cp.async" in quantized
    layer = products("triton_linear", Spec("cuda", 90, "bfloat16", op="linear", activation="gelu", layout="k"))
    assert re.search(r"wgmma\.mma_async\.\S*m64n256k16\S*\.f32\.bf16\.bf16", layer)


def test_older_tensor_cores_multiply_by_theirs():
    assert products("triton_fwd", Spec("cuda", 80, "bfloat16", 128, **CAUSAL)).count("mma.sync") >= 64
    assert "s32.s8.s8" in products("triton_int8", Spec("cuda", 80, "bfloat16", 128, "int8", **CAUSAL))


def test_float32_is_not_rounded_to_the_type_of_tensor_cores():
    launches = of("triton_fwd", Spec("cuda", 90, "float32", 64, **CAUSAL))
    (one,) = backend.compiled(launches, launches.choices[0], 90)
    assert "tf32" not in one.asm["ptx"] and "fma.rn.f32" in one.asm["ptx"]


def test_integers_are_made_without_fused_products():
    launches = of("triton_int8", Spec("cuda", 90, "float16", 64, "int8", rope="half"))
    *make, attend = backend.compiled(launches, launches.choices[0], 90)
    assert len(make) == 4 and "fma" in attend.asm["ptx"]
    for one in make:
        assert "fma.rn.f32" not in one.asm["ptx"], one.metadata.name


def test_whole_vectors_are_loaded_where_rows_are_such():
    spec = Spec("cuda", 90, "float16", op="softmax")
    launches = of("triton_softmax", spec)
    aligned, any_rows = (backend.compiled(launches, choice, 90)[0].asm["ptx"] for choice in launches.choices[:2])
    assert "ld.global.v4" in aligned and "ld.global.v4" not in any_rows


# What a launch relies on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_parameters_are_fields_and_regions(row):
    for spec in SPECS[row.name]:
        launches = of(row.name, replace(spec, arch=90))
        known = {*parameters_of(launches.struct), *(region.name for region in launches.regions)}
        for choice in launches.choices:
            for one in choice.passes:
                assert {name.removeprefix(HAS) for name in one.parameters} <= known
                assert all(launches.type_of(name, choice) for name in one.parameters)


def test_the_usual_choice_of_a_layer_is_for_many_rows():
    for (name, precision), at in USUAL.items():
        choice = of(name, Spec("cuda", 90, "bfloat16", precision=precision, op="linear", layout="k")).choices[at]
        assert choice.passes[0].constants["BLOCK_M"] == 128 and choice.multiples
        assert choice.types["out"] == choice.types["bias"] == "bf16"


@pytest.mark.parametrize("name", SPECS)
def test_the_driver_gets_the_parameters_and_two_addresses_more(name):
    launches = of(name, replace(SPECS[name][0], arch=90))
    choice = launches.choices[0]
    for one, told in zip(choice.passes, backend.compiled(launches, choice, 90), strict=True):
        entry = re.search(r"\.entry \w+\((.*?)\)", told.asm["ptx"], re.DOTALL).group(1)
        kinds = re.findall(r"\.param \.(\w+)", entry)
        widths = {"i32": "u32", "i64": "u64", "u64": "u64", "fp32": "f32"}
        types = [launches.type_of(parameter, choice) for parameter in one.parameters]
        wanted = ["u64" if kind.startswith("*") else widths[kind] for kind in types]
        assert kinds == [*wanted, "u64", "u64"]
        assert told.metadata.num_ctas == 1 and not told.metadata.global_scratch_size


def test_no_kernel_is_tuned_at_run_time():
    from pathlib import Path

    import qflash

    sources = (Path(qflash.__file__).parent / "triton").glob("*.py")
    assert [path.name for path in sources if re.search(r"@triton\.(autotune|heuristics)", path.read_text())] == []
