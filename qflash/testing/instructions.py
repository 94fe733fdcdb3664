"""Hopper's own instructions, each in a kernel with little else (tests/emulated/hopper/*.cu), checked against NumPy.

One set of checks for the GPU and for the emulator. `call(name, *words)` calls try_<name> with ints and arrays; arrays
are changed in place. An array may be given with the offset of its first element, in bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes  # noqa: F401  (registers the name "bfloat16" with NumPy)
import numpy as np

from qflash.call.spec import DTYPES

Call = Callable[..., None]
Check = Callable[[Call], Any]
ROWS, PANEL = 24, 64  # of a box


def check_matrices(call: Call) -> None:
    """Four matrices whose rows may be anywhere: M_i[l / 4][2 (l % 4) ..+1] is word i of lane l."""
    rng = np.random.default_rng(0)
    matrices = rng.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    rows = rng.permutation(32).astype(np.int32)
    out = np.zeros((32, 8), np.uint16)
    call("matrices", matrices.view(np.uint32).reshape(4, 32), rows, out)
    assert np.array_equal(out[rows].reshape(4, 8, 8), matrices)


def check_zeros(call: Call) -> None:
    """Every number, in either half: a sum is unchanged, unless the number is nonfinite."""
    rng = np.random.default_rng(0)
    x = np.stack([np.arange(2**16), rng.permutation(2**16)], -1).astype(np.uint16)
    for dtype in ("float16", "bfloat16"):
        sums = rng.choice(np.array([0.0, 1.5, np.nan]).astype(dtype), x.shape)
        out = np.zeros_like(x)
        call("zeros", DTYPES.index(dtype), len(x), x, sums, out)
        kept = np.isfinite(x.view(dtype).astype(np.float32)) & ~np.isnan(sums.astype(np.float32))
        assert np.array_equal(np.isnan(out.view(dtype).astype(np.float32)), ~kept)
        assert np.array_equal(out[kept], sums.view(np.uint16)[kept])


def check_pairs(call: Call) -> None:
    """Every float16 in either half, next to another one."""
    rng = np.random.default_rng(0)
    x = np.stack([np.arange(2**16), rng.permutation(2**16)], -1).astype(np.uint16).view(np.float16)
    y = rng.integers(0, 2**16, x.shape).astype(np.uint16).view(np.float16)
    out = np.zeros_like(x)
    call("pairs", len(x), x, y, out)
    with np.errstate(all="ignore"):
        check_same(out, x + y)


def check_codes(call: Call) -> None:
    """Every float16, and the values next to the midpoints between two E4M3, where the direction of rounding changes."""
    codes = np.arange(0x7F, dtype=np.uint8).view("float8_e4m3fn").astype(np.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    ties = np.concatenate([middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9))])
    rare = np.array([3e38, np.inf, 1e-40, 449, 464, 480, 1e-9, 0], np.float32)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    x = np.concatenate([ties, -ties, rare, -rare, halves])
    x = np.resize(np.random.default_rng(0).permutation(x), (len(x) // 4 + 1, 4))
    found = np.zeros(x.shape, np.uint8)
    call("codes", len(x), x, found)
    wanted = np.clip(np.nan_to_num(x), -448, 448).astype("float8_e4m3fn").view(np.uint8)  # saturates
    assert np.array_equal(found, np.where(np.isnan(x), 0x7F, wanted))


def check_decoded(call: Call) -> None:
    """Every E4M3, in each position of a word."""
    codes = np.stack([np.roll(np.arange(256), 67 * place) for place in range(4)], -1).astype(np.uint8)
    out = np.zeros(codes.shape, np.float16)
    call("decoded", len(codes), codes, out)
    check_same(out, codes.view("float8_e4m3fn").astype(np.float16))


def check_same(found: np.ndarray, wanted: np.ndarray) -> None:
    """Check that bits of float16 are the same, except between NaNs."""
    spoiled = np.isnan(wanted)
    assert np.array_equal(np.isnan(found), spoiled)
    assert np.array_equal(found.view(np.uint16)[~spoiled], wanted.view(np.uint16)[~spoiled])


def check_answers(call: Call) -> None:
    """Two arrivals complete a phase: the parity of the phase before the current one is that of the completed one."""
    answers = np.full((9, 2), -1, np.int32)
    call("answers", len(answers), answers)
    phase = np.arange(9)[:, None] // 2
    assert np.array_equal(answers, phase % 2 != [[0, 1]])


def check_numbers(call: Call) -> None:
    """A thread that is notified that a stage is full finds the data that was written to it."""
    rounds, found = 500, np.full(32, -1, np.int32)
    call("numbers", rounds, found)
    assert (found == rounds).all()


# By the name with which they call hopper/small.cu.
SMALL = {
    "matrices": check_matrices, "zeros": check_zeros, "pairs": check_pairs, "codes": check_codes,
    "decoded": check_decoded, "answers": check_answers, "numbers": check_numbers,
}  # fmt: skip


def check_byte_products(call: Call, kind: str, n: int, row_bytes: int) -> None:
    """All of int8; small integers in E4M3, so that its sums are exact, too."""
    rng = np.random.default_rng(n + row_bytes)
    low, high = (-128, 128) if kind == "s8" else (-4, 5)
    a, b = (rng.integers(low, high, (rows, 128)) for rows in (64, n))
    sent = [x.astype(np.int8 if kind == "s8" else "float8_e4m3fn").view(np.uint8) for x in (a, b)]
    out = np.full((64, n), 77, np.int32 if kind == "s8" else np.float32)
    call(kind, n, row_bytes, *sent, out)
    assert np.array_equal(out, a @ b.T + (0 if kind == "s8" else 0.5))


# (kind, n, row_bytes) of hopper/byte_products.cu.
BYTE_PRODUCTS = [("s8", n, row) for n in (64, 128, 256) for row in (64, 128)]
BYTE_PRODUCTS += [("e4m3", n, row) for n in (64, 128, 256) for row in (64, 128)]


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
    """[box, panel, row, chunk, 8]: zeros past the tensor, chunk c of row r at its swizzled position, c ^ (r % 8)."""
    _, rows, _, head_dim = x.shape
    padded = np.zeros((max(rows, first_row + count * ROWS), 2 * PANEL), x.dtype)
    padded[:rows, :head_dim] = x[sequence, :, head]
    boxes = padded[first_row : first_row + count * ROWS].reshape(count, ROWS, 2, 8, 8).swapaxes(1, 2)
    row, chunk = np.ogrid[:ROWS, :8]
    swizzled = np.empty_like(boxes)
    swizzled[:, :, row, chunk ^ row % 8] = boxes
    return swizzled


BOXES = [
    ((2, 60, 3, 128), "rows first", (0, 3, 2, 1)),  # the last box extends past the tensor
    ((2, 60, 3, 104), "heads first", (17, 5, 1, 0)),  # channels past the last are zeros; boxes entirely outside
    ((1, 100, 1, 8), "rows first", (0, 4, 0, 0)),  # the second panel is entirely outside
    ((3, 48, 2, 96), "one batch", (0, 2, 1, 2)),
    ((2, 50, 2, 120), "part of rows", (1, 2, 1, 1)),  # whose neighbours are not zeros
    ((1, 1, 1, 64), "rows first", (0, 1, 0, 0)),
]


def check_boxes(call: Call, shape: tuple[int, ...], order: str, which: tuple[int, ...]) -> None:
    """Boxes are swizzled, and zero past the tensor."""
    memory, x = laid_out(shape, order)
    offset = x.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    strides = (ctypes.c_int64 * 3)(*(x.strides[i] // 2 for i in (0, 1, 2)))
    out = np.full((which[1], 2, ROWS, 8, 8), np.nan, np.float16)
    words = (ctypes.c_int32 * 4)(*shape), (ctypes.c_int32 * 4)(*which)
    call("boxes", (memory, offset), strides, *words, out)
    assert np.array_equal(out, expected_boxes(x, *which))


BYTE_BOXES = [
    ((2, 120, 3, 128), (0, 3, 2, 1)),  # the last box extends past the tensor
    ((2, 120, 3, 80), (17, 4, 1, 0)),  # columns past the last are zeros; boxes entirely outside
    ((1, 200, 1, 16), (0, 4, 0, 0)),  # the second panel is entirely outside
]


def check_byte_boxes(call: Call, shape: tuple[int, ...], which: tuple[int, ...]) -> None:
    """Chunk c of row r is at its position in the 64-byte swizzle, c ^ (r / 2 % 4)."""
    x = np.random.default_rng(0).integers(1, 256, shape).astype(np.uint8)
    first, count, head, sequence = which
    out = np.full((count, 2, 48, 4, 16), 255, np.uint8)
    words = (ctypes.c_int64 * 3)(*x.strides[:3]), (ctypes.c_int32 * 4)(*shape), (ctypes.c_int32 * 4)(*which)
    call("byte_boxes", x, *words, out)
    padded = np.zeros((max(shape[1], first + count * 48), 128), np.uint8)
    padded[: shape[1], : shape[3]] = x[sequence, :, head]
    boxes = padded[first : first + count * 48].reshape(count, 48, 2, 4, 16).swapaxes(1, 2)
    row, chunk = np.ogrid[:48, :4]
    assert np.array_equal(out[:, :, row, chunk ^ row // 2 % 4], boxes)


STORES = [
    ((40, 200), 200, (0, 0, 4, 3)),  # the last boxes extend past the tensor on both sides
    ((40, 72), 80, (16, 13, 1, 2)),  # they begin anywhere inside; rows of a wider matrix
    ((5, 8), 8, (64, 16, 1, 1)),  # entirely outside
]


def check_stores(call: Call, bytes_: int, shape: tuple[int, int], stride: int, boxes: tuple[int, ...]) -> None:
    """Everything inside the tensor is written, chunk by chunk, and nothing else."""
    (rows, columns), (first_column, first_row, across, down) = shape, boxes
    out = np.full((rows, stride), 7, np.uint16 if bytes_ == 2 else np.uint32)
    call("stores", bytes_, out, (ctypes.c_int32 * 2)(*shape), stride, (ctypes.c_int32 * 4)(*boxes))
    wanted = np.full_like(out, 7)
    width = 128 // bytes_
    for box in range(across * down):
        for row in range(16):
            for column in range(width):
                r, c = first_row + box // across * 16 + row, first_column + box % across * width + column
                if 0 <= r < rows and 0 <= c < columns:
                    wanted[r, c] = 1000 * box + 10 * row + column * bytes_ // 16
    assert np.array_equal(out, wanted)


def check_clusters(call: Call, count: int) -> None:
    """Both blocks see the halves that each loaded, in every round."""
    x = np.random.default_rng(count).integers(0, 2**16, (2 * count, 16, 8, 8)).astype(np.uint16)
    out = np.zeros((2, *x.shape), np.uint16)
    call("clusters", count, x, out)
    row, chunk = np.ogrid[:16, :8]
    for block in out:
        assert np.array_equal(block[:, row, chunk ^ row % 8], x)


def check_products(call: Call, dtype: str, n: int, registers: bool, transposed: bool) -> None:
    """Products of small integers, so that every sum is exact."""
    rng = np.random.default_rng(n)
    a, b = (rng.integers(-8, 9, shape).astype(dtype) for shape in ((64, 128), (128, n) if transposed else (n, 128)))
    out = np.full((64, n), np.nan, np.float32)
    call("product", DTYPES.index(dtype), n, int(registers), int(transposed), a, b, out)
    b = b.astype(np.float32)
    assert np.array_equal(out, a.astype(np.float32) @ (b if transposed else b.T))


def check_registers(call: Call) -> None:
    """One warpgroup releases registers, two acquire them."""
    x = np.random.default_rng(0).integers(-100, 100, (200, 256)).astype(np.float32)
    out, givers = np.full_like(x, np.nan), np.zeros(1, np.int32)
    call("registers", x, out, givers)
    assert givers[0] == 128
    assert np.array_equal(out, x + x.sum(0))


# Every check by its name.
INSTRUCTIONS: dict[str, Check] = {
    **SMALL,
    "registers": check_registers,
    **{
        f"stores-{bytes_}-{i}": partial(check_stores, bytes_=bytes_, shape=shape, stride=stride, boxes=boxes)
        for bytes_ in (2, 4)
        for i, (shape, stride, boxes) in enumerate(STORES)
    },
    **{f"clusters-{count}": partial(check_clusters, count=count) for count in (1, 7)},
    **{f"boxes-{i}": partial(check_boxes, shape=s, order=o, which=w) for i, (s, o, w) in enumerate(BOXES)},
    **{f"byte_boxes-{i}": partial(check_byte_boxes, shape=s, which=w) for i, (s, w) in enumerate(BYTE_BOXES)},
    **{
        f"{kind}-{n}-{row}": partial(check_byte_products, kind=kind, n=n, row_bytes=row)
        for kind, n, row in BYTE_PRODUCTS
    },
    **{
        "-".join(("product", dtype, str(n), a, b)): partial(
            check_products, dtype=dtype, n=n, registers=a == "registers", transposed=b == "transposed"
        )
        for dtype in ("float16", "bfloat16")
        for n in (96, 256)
        for a in ("shared", "registers")
        for b in ("along_k", "transposed")
    },
}
