"""Train a Llama of transformers on the standard library's sources, byte by byte, with qflash and, alongside, with SDPA.

python examples/train_stdlib_model.py --size base --device cuda --out trained   # 76 million weights, for a GPU
python examples/train_stdlib_model.py --size small --attention qflash --out trained   # 1.2 million, for a CPU

The attentions named start from the same weights and see the same batches; in one process they alternate, step by step,
so that the times of a step are comparable. The folder gets a loss curve for each (JSON lines, which
`python -m bench.curves` draws; `ms` is the time of a step), and a checkpoint of the first one, which
`AutoModelForCausalLM.from_pretrained` reads and `python -m bench.quality` measures. One file in twenty is held out.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from llama.hf_model import ATTENTION, FUSED, SIZES, Learner, config_of
from llama.text import all_sources, batches, windows

# By size: settings that fit the intended machine.
DEFAULTS = {
    "small": {"steps": 3000, "length": 512, "batch": 8, "rate": 3e-3},
    "base": {"steps": 800, "length": 4096, "batch": 8, "rate": 1e-3},
}
TELL_EVERY = 20  # steps; losses are read from the device only then


class Stopwatch:
    """Times of steps: from events on a GPU, where the host runs ahead, else from the clock."""

    def __init__(self, device: str) -> None:
        self.device, self.marks = device, []

    def mark(self) -> None:
        if self.device == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Milliseconds between pairs of marks. The caller has waited for the device."""
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        if self.device == "cuda":
            return [start.elapsed_time(end) for start, end in pairs]
        return [1e3 * (end - start) for start, end in pairs]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Llama of transformers on the standard library's sources.")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--attention", choices=ATTENTION, nargs="+", default=[*ATTENTION])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="a folder for curves and the checkpoint; default: they are not kept")
    parser.add_argument("--seed", type=int, default=0)
    for name, kind in (("steps", int), ("length", int), ("batch", int), ("rate", float)):
        by_size = ", ".join(f"{size} {DEFAULTS[size][name]}" for size in SIZES)
        parser.add_argument(f"--{name}", type=kind, help=f"default: {by_size}")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and PyTorch finds no GPU; allowed: cpu")
    for name, value in DEFAULTS[given.size].items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return given


def train(learners: dict[str, Learner], given: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """The rows of every learner: `step`, `loss` and `ms`."""
    watches = {name: Stopwatch(given.device) for name in learners}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in learners}
    text, start = all_sources(held_out=False), time.perf_counter()
    for step, tokens in enumerate(batches(given.batch, given.length, given.steps, given.seed, text)):
        there = torch.from_numpy(tokens).to(given.device).long()
        for name, learner in learners.items():
            watches[name].mark()
            losses[name].append(learner.step(there))
            watches[name].mark()
        if step % TELL_EVERY == 0 or step == given.steps - 1:
            told = "   ".join(f"{name} {values[-1].item():.4f}" for name, values in losses.items())
            print(f"step {step:5d}   loss of {told}   {time.perf_counter() - start:7.1f} s", flush=True)
    if given.device == "cuda":
        torch.cuda.synchronize()
    return {
        name: [
            {"step": step, "loss": loss.item(), "ms": round(ms, 3)}
            for step, (loss, ms) in enumerate(zip(losses[name], watches[name].spans(), strict=True))
        ]
        for name in learners
    }


def tell_speeds(rows: dict[str, list[dict[str, float]]]) -> None:
    """Print speeds. A ratio is the median of ratios, each of two consecutive steps."""
    times = {name: [row["ms"] for row in of_one] for name, of_one in rows.items()}
    first, *others = times
    for name in times:
        print(f"{name}: {statistics.median(times[name]):.1f} ms a step, held-out loss {rows[name][-1]['held_out']:.4f}")
    for name in others:
        ratios = [theirs / ours for ours, theirs in zip(times[first], times[name], strict=True)]
        print(f"a step with {first} is {statistics.median(ratios):.3f} times as fast as with {name}")


def main() -> None:
    given = arguments()
    learners = {
        name: Learner(
            config_of(given.size, given.length, name), given.device, given.rate, given.steps, given.seed, name in FUSED
        )
        for name in dict.fromkeys(given.attention)
    }
    first = next(iter(learners.values()))
    count = sum(x.numel() for x in first.weights)
    print(f"{count / 1e6:.1f} million weights, {given.batch} × {given.length} bytes a step")
    rows = train(learners, given)
    pieces = (
        torch.from_numpy(windows(all_sources(held_out=True), given.length, 4 * given.batch)).to(given.device).long()
    )
    for name, learner in learners.items():
        rows[name][-1]["held_out"] = learner.held_out_loss(pieces, given.batch)
    tell_speeds(rows)
    if given.out is None:
        return
    about = {"framework": "torch", "device": given.device, "size": given.size, "parameters": count}
    about |= {"length": given.length, "batch": given.batch, "seed": given.seed}
    given.out.mkdir(parents=True, exist_ok=True)
    for name, of_one in rows.items():
        lines = [json.dumps(about | {"attention": name} | row) for row in of_one]
        (given.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    first.save(given.out / "checkpoint")
    print(f"curves and a checkpoint are in {given.out}")


if __name__ == "__main__":
    main()
