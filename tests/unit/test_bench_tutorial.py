"""bench.tutorial: Triton's own attention kernel as a peer, from a file that the user names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qflash.cli.bench import load

torch = pytest.importorskip("torch")

attention, peers, presets, rows, run, tutorial = (
    load(name) for name in ("attention", "peers", "presets", "rows", "run", "tutorial")
)
CASE = replace(presets._square(128, 16, causal=True, heads=2), dtype="float16")
# What Triton's file is to us: a function of this name and these arguments, [B, H, T, D].
FILE = """
import torch

def attention(q, k, v, causal, sm_scale, warp_specialize=True):
    assert (causal, sm_scale, warp_specialize) == (True, 0.25, False) and q.shape == (1, 2, 128, 16)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
"""


@pytest.fixture
def named(monkeypatch, tmp_path):
    """A function that names a file of such text."""
    tutorial.tutorial.cache_clear()

    def name(text):
        path = tmp_path / "06-fused-attention.py"
        path.write_text(text)
        monkeypatch.setenv(tutorial.VARIABLE, str(path))

    monkeypatch.delenv(tutorial.VARIABLE, raising=False)
    monkeypatch.setattr(peers, "peers", lambda preset: [peers.triton_tutorial()])
    yield name
    tutorial.tutorial.cache_clear()


def rows_of():
    """The rows of the preset here, with the CPU's kernel in the place of the GPU's."""
    preset = replace(presets.PRESETS["triton"], device="cpu", kernels=("cpu",))
    (found,) = run.measure(attention.suite_of(preset), cases=(CASE,), budget=0, min_rounds=1)
    return {row["candidate"]: row for row in found}


def test_it_is_measured_where_a_file_is_named(named):
    named(FILE)
    found = rows_of()
    theirs = found[tutorial.NAME]
    assert theirs["rel_l2"] < 1e-3 and theirs["kernel"] is None and theirs["us"]["n"] >= 1
    assert found["qflash cpu"]["speedup"][tutorial.NAME] > 0
    assert all(row["left_out"] == {} for row in found.values())


def test_rows_say_where_it_was_not_there(named):
    found = rows_of()
    assert list(found) == ["qflash cpu"]
    assert found["qflash cpu"]["left_out"] == {
        tutorial.NAME: "$QFLASH_TRITON_TUTORIAL names no file; it is python/tutorials/06-fused-attention.py of "
        "Triton's sources"
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nothing_of_this_name", "cannot be imported: ModuleNotFoundError: No module named"),
        ("X = 1", "has no function `attention`"),
        ("def attention(q, k, v): return q", "TypeError: attention() takes 3 positional arguments"),
        ("def attention(*all): raise Exception()", "Exception: "),
    ],
)
def test_a_file_that_is_another_is_told(named, text, reason):
    named(text)
    assert reason in rows_of()["qflash cpu"]["left_out"][tutorial.NAME]


def test_a_file_that_is_not_there_is_told(named, monkeypatch):
    monkeypatch.setenv(tutorial.VARIABLE, "nowhere.py")
    assert rows_of()["qflash cpu"]["left_out"] == {
        tutorial.NAME: "$QFLASH_TRITON_TUTORIAL is 'nowhere.py', where no file is"
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "bfloat16"}, "takes float16, not bfloat16"),
        ({"kv_heads": 1}, "as many keys as queries, of as many heads"),
        ({"q_len": 1}, "as many keys as queries"),
        ({"head_dim": 80}, "takes head_dim 16, 32"),
        ({"q_len": 100, "k_len": 100}, "multiples of 128 tokens"),
    ],
)
def test_what_it_does_not_take(changes, reason):
    assert reason in tutorial.why_not(replace(CASE, **changes))


def test_the_preset_has_baselines_of_every_sort(monkeypatch):
    """Compiled and eager, PyTorch's own, and the tutorial; none of those that take minutes where nobody names them."""
    names = [one.name for one in peers.peers(presets.PRESETS["triton"])]
    assert names == ["torch FA2", "torch naive", "torch.compile", tutorial.NAME]
    assert not {"torch.compile", tutorial.NAME} & {one.name for one in peers.peers(presets.PRESETS["cuda"])}
    asked = []
    monkeypatch.setattr(peers, "compiled", lambda function: asked.append(function) or function)
    arrays = peers.Arrays(replace(CASE, dtype="float32"), "cpu")
    assert torch.equal(peers.torch_compiled().make(arrays)(), peers.torch_naive().make(arrays)()) and len(asked) == 1
