"""Rows: one JSON line per candidate and problem. They contain their provenance and never name a host or a path."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import qflash
from qflash import _native, machine
from qflash.testing import Case

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("numpy", "torch", "jax", "triton", "flash-attn", "fa3-fwd", "flashinfer-python")


def commit() -> str:
    """The commit measured, with a + for uncommitted changes; $QFLASH_COMMIT specifies it for a copy of the tree."""
    if "QFLASH_COMMIT" in os.environ:
        return os.environ["QFLASH_COMMIT"]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "qflash", "CMakeLists.txt")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance(device: str) -> dict[str, Any]:
    """The part that all rows of a run share."""
    versions = {"qflash": qflash.__version__} | {name: machine.version(name) for name in PACKAGES}
    facts: dict[str, Any] = {
        "machine": folder_name(device),
        "cpu": machine.cpu_name(),
        "isa": _native.cpu_isa(),
        "threads": qflash.get_num_threads(),
        "gpu": None,
        "driver": None,
        "commit": commit(),
        "versions": {name: version for name, version in versions.items() if version},
    }
    if device == "cuda":
        gpu = machine.gpus()[0][0]
        facts |= {"gpu": gpu.name, "driver": gpu.driver}
    return facts


def folder_name(device: str) -> str:
    """The folder of bench/results for this machine's rows."""
    if device == "cuda":
        gpus, reason = machine.gpus()
        if not gpus:
            raise SystemExit(f"device is 'cuda' and {reason}; allowed: 'cpu', or a machine with an NVIDIA GPU")
        return machine.slug(gpus[0].name)
    return f"{machine.slug(machine.cpu_name())}-{machine.cores()}c"


def flop(case: Case, kind: str) -> float:
    """Multiplications and additions of QKᵀ and PV; half for a causal mask; a backward pass counts 2.5 forwards."""
    forward = 4.0 * case.batch * case.q_heads * case.q_len * case.k_len * case.head_dim
    return forward * (0.5 if case.causal else 1.0) * {"train": 3.5, "backward": 2.5}.get(kind, 1.0)


def _item_bytes(case: Case) -> int:
    return 4 if case.dtype == "float32" else 2


def cache_bytes(case: Case, int8: bool = False, int8_keys: bool = False) -> int:
    """K and V, read once: the minimum bytes that a decode step moves. INT8 pages have a byte per channel, and a float32
    scale. A QuantizedKV of precision "int8" (int8_keys) has keys in INT8, and a scale per 64 of them."""
    tokens = sum(case.kv_lens) if case.kv_lens else case.batch * case.k_len
    if int8_keys:
        groups = case.batch * -(-case.k_len // 64)
        return case.kv_heads * (tokens * case.head_dim * (1 + _item_bytes(case)) + 4 * groups)
    return 2 * tokens * case.kv_heads * (case.head_dim + 4 if int8 else case.head_dim * _item_bytes(case))


def input_bytes(case: Case, int8: bool = False, int8_keys: bool = False) -> int:
    """The bytes of q, k and v."""
    return cache_bytes(case, int8, int8_keys) + case.batch * case.q_len * case.q_heads * case.head_dim * _item_bytes(
        case
    )


def moved_bytes(case: Case) -> int:
    """q, k, v and the output, each moved once: the minimum bytes that attention moves."""
    return input_bytes(case) + case.batch * case.q_len * case.q_heads * case.head_dim * _item_bytes(case)


def problem(case: Case, kind: str) -> dict[str, Any]:
    """The part of a row that describes the problem."""
    return {
        "kind": kind,
        "B": case.batch,
        "Tq": case.q_len,
        "Tk": case.k_len,
        "Hq": case.q_heads,
        "Hkv": case.kv_heads,
        "D": case.head_dim,
        "dtype": case.dtype,
        "causal": case.causal,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def save(name: str, rows: list[dict[str, Any]]) -> Path:
    """Write the rows of a preset to the folder of their machine."""
    path = RESULTS / rows[0]["machine"] / f"{name}.jsonl"
    write(path, rows)
    part_path(rows[0]["machine"], name).unlink(missing_ok=True)
    return path


def part_path(machine: str, name: str) -> Path:
    """Where a run of a preset stores its results until it is finished (bench/journal.py)."""
    return RESULTS / machine / f"{name}.part"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def committed(preset: str, machine: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """Rows of a preset by machine; `machine`: only of that one."""
    return {path.parent.name: read(path) for path in sorted(RESULTS.glob(f"{machine or '*'}/{preset}.jsonl"))}
