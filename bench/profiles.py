"""ncu's figures of a kernel: collected on one call, stored as text and CSV, and read for tables and plots.

A CSV has a line per figure: kernel, metric, unit, value. Lines with an empty kernel describe what was profiled. Neither
file names a host, a process or a path.
"""

from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench import profiled
from bench import rows as store
from qflash import machine
from qflash.dispatch import BY_NAME
from qflash.jit.compiler import LINE_INFO
from qflash.testing import Case

PROFILES = store.ROOT / "profiles"
# One problem for every rung, from the middle of the ladder.
CASE = Case(
    name="profile", batch=4, q_len=4096, k_len=4096, q_heads=16, kv_heads=16, head_dim=128, dtype="float16"
)  # fmt: skip

SECTIONS = (
    "SpeedOfLight", "LaunchStats", "Occupancy", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "SchedulerStats",
    "WarpStateStats",
)  # fmt: skip
_SASS = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum"
DURATION, DRAM = "gpu__time_duration.sum", ("dram__bytes_read.sum", "dram__bytes_write.sum")
# Figure on a page -> metric. A CSV also has every reason for which warps waited.
FIGURES = {
    "duration": DURATION,
    "SM throughput": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory throughput": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM throughput": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM read": DRAM[0],
    "DRAM written": DRAM[1],
    "L2 hit rate": "lts__t_sector_hit_rate.pct",
    "tensor pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor pipe, floats": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor pipe, integers": "sm__pipe_tensor_op_imma_cycles_active.avg.pct_of_peak_sustained_active",
    "FMA pipe": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "achieved occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers per thread": "launch__registers_per_thread",
    "shared memory per block, dynamic": "launch__shared_mem_per_block_dynamic",
    "shared memory per block, static": "launch__shared_mem_per_block_static",
    "threads per block": "launch__block_size",
    "blocks": "launch__grid_size",
    "shared loads, wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared loads, bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared stores, wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared stores, bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "float32 FMA instructions": _SASS.format("ffma"),
    "float32 additions": _SASS.format("fadd"),
    "float32 products": _SASS.format("fmul"),
    "tensor FLOP, float16": "sm__ops_path_tensor_src_fp16_dst_fp32.sum",
    "tensor FLOP, bfloat16": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "tensor operations, int8": "sm__ops_path_tensor_src_int8.sum",
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(?P<reason>\w+?)_per_issue_active\.ratio")
_IDENTITY = "Kernel Name"


@dataclass(frozen=True)
class Profile:
    """One kernel's figures. `launches` maps each __global__ function to metric -> (value, unit)."""

    facts: dict[str, str]
    launches: dict[str, dict[str, tuple[float, str]]]

    def total(self, *metrics: str) -> float:
        """The sum over launches; 0.0 if ncu had none of them."""
        return sum(values[metric][0] for values in self.launches.values() for metric in metrics if metric in values)


# Reading


def parse_raw(text: str) -> dict[str, dict[str, tuple[float, str]]]:
    """Parse `ncu --page raw --csv --print-units base`: a header, a line of units, a line per launch. Keeps the metrics
    of FIGURES and STALL. A function launched twice counts once, with the figures of its last launch."""
    lines = list(csv.reader(io.StringIO(text[text.index('"ID"') :])))
    header, units, launches = lines[0], lines[1], lines[2:]
    wanted = {i for i, name in enumerate(header) if name in FIGURES.values() or STALL.fullmatch(name)}
    found = {}
    for line in launches:
        if len(line) == len(header):
            name = re.sub(r"[(<].*", "", line[header.index(_IDENTITY)]).removeprefix("void ").strip()
            cells = ((header[i], line[i].replace(",", ""), units[i]) for i in sorted(wanted))
            found[name] = {metric: (float(value), unit) for metric, value, unit in cells if value not in ("", "n/a")}
    return found


def write(path: Path, profile: Profile) -> None:
    with path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("kernel", "metric", "unit", "value"))
        lines.writerows(("", name, "", value) for name, value in profile.facts.items())
        for kernel, values in profile.launches.items():
            lines.writerows((kernel, metric, unit, f"{value:.10g}") for metric, (value, unit) in values.items())


def read(path: Path) -> Profile:
    facts: dict[str, str] = {}
    launches: dict[str, dict[str, tuple[float, str]]] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            if line["kernel"]:
                launches.setdefault(line["kernel"], {})[line["metric"]] = float(line["value"]), line["unit"]
            else:
                facts[line["metric"]] = line["value"]
    return Profile(facts, launches)


def committed(kernel: str) -> dict[str, Profile]:
    """A kernel's profiles by GPU."""
    return {path.parent.name: read(path) for path in sorted(PROFILES.glob(f"*/{kernel}.csv"))}


# Formatted figures


def stalls(values: dict[str, tuple[float, str]], most: int = 4) -> str:
    """The reasons for which warps waited, most expensive first, in cycles per instruction issued."""
    found = [
        (value, STALL.fullmatch(metric)["reason"]) for metric, (value, _) in values.items() if STALL.fullmatch(metric)
    ]
    dearest = sorted((one for one in found if one[1] != "selected" and one[0] > 0), reverse=True)[:most]
    return ", ".join(f"{reason.replace('_', ' ')} {value:.1f}" for value, reason in dearest)


def cell(value: float, unit: str) -> str:
    """A value in a readable unit."""
    if unit in ("%", "pct"):
        return f"{value:.1f} %"
    if unit in ("ns", "nsecond"):
        return f"{value / 1e6:.3f} ms" if value >= 1e6 else f"{value / 1e3:.1f} µs"
    if unit.startswith("byte"):
        return (
            f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value:.0f} B"
        )
    return f"{value:.3g}" if value >= 1e6 else f"{value:.0f}"


