"""`sm90_gemm` compiled by nvcc: its libraries, also of activations and types that test_compile.py leaves out, that of
`sm90_linear_bwd`, tiles that no library has (tests/emulated/sm90_gemm_shapes.cu), and what its loop over k is made of.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from qflash import dispatch
from qflash.backends import cuda
from qflash.call.spec import Spec
from qflash.jit.compiler import LIBRARY, LOG, Unit
from qflash.testing.cuda_tools import cuobjdump, why_no_nvcc
from qflash.testing.cuda_units import hopper_unit

pytestmark = pytest.mark.skipif(why_no_nvcc() is not None, reason=f"compile test: {why_no_nvcc()}")
CSRC = Path(cuda.__file__).resolve().parent.parent / "csrc"
SHAPES = Path(__file__).parent.parent / "emulated" / "sm90_gemm_shapes.cu"


def unit_of(dtype: str, precision: str, activation: str) -> Unit:
    spec = Spec("cuda", 90, dtype, precision=precision, op="linear", activation=activation)
    return cuda.unit(dispatch.BY_NAME["sm90_gemm"], spec)


# The instruction of the large tile's products, and how many of it: four for each layout of w, of gradients for each of
# dx in two layouts and dw.
UNITS = {
    "bfloat16": (hopper_unit("sm90_gemm"), "HGMMA.64x256x16.F32.BF16", 8),
    "float16-swiglu": (unit_of("float16", "native", "swiglu"), "HGMMA.64x256x16.F32", 8),
    "bfloat16-gelu": (unit_of("bfloat16", "native", "gelu"), "HGMMA.64x256x16.F32.BF16", 8),
    "int8-int32": (unit_of("int32", "int8", ""), "IGMMA.64x256x32.S8.S8", 4),
    "int8-bfloat16-gelu_tanh": (unit_of("bfloat16", "int8", "gelu_tanh"), "IGMMA.64x256x32.S8.S8", 4),
    "int8-float32-swiglu": (unit_of("float32", "int8", "swiglu"), "IGMMA.64x256x32.S8.S8", 4),
    "gradients": (hopper_unit("sm90_linear_bwd"), "HGMMA.64x256x16.F32.BF16", 12),
}

LIKE_OTHERS = ("bfloat16-gelu", "int8-bfloat16-gelu_tanh", "int8-float32-swiglu")  # in what differs between libraries


def check_log(entry: Path) -> None:
    log = (entry / LOG).read_text()
    used = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert used and all(set(found) == {"0"} for found in used), log
    assert "warning" not in log.lower() and not re.search(r"\(C75\d\d\)|Potential Performance Loss", log), log


def kernels_of(entry: Path) -> dict[str, list[str]]:
    """Opcodes, in order, of every kernel in a library."""
    if cuobjdump() is None:
        pytest.skip("compile test: no cuobjdump (pip install nvidia-cuda-cuobjdump)")
    command = [cuobjdump(), "-sass", str(entry / LIBRARY)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = (part.split("\n", 1) for part in sass.split("Function : ")[1:])
    opcode = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
    return {name: opcode.findall(body) for name, body in parts}


def loop_of(opcodes: list[str]) -> list[str]:
    """From the wait for a stage to the branch back: what a consumer does for a step along k."""
    products = [i for i, opcode in enumerate(opcodes) if "GMMA." in opcode]
    first = max(i for i in range(products[0]) if opcodes[i].startswith("SYNCS.PHASECHK"))
    wait = next(i for i in range(products[0], len(opcodes)) if opcodes[i].startswith("WARPGROUP.DEPBAR"))
    last = next(i for i in range(wait, len(opcodes)) if opcodes[i].startswith("WARPGROUP.DEPBAR") and i > wait)
    return opcodes[first:last]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in UNITS]
)
def test_libraries(compiled, name):
    unit, product, count = UNITS[name]
    entry = compiled(unit)
    check_log(entry)
    opcodes = [opcode for body in kernels_of(entry).values() for opcode in body]
    assert opcodes.count(product) == count
    assert {"UTMALDG.4D.MULTICAST", "UTMASTG.4D", "USETMAXREG.DEALLOC.CTAPOOL", "UCGABAR_ARV"} <= set(opcodes)
    assert not {"LDL", "STL", "HMMA", "IMMA"} & {opcode.split(".")[0] for opcode in opcodes}


@pytest.mark.parametrize("name", ["bfloat16", "int8-int32", "gradients"])
def test_a_step_has_its_products_and_little_else(compiled, name):
    """No fence of memory beside the release of a stage, no load, no store, and few instructions: they are issued while
    the products of the step before run, 512 clocks."""
    unit, product, _ = UNITS[name]
    bodies = [body for body in kernels_of(compiled(unit)).values() if product in body]
    assert bodies
    for body in bodies:
        loop = loop_of(body)
        assert loop.count(product) == 4 and len(loop) < 90, len(loop)
        assert not {opcode.split(".")[0] for opcode in loop} & {"MEMBAR", "LDG", "STG", "LDS", "STS", "FENCE"}


@pytest.mark.slow
def test_tiles_that_no_library_has(compiled):
    """Clusters of one block, no lag, x contiguous along m beside w along k: a transposed A of wgmma."""
    entry = compiled(Unit("gemm_shapes", SHAPES, (CSRC, CSRC / "include"), (), "90a", "sm90_gemm's tiles"))
    check_log(entry)
    kernels = {name: body for name, body in kernels_of(entry).items() if "relayout" not in name}
    assert len(kernels) == 28  # four tiles: of four layouts in 16 bits, of int8, of SwiGLU in both
    for name, body in kernels.items():
        assert sum("GMMA." in opcode for opcode in body) == 4, name
        assert not {"LDL", "STL"} & {opcode.split(".")[0] for opcode in body}, name


def test_a_library_explains_itself_without_a_driver(compiled):
    library = ctypes.CDLL(str(compiled(UNITS["int8-int32"][0]) / LIBRARY))
    library.qf_status_text.restype = ctypes.c_char_p
    assert library.qf_status_text(0) == b"success" and b"35" in library.qf_status_text(35)
    assert b"kernel 'sm90_gemm'" in library.qf_status_text(100001) and b"131071" in library.qf_status_text(100001)
    assert library.qf_sm90_gemm((ctypes.c_int32 * 512)(12345), None) == 100003
