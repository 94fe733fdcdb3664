"""Generation with whole models of transformers, and its own ways: time to the first token, tokens per second, memory.

python -m bench.models [cuda|cpu] [--quick] [--models llama-1b --batches 1,8 --prompts 900 --contenders hf,qflash]
                       [--missing] [--limit 400]

adds to bench/results/<machine>/models.jsonl; `qflash report` makes the tables. A command measures a part: rows of the
points that it measures replace existing ones, and others stay. With --missing it omits everything that has a row, so
that one command, called repeatedly, measures everything, --limit seconds at a time.

Each contender runs once untimed, which compiles and captures, and then up to three times. The time of the first token
is when the device has its logits; tokens per second of decoding count the later ones. `captured` of a row says whether
the step was compiled, or a CUDA graph.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import model_contenders, rows, tables
from bench.model_contenders import CHANGES, CONTENDERS, HF, PAGE, STATIC, Contender, First
from bench.model_shapes import SEED, SHAPES, Shape, build, cache_bytes
from bench.run import Row, refusal, set_threads
from qflash import machine

NAME = "models"
NEW = 128
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}  # torch's bfloat16 products crash on some CPUs in virtual machines
# Relative L2 errors of the first logits against sdpa's: from 16 bits through all layers, or from INT8 in some of them.
LARGEST_ERROR, LARGEST_INT8_ERROR = 0.1, 0.3
KEY = ("model", "B", "prompt", "candidate")  # identifies a row


@dataclass(frozen=True)
class Point:
    """A batch of prompts of one length."""

    batch: int
    prompt: int


@dataclass
class Run:
    """What a command measures."""

    device: str
    models: Sequence[str]
    points: Sequence[Point]
    contenders: Sequence[str]
    new_tokens: int = NEW
    runs: int = 3
    seconds: float = 20.0  # of a contender at a point, after which it is not run again
    limit: float = 400.0  # of the whole run, after which nothing new is started
    done: set[tuple[Any, ...]] = field(default_factory=set)  # keys of rows that are not measured again
    begun: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.begun > self.limit

    def wanted(self, model: str, point: Point, change: str) -> list[Contender]:
        """Contenders of a change that have no row at a point."""
        found = [CONTENDERS[key] for key in self.contenders if CONTENDERS[key].change == change]
        return [one for one in found if (model, point.batch, point.prompt, one.name) not in self.done]


def measure(run: Run, tell: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Yield rows as they are measured, without provenance. Reports at the end what was omitted for lack of time."""
    left = []
    for name, point in itertools.product(run.models, run.points):
        if point.prompt >= SHAPES[name].positions:
            tell(f"{name}, {point}: skipped, the model has {SHAPES[name].positions} positions")
    for name, change in itertools.product(run.models, CHANGES):
        points = [point for point in run.points if point.prompt < SHAPES[name].positions]
        todo = [(point, one) for point in points for one in run.wanted(name, point, change)]
        if run.is_over:
            left += [f"{name} {point} {one.key}" for point, one in todo]
        elif todo:
            for point, one, row in _measure_model(run, SHAPES[name], change, todo):
                if row is None:
                    left.append(f"{name} {point} {one.key}")
                else:
                    yield row
    if left:
        tell(f"{len(left)} not begun after {run.limit:.0f} s, the first: {left[0]}; --missing goes on with them")


def _measure_model(
    run: Run, shape: Shape, change: Any, todo: Sequence[tuple[Point, Contender]]
) -> Iterator[tuple[Point, Contender, Row | None]]:
    """Rows of contenders with the same change of the model, with None for one omitted for lack of time."""
    model = build(shape, run.device, DTYPES[run.device])
    about = {"kind": NAME, "model": shape.name, "parameters": sum(x.numel() for x in model.parameters())}
    about["dtype"] = DTYPES[run.device]
    references: dict[Point, Any] = {}
    for point in dict.fromkeys(point for point, _ in todo):
        references[point] = _reference(model, _prompts(model, point))
    is_changed = model_contenders.changed(model, change)
    for point, one in todo:
        if run.is_over:
            yield point, one, None
            continue
        count = min(run.new_tokens, shape.positions - point.prompt)
        sizes = {"B": point.batch, "prompt": point.prompt, "new_tokens": count}
        nothing = {"skipped": "the model has no layers to join"}
        figures = _tried(run, model, point, one, count, references) if is_changed else nothing
        yield point, one, about | sizes | {"candidate": one.name} | figures


