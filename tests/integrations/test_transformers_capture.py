"""capture.py alone: where a step is captured, one thread after another, and what a failure leaves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import pytest

pytest.importorskip("transformers")

import torch

from qflash.integrations.transformers import capture
from qflash.testing.torch_steps import stand_ins_for_capture

SECOND = torch.device("cuda:1")


@pytest.fixture
def log(monkeypatch):
    """What happens, in its order, with stand-ins for torch.cuda. The end of a capture that failed is an error."""
    found = []

    @contextmanager
    def graph(graph, **words):
        found.append(("begin", words))
        try:
            yield
        except Exception:
            raise RuntimeError("operation failed due to a previous error during capture") from None
        finally:
            found.append(("end", words))

    class Graph:
        def register_generator_state(self, generator):
            found.append(("draws from", generator))

    monkeypatch.setattr(capture, "_streams", {})
    for name, value in (stand_ins_for_capture(found) | {"graph": graph, "CUDAGraph": Graph}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def test_a_step_is_captured_on_its_device(log):
    """Not on the device that happens to be current, on which a capture would hold nothing."""
    graph, reason = capture.captured(lambda: log.append(("step", None)), SECOND, "a generator", "a pool")
    words = {"stream": "a stream of cuda:1", "capture_error_mode": "thread_local", "pool": "a pool"}
    assert graph is not None and reason == ""
    assert log == [
        ("enter", SECOND), ("draws from", "a generator"), ("enter", "the stream before"),
        ("begin", words), ("step", None), ("end", words),
        ("leave", "the stream before"), ("leave", SECOND),
    ]  # fmt: skip


def test_a_failure_leaves_the_stream_that_was_before(log):
    """The reason is the step's own error, not that of the capture's end."""

    def fails():
        raise ValueError("a value was read\nand more")

    for _ in range(2):  # the lock is free again
        assert capture.captured(fails, SECOND) == (None, "the step was not captured: ValueError: a value was read")
        assert log[-2:] == [("leave", "the stream before"), ("leave", SECOND)]


def test_threads_capture_one_after_another(log):
    both = Barrier(2)

    def run(name):
        both.wait()
        return capture.captured(lambda: log.append(("step", name)), SECOND)[1]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, "ab")) == ["", ""]
    kinds = [kind for kind, _ in log]
    assert kinds == ["enter", "enter", "begin", "step", "end", "leave", "leave"] * 2
