"""Everything that only a GPU can show, step by step: tests, sanitizer, benchmarks. Run it before a release.

    python tools/on_gpu.py --to FOLDER                 all steps
    python tools/on_gpu.py --to FOLDER --minutes 9     as many as fit; the last line says how to continue
    python tools/on_gpu.py --to FOLDER --from STEP     from a step on
    python tools/on_gpu.py --to FOLDER STEP...         only these
    python tools/on_gpu.py --list                      their names and limits

FOLDER gets steps.jsonl, with each step's exit status and seconds, and made.tar.gz, with new rows and profiles and the
steps' output. Both are written after every step, so that results are kept if the machine is lost. The next run into the
same FOLDER writes made-2.tar.gz. A table of all steps is printed last.

Steps that have never run on a GPU, and figures that were requested, come first; steps that passed before come last.

Kernels are compiled when a step first needs them, while the GPU waits for minutes. They can be compiled beforehand, on
any machine with the same nvcc:

    QFLASH_CACHE_DIR=build/kernels qflash build --arch 90

Steps load them from build/kernels if that folder exists, and compile missing ones. `qflash build --arch 90 --dry-run`
shows how many of them a machine's compiler finds there. Without git, QFLASH_COMMIT specifies the commit of the rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "on_gpu"
MADE = (ROOT / "bench" / "results", ROOT / "profiles", LOGS)
MOST_BYTES = 8 << 20  # per file that is kept: a trained model is not copied
KERNELS = ROOT / "build" / "kernels"  # those compiled beforehand
TRAINED = "build/on_gpu/trained"


@dataclass(frozen=True)
class Step:
    """A command of the checkout, and the seconds after which it and all processes that it started are ended."""

    name: str
    arguments: tuple[str, ...]  # of Python
    seconds: int
    variables: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()  # a program that runs Python


def _tests(name: str, seconds: int, words: str = "", examples: int | None = None, **folders: str) -> Step:
    """Tests marked gpu. folders: of tests/, each with the names of its files, "" for all."""
    paths = [f"tests/{folder}" for folder, names in folders.items() if not names]
    paths += [f"tests/{folder}/test_{name}.py" for folder, names in folders.items() for name in names.split()]
    # A file that needs a missing package must not keep the others from running.
    several = ("-n", "12", "--dist", "worksteal") if importlib.util.find_spec("xdist") else ()
    arguments = (
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        *several,
        "--maxfail",
        "40",
        "--continue-on-collection-errors",
        *paths,
    )
    variables = {} if examples is None else {"QFLASH_HYPOTHESIS_EXAMPLES": str(examples)}
    return Step(name, arguments + (("-k", words) if words else ()), seconds, variables)


def _bench(name: str, seconds: int, *presets: str) -> Step:
    return Step(name, ("-m", "qflash.cli", "bench", *presets), seconds)


def _module(name: str, seconds: int, *arguments: str) -> Step:
    return Step(name, ("-m", *arguments), seconds)


def _models(name: str, seconds: int, *arguments: str, again: bool = False) -> Step:
    """Points without a row, or all of them; a contender that has started has 40 seconds to end."""
    words = (*arguments, *(() if again else ("--missing",)), "--limit", str(seconds - 40))
    return _module(name, seconds, "bench.models", "cuda", *words)


def _script(name: str, seconds: int, path: str, *arguments: str) -> Step:
    return Step(name, (path, *arguments), seconds)


def _profiles(name: str, seconds: int, *kernels: str) -> Step:
    words = (word for kernel in kernels for word in ("--kernel", kernel))
    return Step(name, ("-m", "qflash.cli", "profile", *words), seconds)


def _sanitizer(tool: str, seconds: int, *kernels: str) -> Step:
    before = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "--kernel-name", "kns=qf_")
    name = "-".join((tool, *kernels))
    return Step(name, ("-m", "qflash.testing.sanitize", *kernels), seconds, {"QFLASH_LINEINFO": "1"}, before)


STEPS = (
    _script("build", 240, "tools/install.py"),
    _module("kernels", 60, "qflash.cli", "build", "--arch", "90", "--dry-run"),
    # Changed since the last run: decoding with rope, writes to INT8 pages, the last wave of linear layers, rings.
    _tests(
        "tests-decode",
        300,
        numerics="decode_gpu decode_kv_gpu decode_int8_gpu pages_gpu",
        frontends="kv_gpu kvcache_gpu paged_write_gpu overlapping_launches_gpu",
    ),
    _tests("tests-linear", 360, numerics="linear linear_gpu int8_matmul sm90_gemm_gpu quantize_rows"),
    _models("bench-models", 160, "--models", "llama-1b", "--batches", "1", "--prompts", "900", again=True),
    _module("bench-ring", 60, "bench.ring", "cuda"),
    _module("bench-linear", 300, "bench.linear", "cuda"),
    # Never run on a GPU.
    _tests("tests-reductions", 120, numerics="reductions", frontends="ops_gpu torch_parallel_gpu"),
    _tests("tests-random-triton", 200, words="triton", numerics="random"),
    _module("bench-triton", 520, "bench.beside_triton", "triton", "triton-decode", "triton-rows", "triton-linear"),
    _module("bench-triton-costs", 520, "bench.beside_triton", "triton-costs"),
    _module("bench-triton-tiles", 240, "bench.triton_tiles"),
    _script("train", 300, "examples/train_stdlib_model.py", "--size", "base", "--device", "cuda", "--out", TRAINED),
    _module("bench-training", 60, "bench.training", TRAINED),
    _models("bench-models-rest", 500),
    _module("bench-serving", 400, "bench.serving", "cuda"),
    _profiles("profiles", 300, "sm90_bwd", "fa_mma_bwd", "sm90_decode", "decode", "sm90_gemm", "gemm_mma"),
    _profiles("profiles-linear", 200, "sm90_linear_bwd", "linear_bwd"),
    _sanitizer("racecheck", 500, "sm90_bwd"),
    _sanitizer("racecheck", 500, "decode", "sm90_decode"),
    # Passed before, and existing figures.
    _tests("tests-models", 240, integrations="", frontends="torch_parallel_gpu"),
    _tests("tests-triton", 240, frontends="triton_gpu"),
    _tests("tests-gradients", 400, words="gradients", examples=700, numerics="random"),
    _tests("tests-older", 300, numerics="older_architectures"),
    _tests("tests-contract", 500, numerics="contract"),
    _tests("tests-frontends", 400, frontends="torch_cuda jax_gpu ops_gpu jax jax_lengths"),
    _tests(
        "tests-others",
        500,
        numerics="quantize quantized_attention repeats row_gradients reductions sink_gradient sm90_int8",
        compile="",
        unit="",
    ),
    _module("bench-words", 60, "bench.words", "cuda"),
    _bench("bench-overhead", 60, "cuda-overhead"),
    _module("bench-quality", 300, "bench.quality", "cuda", f"{TRAINED}/checkpoint"),
    _models("bench-models-long", 120, "--models", "llama-1b", "--batches", "1", "--prompts", "16000"),
    _module("bench-linear-backward", 120, "bench.linear_backward", "cuda"),
    _module("bench-int8-gemm", 120, "bench.int8_gemm", "cuda"),
    _module("bench-reductions", 400, "bench.reductions", "cuda"),
    _bench("bench-decode", 400, "decode", "decode_pages", "decode_mixed", "kv_write"),
    _bench("bench-backward", 120, "backward"),
    _bench("bench-sm90", 500, "sm90"),
    _bench("bench-sm90-int8", 500, "sm90_int8"),
    *(_sanitizer(tool, 500) for tool in ("memcheck", "synccheck", "initcheck")),
)


def environment(step: Step) -> dict[str, str]:
    """The environment of a step's program: this checkout, wherever it is, and kernels compiled beforehand. Nothing is
    downloaded: models are made or trained here."""
    known = {"HF_HUB_OFFLINE": "1"} | os.environ
    known["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), known.get("PYTHONPATH"))))
    if KERNELS.is_dir():
        known.setdefault("QFLASH_CACHE_DIR", str(KERNELS))
    return known | step.variables


def run(step: Step) -> tuple[int | str, float, str]:
    """(exit status, "too long" or "no program", seconds, last line) of a step."""
    command = [*step.before, sys.executable, *step.arguments]
    log, begun = LOGS / f"{step.name}.log", time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        out.write(f"{shlex.join(command)}\n")
        out.flush()
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(step), stdout=out, stderr=out, start_new_session=True
            )
        except FileNotFoundError as error:
            return "no program", 0.0, str(error)
        try:
            status: int | str = process.wait(step.seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            status = "too long"
        except BaseException:  # an interrupt reaches only this process, because the step has its own session
            _end(process)
            raise
    seconds = time.monotonic() - begun
    lines = log.read_text(errors="replace").splitlines()
    return status, seconds, next(filter(str.strip, reversed(lines)))


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)  # pytest's workers, too
    process.wait()


def new_archive(folder: Path) -> Path:
    """A name that no earlier run has used for its archive."""
    names = itertools.chain(["made.tar.gz"], (f"made-{number}.tar.gz" for number in itertools.count(2)))
    return next(folder / name for name in names if not (folder / name).exists())


def keep(archive: Path, begun: float) -> None:
    """Archive what was written since `begun`. The previous archive is kept until this one is complete."""
    part = archive.with_suffix(".part")
    with tarfile.open(part, "w:gz") as file:
        for path in sorted(path for made in MADE for path in made.rglob("*")):
            if path.is_file() and path.stat().st_mtime >= begun and path.stat().st_size <= MOST_BYTES:
                file.add(path, path.relative_to(ROOT))
    part.replace(archive)


def chosen_steps(names: Sequence[str], first: str | None) -> list[Step]:
    known = {step.name: step for step in STEPS}
    if unknown := [name for name in (*names, *filter(None, [first])) if name not in known]:
        raise SystemExit(f"there is no step {', '.join(unknown)}; there are {', '.join(known)}")
    steps = [known[name] for name in names] or list(STEPS)
    if first and known[first] not in steps:
        raise SystemExit(f"--from is {first}, which is none of the steps named; allowed: {', '.join(names)}")
    at = steps.index(known[first]) if first else 0
    return steps[at:]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--to", type=Path, metavar="FOLDER")
    parser.add_argument("--from", dest="first", metavar="STEP")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(arguments)
    steps = chosen_steps(given.steps, given.first)
    if given.list:
        print("\n".join(f"{step.seconds:5d} s  {step.name}" for step in steps))
        return 0
    if given.to is None:
        parser.error("--to FOLDER is missing")
    given.to.mkdir(parents=True, exist_ok=True)
    archive, begun, started = new_archive(given.to), time.time(), time.monotonic()
    rows: list[dict[str, Any]] = []
    for step in steps:
        left = given.minutes * 60 - (time.monotonic() - started)
        if left < step.seconds and step is not steps[0]:
            break
        status, seconds, last = run(step)
        keep(archive, begun)
        rows.append({"step": step.name, "status": status, "seconds": round(seconds, 1), "last": last})
        with (given.to / "steps.jsonl").open("a") as out:
            out.write(json.dumps(rows[-1]) + "\n")
        print(line(rows[-1]), flush=True)
    rest = steps[len(rows) :]
    print("\n".join(table(rows, rest)))
    return int(any(row["status"] != 0 for row in rows))


def line(row: dict[str, Any]) -> str:
    return f"{row['step']:22} {row['status']!s:>10} {row['seconds']:6.0f} s  {row['last'][:120]}"


def table(rows: Sequence[dict[str, Any]], rest: Sequence[Step]) -> list[str]:
    """Lines for readers of only the end: every step that ran, its outcome, and how to continue with the rest."""
    good = sum(row["status"] == 0 for row in rows)
    said = f"{good} of {len(rows)} steps ended well, in {sum(row['seconds'] for row in rows):.0f} s"
    lines = ["", f"{'step':22} {'status':>10} {'time':>8}  last line", *map(line, rows), said]
    if rest:
        lines.append(
            f"{len(rest)} did not fit; {rest[0].name} may take {rest[0].seconds} s: go on with --from {rest[0].name}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