def _prompts(model: Any, point: Point) -> Any:
    import torch

    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(1, model.config.vocab_size, (point.batch, point.prompt), generator=generator)
    return ids.to(model.device)


def _reference(model: Any, ids: Any) -> Any:
    """The first logits of two sequences, by sdpa."""
    import torch

    with torch.no_grad():
        return model(ids[:2], use_cache=False, logits_to_keep=1).logits[:, -1].float()


def _tried(run: Run, model: Any, point: Point, one: Contender, count: int, references: dict[Point, Any]) -> Row:
    """Figures, or why there are none."""
    try:
        return _figures(run, model, _prompts(model, point), one, count, references[point])
    except Exception as error:  # whatever the error is, the others are measured, and the table contains it
        traceback.print_exc()
        return {"skipped": refusal(error) or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:120]}
    finally:
        _free(run.device)


def _figures(run: Run, model: Any, ids: Any, one: Contender, count: int, reference: Any) -> Row:
    _free(run.device)
    _reset_peak(run.device)
    begun, firsts, totals = time.monotonic(), [], []
    with one.start(model, ids, count) as generate:
        for index in range(1 + run.runs):
            first, start = First(), time.perf_counter()
            asked = count if index or one.is_prepared else min(count, 3)
            new = generate(ids, asked, first)
            model_contenders.synchronize(new)
            end = time.perf_counter()
            if tuple(new.shape) != (len(ids), asked):
                return {"skipped": f"it made tokens of shape {tuple(new.shape)}"}
            if index:  # the first run compiled and captured
                firsts.append(first.at - start)
                totals.append(end - start)
                if time.monotonic() - begun > run.seconds:
                    break
    error = float((first.logits - reference).norm() / reference.norm())
    largest = LARGEST_INT8_ERROR if one.change == "int8" or one.int8_pages else LARGEST_ERROR
    if not error <= largest:
        return {"skipped": f"its first logits are off by {error:.2g}"}
    reason = getattr(generate, "reason", None)
    return (
        rates(len(ids), count, firsts, totals)
        | {"rel_l2": float(f"{error:.3g}"), "captured": None if reason is None else not reason}
        | _memory(run, model, ids, one, count)
    )


def rates(batch: int, count: int, firsts: Sequence[float], totals: Sequence[float]) -> Row:
    """Figures of runs, as medians; firsts, totals: seconds to the first token and to the last."""
    first, total = statistics.median(firsts), statistics.median(totals)
    decode = statistics.median(total - first for first, total in zip(firsts, totals, strict=True))
    return {
        "first_ms": round(first * 1e3, 3),
        "decode_tokens_s": round(batch * (count - 1) / decode, 2),
        "tokens_s": round(batch * count / total, 2),
        "runs": len(totals),
    }


