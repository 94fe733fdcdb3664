"""tests/type_checks uses the public API as users do: mypy agrees with every type it asserts, and the code runs."""

import importlib.util
import inspect
import os
import subprocess
import sys
import typing
from pathlib import Path
from types import ModuleType

import pytest

import qflash
import qflash.typing as words
from qflash.call.spec import ACTIVATIONS
from qflash.ops.kv import KV_PRECISIONS
from qflash.ops.quantization import GRANULARITIES, ROUNDINGS
from qflash.ops.rows import REDUCTIONS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests" / "type_checks").glob("*.py"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def framework_of(path: Path) -> str:
    return path.stem.partition("_")[0]


@pytest.mark.process
def test_mypy_agrees(capsys):
    """Strictly, so that a `type: ignore` whose line is no error is one itself."""
    mypy = load(ROOT / "tools" / "lint.py").find("mypy")
    if mypy is None:
        pytest.skip(capsys.readouterr().out.strip())
    files = [path for path in FILES if importlib.util.find_spec(framework_of(path))]
    # Not lint's configuration, which does not look into torch and jax. qflash's own errors are lint's to tell.
    command = [mypy, "--config-file=", "--strict", "--follow-imports=silent", "--python-executable", sys.executable]
    command += [f"--cache-dir={ROOT / '.mypy_cache' / 'type_checks'}", "--no-error-summary", *map(str, files)]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"mypy says:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_checked_also_runs(path):
    pytest.importorskip(framework_of(path))
    load(path).run()


@pytest.mark.parametrize("name", qflash.__all__)
def test_annotations_can_be_evaluated(name):
    """No name in them is known to type checkers alone; tools that read signatures need them too."""
    assert typing.get_type_hints(getattr(qflash, name)) or name.endswith(("Error", "_num_threads"))


@pytest.mark.parametrize("name", [name for name in qflash.__all__ if inspect.isfunction(getattr(qflash, name))])
def test_types_are_complete(name):
    """Every argument and result that a checker sees has a type, and it is not Any."""
    function = getattr(qflash, name)
    for signature in typing.get_overloads(function) or [inspect.unwrap(function)]:
        hints = typing.get_type_hints(signature)
        assert {*inspect.signature(signature).parameters, "return"} == set(hints)
        assert [word for word, hint in hints.items() if hint is typing.Any] == []


@pytest.mark.parametrize(
    ("alias", "allowed"),
    [
        (words.Activation, ACTIVATIONS[1:4]),
        (words.Granularity, GRANULARITIES),
        (words.Precision, KV_PRECISIONS),
        (words.Reduction, REDUCTIONS),
        (words.Rounding, ROUNDINGS),
    ],
)
def test_words_are_those_that_checks_allow(alias, allowed):
    assert typing.get_args(alias) == allowed
