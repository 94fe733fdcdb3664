"""Machine code launched through NVIDIA's driver (csrc/bindings/cubins.cc), without a GPU.

Scripts run in processes that find tests/unit/fake_driver.c, compiled, where the driver would be.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from qflash.backends import triton as backend

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler for the driver"),
]
needs_triton = pytest.mark.skipif(bool(backend.why_not()), reason=backend.why_not())

# Cubins on QfRowsParams with kernels that write their arguments where the first one points.
TOY = """
    import ctypes
    import struct

    import numpy as np
    import pytest

    from qflash import _native
    from qflash.errors import KernelError, NoKernelError

    driver = ctypes.CDLL("libcuda.so.1")
    size, fields = _native.op_layouts["QfRowsParams"]
    told = np.zeros(16, np.uint64)
    compiled = []

    def told_by(name):
        return ctypes.c_int.in_dll(driver, "fake_" + name).value

    def field(name):
        return ("field", fields[name][0])

    def params(**values):
        packed = bytearray(size)
        for name, value in {"struct_bytes": size, "x": told.ctypes.data, **values}.items():
            offset, kind = fields[name]
            struct.pack_into(kind, packed, offset, value)
        return bytes(packed)

    def call(cubins, stream=0, **values):
        entry, text, workspace, context = cubins.functions
        return _native.Call("QfRowsParams", params(**values), [], entry, text, workspace, context)(0, stream, 0)

    def one_pass(grid, *arguments):
        return ([field(grid)], [("field", fields["x"][0]), *arguments])

    NO_WORKSPACE = [[("constant", 0)]]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(script): it, in a process that finds the driver."""
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).parent / "fake_driver.c"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(folder / "libcuda.so.1"), str(source), "-lm"]
    subprocess.run(command, check=True)

    def run_script(*scripts: str, **environment: str) -> None:
        env = os.environ | {"LD_LIBRARY_PATH": str(folder), "JAX_PLATFORMS": "cpu"} | environment
        script = "".join(map(textwrap.dedent, scripts))
        subprocess.run([sys.executable, "-c", script], check=True, env=env)

    return run_script


def test_arguments_grids_choices_and_failures(run):
    run(TOY, ARGUMENTS, CHOICES, MEMORY, FAILURES)


ARGUMENTS = """
    pass_ = one_pass("rows", field("columns"), field("scale"), ("has", fields["weight"][0]), ("has", fields["bias"][0]))
    cubins = _native.Cubins(
        "QfRowsParams", [([], [pass_])], NO_WORKSPACE, lambda choice: [(b"\\x7fELF", "toy_5", 640, 96)]
    )
    call(cubins, rows=7, columns=11, scale=2.5, bias=16, stream=12345)
    assert told[1] == 11 and told[2:3].view(np.float32)[0] == 2.5
    assert told[3:5].astype(np.uint32).tolist() == [0, 1]  # weight is null, bias is not
    assert told[5:7].tolist() == [0, 0]  # Triton's scratch memory
    assert (told_by("blocks"), told_by("threads"), told_by("shared_bytes")) == (7, 96, 640)
    assert ctypes.c_void_p.in_dll(driver, "fake_stream").value == 12345
    launches = told_by("launches")
    call(cubins, rows=0)  # an empty grid is no launch
    assert told_by("launches") == launches
"""

CHOICES = """
    def compile(choice):
        compiled.append(choice)
        return [(b"\\x7fELF", f"choice{choice}_1", 0, 32)]

    aligned = [field("x_stride"), ("constant", 8), ("multiple_of", 0)]
    small = [field("columns"), ("constant", 100), ("up_to", 0)]
    blocks = [field("rows"), ("constant", 3), ("ceil_divide", 0), ("constant", 2), ("maximum", 0)]
    choices = [([small, aligned], [one_pass("rows")]), ([small], [(blocks, [("field", fields["x"][0])])])]
    cubins = _native.Cubins("QfRowsParams", choices, NO_WORKSPACE, compile)
    call(cubins, rows=4, columns=100, x_stride=16)
    assert compiled == [0] and told_by("blocks") == 4
    call(cubins, rows=10, columns=100, x_stride=17)
    assert compiled == [0, 1] and told_by("blocks") == 4
    call(cubins, rows=3, columns=100, x_stride=17)  # which is compiled already
    assert compiled == [0, 1] and told_by("blocks") == 2
    with pytest.raises(NoKernelError, match="no choice of this kernel serves the call"):
        call(cubins, rows=3, columns=101)
