"""capture.py alone: where a step is captured, in whose memory, one thread after another, and what a failure leaves."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

pytest.importorskip("transformers")

import torch

from qflash.integrations.transformers.capture import Pool, captured

DEVICE = torch.device("cpu")


class Layer:
    """A step that has run: out = weight x + the number of the host."""

    def __init__(self, number=0.0):
        self.linear = torch.nn.Linear(4, 3, bias=False)
        self.x, self.out, self.number = torch.ones(2, 4), torch.zeros(2, 3), number
        self()

    @torch.no_grad()
    def __call__(self):
        self.out.copy_(self.linear(self.x) + self.number)


def replayed(graph, layer, x):
    layer.x.fill_(x)
    layer.out.zero_()
    graph.replay()
    return layer.out


def test_a_step_is_captured_on_its_device(graphs):
    """Not on the device that happens to be current, on which a capture would hold nothing."""
    layer = Layer()
    graph, reason = captured(layer, DEVICE, Pool())
    assert graph is not None and reason == ""
    assert graphs.log == [
        ("enter", DEVICE), ("enter", "the stream before"), ("leave", "the stream before"), ("leave", DEVICE),
    ]  # fmt: skip
    torch.testing.assert_close(replayed(graph, layer, 2.0), 2 * layer.linear.weight.sum(1).expand(2, 3))


def test_the_stand_in_holds_what_a_graph_holds(graphs):
    """Numbers of the host and places as they were; no memory of its own after it ran."""
    layer, kept = Layer(number=1.0), []
    graph, _ = captured(lambda: (layer(), kept.append(layer.x + 1)), DEVICE, Pool())
    want = layer.linear.weight.detach().sum(1) + 1
    layer.number, layer.linear.weight.data = 5.0, torch.zeros(3, 4)
    torch.testing.assert_close(replayed(graph, layer, 1.0), want.expand(2, 3))
    assert kept[0].isnan().all()


def test_a_failure_of_the_step(graphs):
    """The reason is the step's own error, and the stream is the one that was before."""

    def fails():
        raise ValueError("a value was read\nand more")

    pool = Pool()
    for _ in range(2):  # the lock is free again
        reason = "the step was not captured: ValueError: a value was read"
        assert captured(fails, DEVICE, pool) == (None, reason)
        assert graphs.log[-2:] == [("leave", "the stream before"), ("leave", DEVICE)]
    assert captured(Layer(), DEVICE, pool)[1] == ""


def test_a_capture_that_cuda_cuts_off(graphs):
    """The process goes on: memory is freed, random numbers are drawn, and other steps are captured."""
    layer, pool = Layer(), Pool()
    layer.number = torch.ones(())
    graph, reason = captured(lambda: layer.number.item() and layer(), DEVICE, pool)
    assert graph is None and reason.startswith("the step was not captured: RuntimeError: CUDA error: operation not p")
    assert graphs.draws
    assert captured(layer, DEVICE, pool)[1] == "" and captured(layer, DEVICE, Pool())[1] == ""


def test_memory_that_all_graphs_have_left_is_not_taken_up_again(graphs):
    layer, pool = Layer(), Pool()
    first, second = (captured(layer, DEVICE, pool)[0] for _ in range(2))
    shared = pool.handle
    del first
    assert pool.handle is shared
    del second
    assert pool.handle is not shared and captured(layer, DEVICE, pool)[1] == ""


def test_no_graph_is_destroyed_in_a_capture(graphs):
    """Not even one that somebody dropped and the collector finds."""
    layer, others = Layer(), [captured(Layer(), DEVICE, Pool())[0]]

    def step():
        circle = [others.pop()]
        circle.append(circle)
        del circle
        layer()
        assert len([[] for _ in range(2000)]) == 2000  # the collector runs now and then, as objects are made

    before = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        assert captured(step, DEVICE, Pool())[1] == ""
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled()


def test_threads_capture_one_after_another(graphs):
    both = Barrier(2)

    def run(_):
        layer = Layer()
        both.wait()
        return captured(layer, DEVICE, Pool())[1]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == ["", ""]
    assert [kind for kind, _ in graphs.log] == ["enter", "enter", "leave", "leave"] * 2


@pytest.mark.gpu
def test_a_real_capture_that_cuda_cuts_off():
    device = torch.device("cuda", torch.cuda.current_device())
    x, out, pool = torch.ones(4, 4, device=device), torch.zeros(4, 4, device=device), Pool()

    def step():
        out.copy_(x @ x)

    step()
    graph, reason = captured(lambda: (step(), x[0, 0].item()), device, pool)
    assert graph is None and "captur" in reason
    torch.cuda.empty_cache()
    assert torch.rand(3, device=device).isfinite().all()
    graphs = [captured(step, device, one)[0] for one in (pool, pool, Pool())]
    for graph in graphs:
        out.zero_()
        graph.replay()
        assert torch.equal(out, x @ x)
