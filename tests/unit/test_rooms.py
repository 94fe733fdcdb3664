"""The rooms of csrc keep to ARCHITECTURE.md: who may include whom, and where assembly and kernels stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import qflash

CSRC = Path(qflash.__file__).resolve().parent / "csrc"
SOURCES = {
    path.relative_to(CSRC).as_posix(): re.sub(r"//[^\n]*", "", path.read_text())
    for path in sorted(CSRC.rglob("*"))
    if path.suffix in (".h", ".cuh", ".cu") and path.relative_to(CSRC).parts[0] not in ("cpu", "bindings", "standalone")
}
# What a room includes beside itself, and the structs of include/.
MAY_INCLUDE = {
    "common": {"ptx"},
    "ptx": {"common"},
    "smem": set(),
    "reduce": {"attn", "common", "ptx", "smem"},
    "gemm": {"common", "hopper", "ptx", "smem"},
    "hopper": {"common", "ptx"},
    "quant": {"attn", "common", "ptx", "reduce"},
    "attn": {"common", "hopper", "ptx", "quant", "reduce", "smem"},
    "include": set(),
}
# A kernel that launches others' as passes of its own.
LAUNCHES = {
    "attention/fa_int8": {"quantize/quantize"},
    "attention/sm90_int8": {"quantize_kv/sm90_quantize"},
    "linear_backward/linear_bwd": {"linear/gemm_mma", "linear/gemm_tiled"},
    "linear_backward/sm90_linear_bwd": {"linear/sm90_gemm", "linear_backward/linear_bwd"},
}


def included(text: str) -> list[str]:
    return re.findall(r'#\s*include\s*"([^"]+/[^"]+)"', text)


def test_every_room_is_known():
    assert {name.split("/")[0] for name in SOURCES} == {*MAY_INCLUDE, "kernels", "emulate"}


@pytest.mark.parametrize("room", MAY_INCLUDE)
def test_a_room_includes_what_it_may(room):
    allowed = MAY_INCLUDE[room] | {room}
    of_room = {name: text for name, text in SOURCES.items() if name.startswith(f"{room}/")}
    assert of_room
    found = [(name, other) for name, text in of_room.items() for other in included(text)]
    assert [pair for pair in found if pair[1].split("/")[0] not in allowed] == []


def test_a_kernel_includes_no_other_kernels_folder_but_to_launch_it():
    for name, text in SOURCES.items():
        if not name.startswith("kernels/"):
            continue
        own = "/".join(name.split("/")[1:3])
        others = {"/".join(other.split("/")[1:3]) for other in included(text) if other.startswith("kernels/")} - {own}
        assert others <= LAUNCHES.get(own, set()), name


def test_kernels_stand_in_their_folders_and_assembly_in_ptx():
    device = {name: text for name, text in SOURCES.items() if not name.startswith("emulate/")}
    globals_, assembly = ({name.split("/")[0] for name, text in device.items() if re.search(rf"\b{word}\b", text)}
                          for word in ("__global__", "asm"))  # fmt: skip
    assert globals_ == {"kernels"} and assembly == {"ptx"}
