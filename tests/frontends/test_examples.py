"""The scripts in examples/ run as they stand; each checks its own claim."""

import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))

# What the name does not say.
NEEDS = {
    "context_parallel": "torch",
    "train_llama": "torch",
    "train_stdlib_model": "transformers",
    "serve_requests": "transformers",
}
QUICKLY = {
    "train_llama": ("--steps", "2", "--length", "32", "--batch", "2", "--layers", "1"),
    "train_stdlib_model": ("--steps", "2", "--length", "32", "--batch", "2"),
}


def give(monkeypatch, path: Path, *arguments: str) -> None:
    """What a shell would: the arguments, and the script's folder to import from."""
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.syspath_prepend(str(path.parent))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, capsys, monkeypatch):
    framework = NEEDS.get(path.stem, path.stem.partition("_")[0])
    if framework in ("torch", "jax", "transformers"):
        pytest.importorskip(framework)
    give(monkeypatch, path, *QUICKLY.get(path.stem, ()))
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_model_learns_with_qflash_as_it_does_with_the_frameworks_own_attention(framework, tmp_path, monkeypatch):
    """The same losses, step by step, and falling ones."""
    pytest.importorskip(framework)
    path = next(path for path in EXAMPLES if path.stem == "train_llama")
    curves = {}
    for attention in ("qflash", "sdpa"):
        words = ["--framework", framework, "--attention", attention, "--curve", str(tmp_path / attention)]
        give(
            monkeypatch,
            path,
            *words,
            "--steps",
            "12",
            "--length",
            "48",
            "--batch",
            "4",
            "--heads",
            "4",
            "--hidden",
            "64",
        )
        runpy.run_path(str(path), run_name="__main__")
        curves[attention] = [json.loads(line) for line in (tmp_path / attention).read_text().splitlines()]
    losses = {name: [row["loss"] for row in rows] for name, rows in curves.items()}
    assert [row["step"] for row in curves["qflash"]] == list(range(12))
    assert losses["qflash"] == pytest.approx(losses["sdpa"], rel=2e-3)
    assert losses["qflash"][-1] < 0.8 * losses["qflash"][0]