def _memory(run: Run, model: Any, ids: Any, one: Contender, count: int) -> Row:
    peak = None
    if run.device == "cuda":
        import torch

        peak = torch.cuda.max_memory_allocated()
    length = ids.shape[1] + count
    tokens = len(ids) * (-(-length // PAGE) * PAGE if one.pages else length - 1)
    held = [*model.parameters(), *model.buffers()]
    return {
        "peak_bytes": peak,
        "weight_bytes": sum(x.nbytes for x in held),
        "cache_bytes": cache_bytes(model.config, tokens, model.dtype.itemsize, one.int8_pages),
    }


def _reset_peak(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()


def _free(device: str) -> None:
    """Free memory of the last contender, so that it is not counted for the next."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


# Rows and tables ------------------------------------------------------------------------------------------------------


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """New rows replace old ones of the same point; all in the order of models, points and contenders."""
    by_key = {key_of(row): row for row in (*old, *new)}
    names = [one.name for one in CONTENDERS.values()]
    models = list(SHAPES)

    def place(row: Row) -> tuple[int, ...]:
        return models.index(row["model"]), row["prompt"], row["B"], names.index(row["candidate"])

    return sorted(by_key.values(), key=place)


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def table(machine: str | None = None, **chosen: Any) -> str:
    """The committed rows: one table per machine, a contender per line; `chosen`: by_machine's keep."""

    def of(found: list[Row]) -> str:
        speed = {key_of(row): row["decode_tokens_s"] for row in found if "skipped" not in row}
        header = ["model, batch, prompt", "contender", "first token", "tokens/s, decoding", "tokens/s, all"]
        header += [f"× {HF}", f"× {STATIC}", "peak memory", "weights", "keys and values"]
        return tables.markdown(header, tables.unrepeated(_line(row, speed) for row in found))

    return tables.by_machine(NAME, of, "`python -m bench.models` makes them.", machine, **chosen)


def _line(row: Row, speed: dict[tuple[Any, ...], float]) -> list[str]:
    name = row["candidate"]
    shown = [f"{row['model']}, {row['B']} × {row['prompt']}", f"**{name}**" if name.startswith("qflash") else name]
    if "skipped" in row:
        return [*shown, row["skipped"], *[""] * 7]
    ratios = []
    for peer in (HF, STATIC):
        theirs = speed.get((*key_of(row)[:-1], peer))
        ratios.append(tables.ratio(row["decode_tokens_s"] / theirs if theirs and peer != name else None))
    memory = [_gigabytes(row[column]) for column in ("peak_bytes", "weight_bytes", "cache_bytes")]
    rates = [f"{row[column]:.0f}" for column in ("decode_tokens_s", "tokens_s")]
    return [*shown, f"{row['first_ms']:.1f} ms", *rates, *ratios, *memory]


def _gigabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f} GB"


# The command ----------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> tuple[Run, bool]:
    """What a command line requests, and whether existing rows are omitted."""
    parser = argparse.ArgumentParser(description="Measure generation with whole models, beside transformers' ways.")
    parser.add_argument("device", choices=tuple(DTYPES), nargs="?", default="cuda")
    parser.add_argument("--quick", action="store_true", help="one model, one point, 32 tokens, one run")
    for name, allowed in (("models", SHAPES), ("contenders", CONTENDERS)):
        parser.add_argument(f"--{name}", help=f"of {', '.join(allowed)}")
    parser.add_argument("--batches", type=_counts, help="how many prompts; default 1,8,32")
    parser.add_argument("--prompts", type=_counts, help="how many tokens each; default 900,16000")
    parser.add_argument("--new-tokens", type=_count)
    parser.add_argument("--seconds", type=_seconds, default=20.0, help="of a contender at a point")
    parser.add_argument("--limit", type=_seconds, default=400.0, help="seconds after which nothing is begun")
    parser.add_argument("--missing", action="store_true", help="leave out what has a row")
    given = parser.parse_args(arguments)
    on_cpu = given.device == "cpu"
    models = "tiny" if on_cpu else "llama-1b" if given.quick else "gpt2,llama-1b,llama-8b"
    batches, prompts = ([1, 3], [40]) if on_cpu else ([1], [900]) if given.quick else ([1, 8, 32], [900, 16000])
    few = given.quick or on_cpu
    points = itertools.product(given.prompts or prompts, given.batches or batches)
    run = Run(
        given.device,
        _names(parser, "models", given.models or models, SHAPES),
        [Point(batch, prompt) for prompt, batch in points],
        _names(parser, "contenders", given.contenders or ",".join(CONTENDERS), CONTENDERS),
        given.new_tokens or (32 if few else NEW),
        1 if given.quick else 3,
        given.seconds,
        given.limit,
    )
    return run, given.missing


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: numbers from 1 on are")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: seconds above 0 are")
    return seconds


def _names(parser: argparse.ArgumentParser, what: str, text: str, allowed: Any) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in allowed:
            parser.error(f"--{what} has {name!r}; allowed: {', '.join(allowed)}")
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Rows are written as they are measured, so that an interrupted run keeps them."""
    run, only_missing = parse(arguments)
    set_threads(None)
    shared = {"preset": NAME} | rows.provenance(run.device)
    shared["versions"] |= {"transformers": machine.version("transformers")}
    path = rows.RESULTS / shared["machine"] / f"{NAME}.jsonl"
    old = rows.read(path) if path.exists() else []
    run.done = {key_of(row) for row in old} if only_missing else set()
    new: list[Row] = []
    for row in measure(run, lambda text: print(text, flush=True)):
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        new.append(shared | row)
        rows.write(path, merged(old, new))
    print(f"{len(new)} rows of {len(merged(old, new))} in {path.relative_to(rows.ROOT)} are new")


if __name__ == "__main__":
    main()
