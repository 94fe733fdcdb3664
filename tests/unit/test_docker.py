"""The Dockerfiles run the README's commands, on files that exist and with what pyproject.toml asks for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("Dockerfile", "Dockerfile.cpu")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps(name: str) -> list[tuple[str, str]]:
    """(instruction, its words) of a Dockerfile, in order."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)
    ]


def commands() -> set[str]:
    """What the README tells people to type."""
    blocks = re.findall(r"```(?:console|bash|sh|shell)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = (line.removeprefix("$ ").partition("#")[0].strip() for block in blocks for line in block.splitlines())
    return {line for line in lines if line}


@pytest.mark.parametrize("name", FILES)
def test_steps_are_the_readmes_commands(name):
    ours = [words for step, words in steps(name) if step == "RUN" and not words.startswith("apt-get ")]
    ours += [" ".join(json.loads(words)) for step, words in steps(name) if step == "CMD"]
    assert ours == ["make test", "make run"]
    assert set(ours) <= commands()


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_exists(name):
    copied = [words.split() for step, words in steps(name) if step == "COPY"]
    assert copied
    for *sources, _ in copied:
        assert [source for source in sources if not (ROOT / source).exists()] == []


@pytest.mark.parametrize("name", FILES)
def test_what_make_needs_is_installed(name):
    installed = " ".join(words for step, words in steps(name) if step in ("FROM", "RUN"))
    for package in ("g++", "git", "make", "python"):
        assert re.search(rf"(^|[ /]){re.escape(package)}", installed)


def test_images_have_the_compiler_and_the_python_that_the_project_asks_for():
    (toolkit,) = (re.search(r"==([\d.]+)", item)[1] for item in PROJECT["optional-dependencies"]["cuda"])
    assert dict(steps("Dockerfile"))["FROM"].startswith(f"nvidia/cuda:{toolkit}-devel-")
    least = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    python = re.match(r"python:(\d+)\.(\d+)-slim", dict(steps("Dockerfile.cpu"))["FROM"])
    assert tuple(map(int, python.groups())) >= least


@pytest.mark.process
@pytest.mark.skipif(shutil.which("make") is None, reason="no make on the PATH")
def test_the_environment_is_one_for_the_gpu_that_will_be_there():
    """An image is built without a GPU, and the Makefile would find that there is none."""
    settings = dict(words.split("=", 1) for step, words in steps("Dockerfile") if step == "ENV")
    command = ["make", "--dry-run", "--no-print-directory", "PYTHON=true", f"VENV={ROOT / 'not' / 'there'}", "build"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, check=True)
    assert re.search(r"tools/environment\.py .* --gpu$", done.stdout, re.MULTILINE)


def test_what_a_checkout_built_stays_out_of_the_image():
    kept_out = (ROOT / ".dockerignore").read_text().splitlines()
    built = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.endswith("/")}
    assert [name for name in sorted(built) if name not in kept_out and f"**/{name}" not in kept_out] == []
    assert "**/*.so" in kept_out
