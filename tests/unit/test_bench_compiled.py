"""bench.compiled: each problem has code that was compiled for its shapes."""

from __future__ import annotations

import pytest

from qflash.cli.bench import load

torch = pytest.importorskip("torch")

compiled = load("compiled")


def layer_of_a_problem():
    """A function like those that suites make: another one for each problem, of the same code."""
    return lambda x, weight: torch.nn.functional.gelu(x @ weight)


def test_functions_of_the_same_code_get_code_of_their_own(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, mode, dynamic: function)
    layers = [layer_of_a_problem() for _ in range(3)]
    assert len({id(layer.__code__) for layer in layers}) == 1
    kept = [compiled.compiled(layer) for layer in layers]
    assert len({id(one.__code__) for one in kept}) == 3
    x = torch.ones(3, 3)
    assert torch.equal(kept[0](x, x), layers[0](x, x))


@pytest.mark.slow
def test_every_problem_is_compiled_for_its_own_shapes(monkeypatch):
    graphs, compiler = [], torch.compile
    asked = []

    def backend(graph, inputs):
        graphs.append([x.shape for x in inputs])
        return graph.forward

    def with_this_backend(function, mode, dynamic):
        asked.append(mode)
        return compiler(function, backend=backend, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", with_this_backend)
    sizes = range(2, 12)  # more than the compiler allows one function
    for n in sizes:
        x, weight = torch.ones(2, n, n)
        layer = layer_of_a_problem()
        torch.testing.assert_close(compiled.compiled(layer)(x, weight), layer(x, weight))
    assert graphs == [[(n, n), (n, n)] for n in sizes]
    assert set(asked) == {compiled.MOST_EFFORT}


def test_another_mode_can_be_asked_for(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, mode, dynamic: (mode, dynamic))
    assert compiled.compiled(lambda: None, None) == (None, False)
