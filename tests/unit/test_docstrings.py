"""Every public name has a docstring with an example, and the examples are true. They run on the CPU."""

from __future__ import annotations

import doctest
import inspect

import pytest

import qflash

# Examples of PyTorch's own function need PyTorch; all others are NumPy's.
NEED_TORCH = {"replace_sdpa", "scaled_dot_product_attention"}


def example_of(name: str) -> doctest.DocTest:
    text = inspect.getdoc(getattr(qflash, name))
    return doctest.DocTestParser().get_doctest(text or "", {}, f"qflash.{name}", None, None)


@pytest.mark.parametrize("name", qflash.__all__)
def test_the_example_is_true(name):
    if name in NEED_TORCH:
        pytest.importorskip("torch")
    example = example_of(name)
    assert example.examples, f"qflash.{name} has no example in its docstring"
    said: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=said.append)
    assert results.attempted and not results.failed, "".join(said)


@pytest.mark.parametrize("name", ["attention", "attention_varlen"])
def test_arguments_are_described(name):
    """Each has its line in Args; what attention_varlen shares with attention is described there."""
    function = getattr(qflash, name)
    shared = set() if name == "attention" else set(inspect.signature(qflash.attention).parameters) - {"q", "k", "v"}
    described = inspect.getdoc(function).partition("Args:\n")[2].partition("\n\n")[0]
    for parameter in set(inspect.signature(function).parameters) - shared:
        assert f"    {parameter}: " in described, f"{name} does not describe {parameter}"


def test_attention_says_what_comes_back_and_what_is_raised():
    text = inspect.getdoc(qflash.attention)
    assert all(f"\n{section}:\n" in text for section in ("Args", "Returns", "Raises", "Example"))
