"""The scripts in examples/ run as they stand; each checks its own claim."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, capsys):
    framework = path.stem.partition("_")[0]
    if framework in ("torch", "jax"):
        pytest.importorskip(framework)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
