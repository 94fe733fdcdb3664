"""tools/on_gpu.py: its steps name what exists, and what they made is kept after each of them."""

import importlib.util
import json
import tarfile
from pathlib import Path

import pytest

from bench import beside_triton, models
from bench.presets import PRESETS
from qflash.cli.cuda import build as build_command
from qflash.dispatch import VARIANTS

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """The module, as if a checkout in tmp_path were its own."""
    spec = importlib.util.spec_from_file_location("on_gpu", ROOT / "tools" / "on_gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "on_gpu", module)  # where dataclasses look
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(module, "KERNELS", tmp_path / "kernels")
    monkeypatch.setattr(module, "MADE", (tmp_path / "rows", tmp_path / "logs"))
    return module


def test_steps_name_what_exists(on_gpu):
    assert len({step.name for step in on_gpu.STEPS}) == len(on_gpu.STEPS)
    for step in on_gpu.STEPS:
        if step.arguments[0] != "-m":
            assert (ROOT / step.arguments[0]).is_file(), step
            continue
        module, *words = step.arguments[1:]
        if module == "pytest":
            paths = [word for word in words if word.startswith("tests/")]
            assert paths and all((ROOT / path).exists() for path in paths), step
        elif module == "qflash.cli":
            command, *words = words
            asked = build_command.make_context(command, words).params if command == "build" else {}
            named = words[1::2] if command == "profile" else ()
            assert all(PRESETS[name].device == "cuda" for name in words if command == "bench"), step
            assert asked.get("dry_run", True) and all(name in VARIANTS for name in named), step
        elif module == "qflash.testing.sanitize":
            assert all(name in VARIANTS for name in words), step
        else:
            assert importlib.util.find_spec(module), step
            if module == "bench.beside_triton":
                assert words and set(words) <= set(beside_triton.SUITES)
            if module == "bench.models":
                assert models.parse(words)[0].limit < step.seconds


def test_what_a_step_reads_was_made_before(on_gpu):
    names = [step.name for step in on_gpu.STEPS]
    assert names.index("build") == 0
    assert names.index("train") < names.index("bench-training") < names.index("bench-quality")
    made_by, *readers = (step.arguments for step in on_gpu.STEPS if any("trained" in word for word in step.arguments))
    assert made_by[-1] == on_gpu.TRAINED and len(readers) == 2
    assert all(any(word.startswith(on_gpu.TRAINED) for word in arguments) for arguments in readers)


def test_steps_find_this_checkout_and_kernels_that_were_compiled_before(on_gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    for name in ("QFLASH_CACHE_DIR", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    step = on_gpu.Step("a", (), 1, {"WORD": "word"})
    assert on_gpu.environment(step)["PYTHONPATH"] == f"{tmp_path}:elsewhere"
    assert on_gpu.environment(step)["HF_HUB_OFFLINE"] == "1"
    assert "QFLASH_CACHE_DIR" not in on_gpu.environment(step) and on_gpu.environment(step)["WORD"] == "word"
    on_gpu.KERNELS.mkdir()
    assert on_gpu.environment(step)["QFLASH_CACHE_DIR"] == str(tmp_path / "kernels")
    monkeypatch.setenv("QFLASH_CACHE_DIR", "asked")
    assert on_gpu.environment(step)["QFLASH_CACHE_DIR"] == "asked"


def test_tests_run_without_pytest_xdist(on_gpu, monkeypatch):
    for found, is_there in ((None, False), ("a spec", True)):
        monkeypatch.setattr(on_gpu.importlib.util, "find_spec", lambda name, found=found: found)
        assert ("-n" in on_gpu._tests("a", 1, numerics="random").arguments) is is_there


def test_every_file_of_gpu_tests_is_in_a_step(on_gpu):
    named = {word for step in on_gpu.STEPS for word in step.arguments if word.startswith("tests/")}
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if "pytest.mark.gpu" in text and path.name != Path(__file__).name:
            name = path.relative_to(ROOT).as_posix()
            assert any(name == one or name.startswith(f"{one}/") for one in named), f"{name} is in no step"


@pytest.mark.process
def test_what_was_made_is_kept_after_every_step(on_gpu, tmp_path, capsys, monkeypatch):
    write = "import pathlib; pathlib.Path('rows').mkdir(); pathlib.Path('rows/a.jsonl').write_text('1'); print('made')"
    write += "; pathlib.Path('rows/trained').write_text(4000 * 'x')"  # too large to be kept
    monkeypatch.setattr(on_gpu, "MOST_BYTES", 3999)
    steps = (
        on_gpu.Step("makes", ("-c", write), 60),
        on_gpu.Step("fails", ("-c", "import os, sys; print(os.environ['WORD']); sys.exit(3)"), 60, {"WORD": "word"}),
        on_gpu.Step("hangs", ("-c", "import time; time.sleep(600)"), 1),
    )
    monkeypatch.setattr(on_gpu, "STEPS", steps)
    to = tmp_path / "kept"
    assert on_gpu.main(["--to", str(to)]) == 1
    rows = [json.loads(line) for line in (to / "steps.jsonl").read_text().splitlines()]
    assert [(row["step"], row["status"]) for row in rows] == [("makes", 0), ("fails", 3), ("hangs", "too long")]
    assert [row["last"] for row in rows[:2]] == ["made", "word"]
    with tarfile.open(to / "made.tar.gz") as archive:
        assert archive.getnames() == ["logs/fails.log", "logs/hangs.log", "logs/makes.log", "rows/a.jsonl"]
    first, table = (text.splitlines() for text in capsys.readouterr().out.split("\n\n"))
    assert len(first) == 3 and table[0].split() == ["step", "status", "time", "last", "line"] and table[1:4] == first
    assert table[4].startswith("1 of 3 steps ended well, in ") and len(table) == 5
    assert on_gpu.main(["--to", str(to), "fails"]) == 1
    with tarfile.open(to / "made-2.tar.gz") as archive:
        assert archive.getnames() == ["logs/fails.log"]
    assert sorted(path.name for path in to.iterdir()) == ["made-2.tar.gz", "made.tar.gz", "steps.jsonl"]


@pytest.mark.process
def test_an_interrupt_ends_what_a_step_started(on_gpu, tmp_path, monkeypatch):
    ended, wait = [], on_gpu.subprocess.Popen.wait

    def interrupted(process, timeout=None):
        if timeout is not None:
            raise KeyboardInterrupt
        ended.append(wait(process))

    monkeypatch.setattr(on_gpu.subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        on_gpu.run(on_gpu.Step("hangs", ("-c", "import time; time.sleep(600)"), 60))
    assert ended == [-9]


def test_a_program_that_is_not_installed(on_gpu, tmp_path):
    status, _, last = on_gpu.run(on_gpu.Step("checks", ("-c", ""), 60, before=("no-such-sanitizer",)))
    assert status == "no program" and "no-such-sanitizer" in last


def test_steps_that_do_not_fit_are_named(on_gpu, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(on_gpu, "STEPS", tuple(on_gpu.Step(name, (), 100) for name in "abc"))
    monkeypatch.setattr(on_gpu, "run", lambda step: (0, 1.0, "done"))
    assert on_gpu.main(["--to", str(tmp_path / "kept"), "--minutes", "0.5"]) == 0
    assert "go on with --from b" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no step d"):
        on_gpu.main(["--to", str(tmp_path), "--from", "d"])
    with pytest.raises(SystemExit, match="--from is c, which is none of the steps named; allowed: a, b"):
        on_gpu.main(["--to", str(tmp_path), "a", "b", "--from", "c"])
