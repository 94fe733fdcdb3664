"""The wrappers of Hopper's own instructions, each in a kernel that does little else (hopper/*.cu): compiled everywhere,
run on a GPU of compute capability 9.0 and held against NumPy."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np
import pytest
from test_compile import cuobjdump, needs_nvcc
from test_emulated_hopper import BYTE_PRODUCTS, SMALL, check_byte_products

from qflash.backends import cuda
from qflash.call.spec import DTYPES
from qflash.jit.compiler import LIBRARY, LOG, Unit

pytestmark = needs_nvcc
HERE = Path(__file__).parent
CSRC = Path(cuda.__file__).resolve().parent.parent / "csrc"
UNIT = Unit("hopper", HERE / "hopper" / "all.cu", (CSRC, CSRC / "include"), (), "90a", "Hopper's wrappers")
ROWS, PANEL = 24, 64  # of a box


@pytest.fixture(scope="module")
def entry(compiled) -> Path:
    return compiled(UNIT)


@pytest.fixture(scope="module")
def library(entry) -> ctypes.CDLL:
    return ctypes.CDLL(str(entry / LIBRARY))


@pytest.fixture
def device(library):
    """device(name, *words): calls try_<name>; arrays go to the GPU and come back changed."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch was built without CUDA")
    if (capability := torch.cuda.get_device_capability()) != (9, 0):
        pytest.skip("needs compute capability 9.0, this GPU has {}.{}".format(*capability))

    def call(name: str, *words: int | np.ndarray | ctypes.Array | tuple[np.ndarray, int]) -> None:
        sent, there = [], []
        for word in words:
            x, offset = word if isinstance(word, tuple) else (word, 0)  # offset: where the first element is, in bytes
            if isinstance(x, np.ndarray):
                there.append((x, torch.from_numpy(x.view(np.uint8).reshape(-1)).cuda()))
                sent.append(ctypes.c_void_p(there[-1][1].data_ptr() + offset))
            else:
                sent.append(x)
        torch.cuda.synchronize()
        assert getattr(library, f"try_{name}")(*sent) == 0
        for x, tensor in there:
            x.view(np.uint8).reshape(-1)[:] = tensor.cpu().numpy()

    return call


def test_they_compile(entry, library):
    log = (entry / LOG).read_text()
    used = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert used and all(set(found) == {"0"} for found in used), log
    assert "warning" not in log.lower() and not re.search(r"\(C75\d\d\)|Potential Performance Loss", log), log
    for name in ("boxes", "byte_boxes", "product", "s8", "e4m3", "registers", *SMALL):
        assert hasattr(library, f"try_{name}")


@pytest.fixture(scope="module")
def sass(entry) -> str:
    if cuobjdump() is None:
        pytest.skip("compile test: no cuobjdump (pip install nvidia-cuda-cuobjdump)")
    command = [cuobjdump(), "-sass", str(entry / LIBRARY)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "instruction",
    [
        "UTMALDG.4D", "UTMACCTL.PF", "FENCE.VIEW.ASYNC.S", "SYNCS.EXCH.64", "SYNCS.ARRIVE.TRANS64",
        "SYNCS.ARRIVE.TRANS64.A1T0", "SYNCS.PHASECHK.TRANS64.TRYWAIT", "SYNCS.PHASECHK.TRANS64", "HGMMA.64x96x16.F32",
        "HGMMA.64x256x16.F32.BF16", "IGMMA.64x64x32.S8.S8", "IGMMA.64x128x32.S8.S8", "QGMMA.64x64x32.F32.E4M3.E4M3",
        "QGMMA.64x128x32.F32.E4M3.E4M3", "QGMMA.64x256x32.F32.E4M3.E4M3", "HADD2",
        "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C", "F2FP.F16.E4M3.UNPACK_B", "WARPGROUP.ARRIVE",
        "WARPGROUP.DEPBAR.LE", "STSM.16.M88.4", "HFMA2",
        "HFMA2.BF16_V2", "USETMAXREG.DEALLOC.CTAPOOL", "USETMAXREG.TRY_ALLOC.CTAPOOL",
    ],
)  # fmt: skip
def test_the_instruction_is_there(sass, instruction):
    assert re.search(rf"\s{re.escape(instruction)}\s", sass)


def test_takers_use_more_registers_than_they_were_launched_with(entry, sass):
    """Otherwise test_registers_change_hands would pass without any change of hands."""
    log = (entry / LOG).read_text()
    launched = int(re.search(r"Compiling entry function '\w*trade\w*'(?:.*\n)+?.*Used (\d+) registers", log)[1])
    body = next(part for part in sass.split("Function : ")[1:] if "trade" in part.split("\n", 1)[0])
    assert max(map(int, re.findall(r"\bR(\d+)\b", body))) > launched + 32


def laid_out(shape: tuple[int, ...], order: str) -> tuple[np.ndarray, np.ndarray]:
    """(memory, view of it as [batch, rows, heads, head_dim]) of distinct float16 values."""
    rng = np.random.default_rng(0)
    if order == "heads first":
        memory = rng.standard_normal([shape[i] for i in (0, 2, 1, 3)]).astype(np.float16)
        return memory, memory.swapaxes(1, 2)
    if order == "one batch":
        memory = rng.standard_normal(shape[1:]).astype(np.float16)
        return memory, np.broadcast_to(memory, shape)
    if order == "part of rows":
        memory = rng.standard_normal([*shape[:-1], shape[-1] + 16]).astype(np.float16)
        return memory, memory[..., 8 : 8 + shape[-1]]
    memory = rng.standard_normal(shape).astype(np.float16)
    return memory, memory