"""

# A struct that has a workspace: its regions are addresses in it, and its size is asked for first.
MEMORY = """
    size, fields = _native.op_layouts["QfLayerNormBwdParams"]
    rows = [field("rows"), ("constant", 4), ("multiply", 0)]
    regions = [[("constant", 0)], rows, [*rows, ("constant", 8), ("add", 0)]]
    arguments = [("field", fields["x"][0]), ("region", 0), ("region", 1)]
    cubins = _native.Cubins(
        "QfLayerNormBwdParams", [([], [([("constant", 1)], arguments)])], regions,
        lambda choice: [(b"\\x7fELF", "big_3", 100 * 1024, 256)],
    )
    entry, text, workspace, context = cubins.functions
    packed = params(rows=5)
    prepared = _native.Call("QfLayerNormBwdParams", packed, [], entry, text, workspace, context)
    assert prepared.workspace_bytes == 28
    for _ in range(2):
        prepared(4096, 0, 0)
    assert told[1:3].tolist() == [4096, 4096 + 20]
    assert told_by("attribute_calls") == 1 and told_by("shared_bytes") == 100 * 1024
    size, fields = _native.op_layouts["QfRowsParams"]
"""

FAILURES = """
    def fails(compile, message):
        cubins = _native.Cubins("QfRowsParams", [([], [one_pass("rows")])], NO_WORKSPACE, compile)
        with pytest.raises(KernelError, match=message):
            call(cubins, rows=1)

    fails(lambda choice: 1 / 0, "ZeroDivisionError")
    fails(lambda choice: [], "another number of passes")
    fails(lambda choice: [(b"refused", "toy_1", 0, 32)], "toy_1: cuLibraryLoadData: CUDA_ERROR_INVALID_IMAGE")
    kept = _native.Cubins(
        "QfRowsParams", [([], [one_pass("rows")])], NO_WORKSPACE, lambda choice: [(b"\\x7fELF", "toy_1", 0, 32)]
    )
    with pytest.raises(NoKernelError, match="blocks; allowed: up to"):
        call(kept, rows=2**31)
    for bad in ([], [("add", 0)], [field("rows"), field("rows")], [("field", fields["scale"][0])], [("halve", 2)]):
        with pytest.raises(ValueError):
            _native.Cubins("QfRowsParams", [([bad], [one_pass("rows")])], NO_WORKSPACE, None)
    with pytest.raises(ValueError, match="an argument is no region at 0"):
        _native.Cubins("QfRowsParams", [([], [one_pass("rows", ("region", 0))])], NO_WORKSPACE, None)
    with pytest.raises(KeyError):
        _native.Cubins("QfNothing", [([], [one_pass("rows")])], NO_WORKSPACE, None)
"""

# triton_softmax, which the driver computes: prepared as for a GPU, and as a kernel that an XLA program names.
SOFTMAX = """
    from dataclasses import replace

    import jax
    import numpy as np

    import qflash
    from qflash.call.prepare import prepare
    from qflash.frontends.jax.attributes import attributes
    from qflash.frontends.jax.kernels import TARGET, register
    from qflash.frontends.numpy import describe
    from qflash.ops.rows import SOFTMAX
    from qflash import backends

    x = np.random.default_rng(0).standard_normal((5, 40), np.float32)
    wanted = qflash.softmax(x, scale=0.5)
    plan = SOFTMAX.plan(replace(describe("x", x), device="cuda:0"), 0.5, "triton_softmax")
    prepared = prepare(plan, 90)
    out = np.empty_like(x)
    prepared.call(x.ctypes.data, out.ctypes.data, 0, 0, 0)
    np.testing.assert_allclose(out, wanted, rtol=1e-6)

    spec = plan.spec(90)
    key = register("triton_softmax", spec, backends.load(prepared.kernel, spec), plan.struct)
    size, fields = qflash._native.op_layouts[plan.struct]
    words = {
        "kernel": key, "takes": plan.struct, "params": np.frombuffer(plan.params(), np.int64),
        "pointers": np.array([fields[name][0] for name in plan.pointers]), "num_bytes": np.array([x.nbytes] * 2),
        "sizes": np.zeros(0, np.int64), "bounds": np.zeros(0, np.int64),
    }
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1,), np.uint8))
    found, _ = jax.jit(lambda x: jax.ffi.ffi_call(TARGET, shapes)(x, **words))(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
"""


@needs_triton
def test_a_triton_kernel_from_end_to_end(run):
    run(SOFTMAX)


# jax lowers a call for CUDA where there is no GPU, and the program names the kernel.
LOWERED = """
    import jax
    import jax.numpy as jnp
    from jax import export

    import qflash

    x = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    call = jax.jit(lambda q, k, v: qflash.attention(q, k, v, causal=True, kernel="triton_int8", precision="int8"))
    unchecked = [export.DisabledSafetyCheck.custom_call("qflash_call")]
    program = export.export(call, platforms=["cuda"], disabled_checks=unchecked)(x, x, x)
    assert "triton_int8" in program.mlir_module()
"""


@needs_triton
def test_jax_lowers_it_for_cuda(run):
    run(LOWERED, QFLASH_CUDA_ARCH="90")
