"""The wrappers of Hopper's own instructions, each in a kernel that does little else (tests/emulated/hopper/*.cu):
compiled everywhere, run on a GPU of compute capability 9.0 and held against NumPy. The emulator runs them, too."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from qflash.backends import cuda
from qflash.jit.compiler import LIBRARY, LOG, Unit
from qflash.testing.cuda_tools import cuobjdump, why_no_nvcc
from qflash.testing.instructions import INSTRUCTIONS, SMALL

pytestmark = pytest.mark.skipif(why_no_nvcc() is not None, reason=f"compile test: {why_no_nvcc()}")
SOURCE = Path(__file__).parent.parent / "emulated" / "hopper" / "all.cu"
CSRC = Path(cuda.__file__).resolve().parent.parent / "csrc"
UNIT = Unit("hopper", SOURCE, (CSRC, CSRC / "include"), (), "90a", "Hopper's wrappers")


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
    for name in ("boxes", "byte_boxes", "clusters", "product", "s8", "e4m3", "registers", "stores", *SMALL):
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
        "HGMMA.64x256x16.F32.BF16", "IGMMA.64x64x32.S8.S8", "IGMMA.64x128x32.S8.S8",
        "IGMMA.64x256x32.S8.S8", "UTMALDG.4D.MULTICAST", "UTMASTG.4D", "UTMACMDFLUSH", "UCGABAR_ARV",
        "UCGABAR_WAIT", "SYNCS.ARRIVE.TRANS64.RED.A1T0", "QGMMA.64x64x32.F32.E4M3.E4M3",
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


@pytest.mark.gpu
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instructions(device, name):
    INSTRUCTIONS[name](device)