def expected_boxes(x: np.ndarray, first_row: int, count: int, head: int, sequence: int) -> np.ndarray:
    """[box, panel, row, chunk, 8]: zeros past the tensor, chunk c of row r where the swizzle puts it, c ^ (r % 8)."""
    _, rows, _, head_dim = x.shape
    padded = np.zeros((max(rows, first_row + count * ROWS), 2 * PANEL), x.dtype)
    padded[:rows, :head_dim] = x[sequence, :, head]
    boxes = padded[first_row : first_row + count * ROWS].reshape(count, ROWS, 2, 8, 8).swapaxes(1, 2)
    row, chunk = np.ogrid[:ROWS, :8]
    swizzled = np.empty_like(boxes)
    swizzled[:, :, row, chunk ^ row % 8] = boxes
    return swizzled


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "order", "which"),
    [
        ((2, 60, 3, 128), "rows first", (0, 3, 2, 1)),  # the last box leaves the tensor
        ((2, 60, 3, 104), "heads first", (17, 5, 1, 0)),  # channels past the last are zeros; boxes wholly outside
        ((1, 100, 1, 8), "rows first", (0, 4, 0, 0)),  # the second panel is wholly outside
        ((3, 48, 2, 96), "one batch", (0, 2, 1, 2)),
        ((2, 50, 2, 120), "part of rows", (1, 2, 1, 1)),  # whose neighbours are no zeros
        ((1, 1, 1, 64), "rows first", (0, 1, 0, 0)),
    ],
)
def test_boxes_are_swizzled_and_zero_past_the_tensor(device, shape, order, which):
    memory, x = laid_out(shape, order)
    offset = x.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    strides = (ctypes.c_int64 * 3)(*(x.strides[i] // 2 for i in (0, 1, 2)))
    out = np.full((which[1], 2, ROWS, 8, 8), np.nan, np.float16)
    words = (ctypes.c_int32 * 4)(*shape), (ctypes.c_int32 * 4)(*which)
    device("boxes", (memory, offset), strides, *words, out)
    assert np.array_equal(out, expected_boxes(x, *which))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "which"),
    [
        ((2, 120, 3, 128), (0, 3, 2, 1)),  # the last box leaves the tensor
        ((2, 120, 3, 80), (17, 4, 1, 0)),  # columns past the last are zeros; boxes wholly outside
        ((1, 200, 1, 16), (0, 4, 0, 0)),  # the second panel is wholly outside
    ],
)
def test_boxes_of_bytes_have_rows_of_64(device, shape, which):
    """Chunk c of row r lies where the swizzle of 64 bytes puts it, c ^ (r / 2 % 4)."""
    x = np.random.default_rng(0).integers(1, 256, shape).astype(np.uint8)
    first, count, head, sequence = which
    out = np.full((count, 2, 48, 4, 16), 255, np.uint8)
    words = (ctypes.c_int64 * 3)(*x.strides[:3]), (ctypes.c_int32 * 4)(*shape), (ctypes.c_int32 * 4)(*which)
    device("byte_boxes", x, *words, out)
    padded = np.zeros((max(shape[1], first + count * 48), 128), np.uint8)
    padded[: shape[1], : shape[3]] = x[sequence, :, head]
    boxes = padded[first : first + count * 48].reshape(count, 48, 2, 4, 16).swapaxes(1, 2)
    row, chunk = np.ogrid[:48, :4]
    assert np.array_equal(out[:, :, row, chunk ^ row // 2 % 4], boxes)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "n", "row_bytes"), BYTE_PRODUCTS)
def test_byte_products(device, kind, n, row_bytes):
    check_byte_products(device, kind, n, row_bytes)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True], ids=["along-k", "transposed"])
@pytest.mark.parametrize("registers", [False, True], ids=["shared", "registers"])
@pytest.mark.parametrize("n", [96, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products(device, dtype, n, registers, transposed):
    """Of small integers, so that every sum is exact."""
    rng = np.random.default_rng(n)
    a, b = (rng.integers(-8, 9, shape).astype(dtype) for shape in ((64, 128), (128, n) if transposed else (n, 128)))
    out = np.full((64, n), np.nan, np.float32)
    device("product", DTYPES.index(dtype), n, int(registers), int(transposed), a, b, out)
    b = b.astype(np.float32)
    assert np.array_equal(out, a.astype(np.float32) @ (b if transposed else b.T))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_small_instructions(device, name):
    SMALL[name](device)


@pytest.mark.gpu
def test_registers_change_hands(device):
    x = np.random.default_rng(0).integers(-100, 100, (200, 256)).astype(np.float32)
    out, givers = np.full_like(x, np.nan), np.zeros(1, np.int32)
    device("registers", x, out, givers)
    assert givers[0] == 128
    assert np.array_equal(out, x + x.sum(0))
