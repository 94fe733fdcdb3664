"""Loss curves of examples/train_llama.py in one picture: the losses, and the difference of each from the first.

python -m bench.curves qflash.jsonl sdpa.jsonl --to curves.svg
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.drawing import page
from bench.drawing.style import KERNELS, PEERS, Look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL = 220  # pixels
LOOKS = {"qflash": KERNELS["cpu"], "qflash-fused": KERNELS["sm90_fwd"], "sdpa": PEERS["torch SDPA"]}


@dataclass(frozen=True)
class Curve:
    """One run. Its rows have `framework`, `attention`, `step` and `loss`."""

    name: str
    look: Look
    steps: list[int]
    losses: list[float]


def read(path: Path) -> Curve:
    """The curve in a file of JSON lines."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if not rows:
        raise ValueError(f"{path} has no rows; allowed: what examples/train_llama.py --curve writes")
    first = rows[0]
    name = f"{first['framework']}, {first['attention']}"
    return Curve(name, LOOKS[first["attention"]], [row["step"] for row in rows], [row["loss"] for row in rows])


def drawn(curves: list[Curve]) -> Figure:
    """Losses above, differences from the first curve below."""
    first = curves[0]
    caption = f"Same weights, same batches. Below: loss less that of {first.name}, in the steps that both have."
    figure = page.blank(2 * PANEL, "Loss of a small Llama-like model", caption)
    above, below = figure.subplots(2, 1, sharex=True)
    for curve in curves:
        look = {"color": curve.look.colour.light, "linestyle": curve.look.line, "label": curve.name}
        above.plot(curve.steps, curve.losses, **look)
        known = dict(zip(first.steps, first.losses, strict=True))
        shared = [
            (step, loss - known[step]) for step, loss in zip(curve.steps, curve.losses, strict=True) if step in known
        ]
        below.plot(*zip(*shared, strict=True), **look)
    above.set_ylabel("loss, nats a byte")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    above.legend()
    return figure


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Draw loss curves of examples/train_llama.py.")
    parser.add_argument("curves", type=Path, nargs="+", help="files that --curve wrote")
    parser.add_argument("--to", type=Path, default=Path("curves.svg"), help="the SVG")
    given = parser.parse_args()
    curves = [read(path) for path in given.curves]
    page.write(given.to, page.render(lambda: drawn(curves), page.digest(given.curves)))
    print(given.to)


if __name__ == "__main__":
    main()