def figures(profile: Profile) -> list[list[str]]:
    """Lines of a table: a name, then a cell per launch. Figures that ncu did not have are omitted."""
    lines = []
    for what, metric in FIGURES.items():
        found = [values.get(metric) for values in profile.launches.values()]
        if any(one is not None and (one[0] != 0 or "conflict" in what) for one in found):
            lines.append([what, *("" if one is None else cell(*one) for one in found)])
    lines.append(["warps wait for (cycles per issue)", *map(stalls, profile.launches.values())])
    return lines


def source(profile: Profile) -> str:
    """What was profiled, where, and with which tool."""
    facts = profile.facts
    return (
        f"{facts['problem']}; {facts['gpu']}, driver {facts['driver']}, ncu {facts['ncu']}; commit {facts['commit']}."
    )


def text(profile: Profile, details: str) -> str:
    """The .txt: the table, then ncu's own pages."""
    lines = [["", *profile.launches], *figures(profile)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    table = "\n".join("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)) for line in lines)
    return (
        "\n".join(line.rstrip() for line in f"{source(profile)}\n\n{table}\n\n{anonymous(details)}".splitlines()) + "\n"
    )


def anonymous(details: str) -> str:
    """ncu's pages without the lines that name a process, a host or a path."""
    named = re.compile(r"^\s*\[\d+\].*@|==PROF==|/\w+/")
    return "\n".join(line for line in details.splitlines() if not named.search(line)).strip()


# Collecting


class ProfileError(Exception):
    """ncu or make failed; the text says how."""


def run(command: Iterable[str | Path]) -> str:
    words = [str(word) for word in command]
    environment = {**os.environ, LINE_INFO: "1"}  # ncu's source pages need line numbers in the program
    try:
        done = subprocess.run(words, cwd=store.ROOT, capture_output=True, text=True, env=environment)
    except OSError as error:
        raise ProfileError(f"{words[0]} does not run: {error.strerror}") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise ProfileError(f"{' '.join(words[:2])} failed ({done.returncode})\n" + "\n".join(said[-20:]))
    return done.stdout


@cache  # ncu needs seconds to list them
def metrics_here(ncu: str) -> list[str]:
    """The requested metrics that this GPU has: generations differ, and ncu rejects a list with an unknown one."""
    known = set(re.findall(r"^(\w+__\w+)", run([ncu, "--query-metrics"]), re.MULTILINE))
    wanted = [metric for metric in FIGURES.values() if not metric.startswith("launch__")]
    return [metric for metric in wanted if not known or metric.partition(".")[0] in known]


def command_of(kernel: str, arch: int, case: Case = CASE) -> tuple[str, list[str | Path]]:
    """(description of the problem, the command that runs it once). Attention kernels have their own binaries, which are
    built here; those in another kernel's folder have none, and decode kernels run another problem."""
    operation = profiled.operation_of(kernel)
    if operation != "attention" or kernel not in BY_NAME or BY_NAME[kernel].few_rows:
        return profiled.problem_of(kernel), [sys.executable, "-m", "bench.profiled", kernel]
    run(["make", f"KERNEL={kernel}", f"NVCC_ARCH={arch}", f"HEAD_DIM={case.head_dim}", f"DTYPE={case.dtype}"])
    binary = store.ROOT / "bin" / f"profile_{kernel}"
    problem = [f"--batch={case.batch}", f"--heads={case.q_heads}", f"--length={case.q_len}", "--random"]
    return describe(case), [binary, *problem, f"--head-dim={case.head_dim}", "--warmup=0", "--runs=0"]


def collect(kernel: str, out: Path, ncu: str = "ncu") -> Profile:
    """Profile one call of a kernel; write <kernel>.csv and <kernel>.txt under `out`."""
    gpu = machine.gpus()[0][0]
    problem, command = command_of(kernel, gpu.arch)
    run(command)  # first without ncu: a failing kernel is not worth a profile, and caches are then filled
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "profile.ncu-rep"
        how = ["--clock-control", "none", "--kernel-name-base", "function", "--kernel-name", "regex:^qf_"]
        how += [word for section in SECTIONS for word in ("--section", section)]
        said = run([ncu, *how, "--metrics", ",".join(metrics_here(ncu)), "--export", report, *command])
        if not report.exists():  # ncu may succeed without one: no permission to read counters, no kernel found
            raise ProfileError(f"ncu wrote no report\n{said}")
        raw = run([ncu, "--import", report, "--page", "raw", "--csv", "--print-units", "base"])
        details = run([ncu, "--import", report, "--page", "details"])
    version = re.search(r"Version ([\d.]+)", run([ncu, "--version"]))
    facts = {"problem": problem, "gpu": gpu.name, "driver": gpu.driver, "commit": store.commit()}
    profile = Profile(facts | {"ncu": version[1] if version else "unknown"}, parse_raw(raw))
    out.mkdir(parents=True, exist_ok=True)
    write(out / f"{kernel}.csv", profile)
    (out / f"{kernel}.txt").write_text(text(profile, details))
    return profile


def describe(case: Case) -> str:
    mask = "causal" if case.causal else "full"
    return f"B={case.batch} T={case.q_len} H={case.q_heads} D={case.head_dim} {mask} {case.dtype}"


def folder_of(gpu_name: str) -> str:
    """'NVIDIA H200' has its profiles in h200."""
    return machine.slug(gpu_name).removeprefix("nvidia-")
