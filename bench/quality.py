"""The effect of quantization on a trained model of transformers: perplexity, greedy agreement, and the worst layer.

python -m bench.quality [cpu|cuda] [FOLDER]   writes bench/results/<machine>/quality.jsonl; `qflash report` makes the
tables. FOLDER is a checkpoint written by examples/train_stdlib_model.py; default: the small one of this repository.

The text is what that script holds out. Every mode is compared with SDPA of the same dtype, and with SDPA in float32:

perplexity   of a byte, given the bytes before it in its window
agreement    the share of those bytes where the mode's first choice is that of the other model
generated    of greedy text after a prompt, the share before the first byte that differs
cosine       of the worst layer, on its inputs in float32
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import rows, tables
from bench.quality_modes import BASELINE, MODES, TRUTH, Mode
from bench.run import Candidate, Row, Suite, main, set_threads
from qflash.testing.timing import Call, Comparison

NAME = "quality"
SMALL = rows.ROOT / "examples" / "llama" / "stdlib-small"


@dataclass(frozen=True)
class Problem:
    """A checkpoint, its dtype in computations, and the amount of text: windows, prompts, new tokens after each."""

    checkpoint: Path
    dtype: str
    windows: int
    length: int
    prompts: int = 16
    prompt_length: int = 128
    new_tokens: int = 64
    batch: int = 8  # windows per forward pass


@dataclass(frozen=True)
class Figures:
    """The results of a mode. generated: [prompts, new_tokens]; attention and mlp: outputs, layer by layer."""

    predictions: Any
    generated: Any
    attention: list[Any]
    mlp: list[Any]


class Text:
    """The held-out text of a problem, and the results on it of the two models that all modes are compared with."""

    def __init__(self, problem: Problem, device: str) -> None:
        import torch

        from bench import quality_model
        from examples.llama import text

        self.problem, self.device, self.model = problem, device, quality_model
        held_out = text.all_sources(held_out=True)
        self.windows = torch.from_numpy(text.windows(held_out, problem.length, problem.windows)).to(device).long()
        self.prompts = self.windows[: problem.prompts, : problem.prompt_length]
        truth = self.load(TRUTH)
        self.parameters = sum(x.numel() for x in truth.parameters())
        self.inputs = quality_model.layer_inputs(truth, self.windows[:2, :-1])
        self.truth = self._figures(truth, TRUTH)
        self.baseline = self.truth if problem.dtype == TRUTH.dtype else self.figures(BASELINE)

    def load(self, mode: Mode) -> Any:
        return self.model.load(self.problem.checkpoint, mode, self.problem.dtype, self.device)

    def figures(self, mode: Mode) -> Figures:
        return self._figures(self.load(mode), mode)

    def _figures(self, model: Any, mode: Mode) -> Figures:
        problem = self.problem
        attention, mlp = self.model.layer_outputs(model, mode, self.inputs)
        return Figures(
            self.model.predictions(model, mode, self.windows, problem.batch),
            self.model.greedy_text(model, mode, self.prompts, problem.new_tokens),
            attention,
            mlp,
        )


def agreement(got: Any, want: Any) -> float:
    """The share of tokens that are the same."""
    return float((got == want).double().mean())


def same_beginning(got: Any, want: Any) -> float:
    """The share of each text before the first token that differs, averaged over texts."""
    return float((got == want).int().cumprod(-1).double().mean())


class Quality(Suite):
    """Figures of modes: nothing is timed."""

    name = NAME
    timed = False

    def __init__(self, device: str, cases: Iterable[Problem], modes: tuple[Mode, ...] = MODES) -> None:
        self.device, self.cases, self.modes = device, tuple(cases), modes

    def arrays(self, case: Problem) -> Text:
        return Text(case, self.device)

    def candidates(self, arrays: Text) -> tuple[Candidate, ...]:
        first = () if arrays.problem.dtype == TRUTH.dtype else (TRUTH,)
        return tuple(Candidate(mode.name, _making(mode)) for mode in (*first, *self.modes))

    def problem(self, arrays: Text) -> Row:
        given = arrays.problem
        sizes = {"parameters": arrays.parameters, "dtype": given.dtype, "windows": given.windows, "T": given.length}
        generated = {"prompts": given.prompts, "prompt": given.prompt_length, "new_tokens": given.new_tokens}
        return {"kind": NAME} | sizes | generated

    def check(self, arrays: Text, candidate: Candidate, call: Call, result: Figures) -> Row:
        truth, baseline = arrays.truth, arrays.baseline
        cosines = {
            name: [arrays.model.cosine(*pair) for pair in zip(getattr(result, name), getattr(truth, name), strict=True)]
            for name in ("attention", "mlp")
        }
        nats = result.predictions.nats
        return {
            "perplexity": round(math.exp(nats), 6),
            "perplexity_ratio": round(math.exp(nats - baseline.predictions.nats), 6),
            "agreement": round(agreement(result.predictions.choices, baseline.predictions.choices), 6),
            "agreement_float32": round(agreement(result.predictions.choices, truth.predictions.choices), 6),
            "generated": round(same_beginning(result.generated, baseline.generated), 4),
            "attention_cosine": round(min(cosines["attention"]), 7),
            "attention_layer": cosines["attention"].index(min(cosines["attention"])),
            "mlp_cosine": round(min(cosines["mlp"]), 7),
        }

    def row(self, arrays: Text, candidate: Candidate, checked: Row, timing: Comparison | None) -> Row:
        return {"candidate": candidate.name} | checked


def _making(mode: Mode) -> Any:
    return lambda text: lambda: text.figures(mode)


def table(machine: str | None = None) -> str:
    """The committed rows: one table per machine, a mode per line."""

    def of(found: list[Row]) -> str:
        lines = [
            [
                f"{row['parameters'] / 1e6:.1f} M, {row['dtype']}, {row['windows']} × {row['T']} bytes",
                row["candidate"],
                f"{row['perplexity']:.4f}",
                f"{100 * (row['perplexity_ratio'] - 1):+.3f} %",
                f"{100 * row['agreement']:.2f} %",
                f"{100 * row['agreement_float32']:.2f} %",
                f"{100 * row['generated']:.1f} %",
                f"{row['attention_cosine']:.6f} ({row['attention_layer']})",
                f"{row['mlp_cosine']:.6f}",
            ]
            for row in found
        ]
        header = ["model and text", "mode", "perplexity", "over sdpa", "agreement with sdpa", "with float32"]
        header += ["greedy text", "worst attention (layer)", "worst MLP"]
        return tables.markdown(header, tables.unrepeated(lines))

    return tables.by_machine(NAME, of, "`python -m bench.quality` makes them.", machine)


def problems(device: str, checkpoint: Path) -> list[Problem]:
    """On a CPU the small model, in both dtypes; on a GPU long windows."""
    if device == "cpu":
        return [Problem(checkpoint, dtype, windows=48, length=512) for dtype in ("float32", "bfloat16")]
    long = {"windows": 64, "length": 4096, "prompts": 32, "prompt_length": 1024, "new_tokens": 256}
    return [Problem(checkpoint, dtype, **long) for dtype in ("bfloat16", "float16")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the quality of a trained model, mode by mode.")
    parser.add_argument("device", choices=("cpu", "cuda"), nargs="?", default="cpu")
    parser.add_argument("checkpoint", type=Path, nargs="?", default=SMALL)
    given = parser.parse_args()
    if not (given.checkpoint / "config.json").is_file():
        parser.error(f"checkpoint is {given.checkpoint}, without a config.json; allowed: a folder of a trained model")
    set_threads(None)
    main(Quality(given.device, problems(given.device, given.checkpoint)))
