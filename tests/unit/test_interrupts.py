"""Ctrl-C in the middle of a long call on the CPU: it comes soon, and leaves an engine that works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals"),
]

# 50 ms is how often the engine asks, a few more what a task takes; the rest is for a machine that is busy.
SOON = 2.0

_START = """
import os, signal, sys, threading, time
import numpy as np
import qflash
from qflash import reference

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with the signal ignored
qflash.set_num_threads(int(sys.argv[1]))
rng = np.random.default_rng(0)
small = rng.standard_normal((1, 300, 2, 16), np.float32)  # several tasks, K and V packed
right = qflash.attention(small, small, small)
assert np.allclose(right, reference.attention(small, small, small)[0], atol=1e-5)

def works():
    return all(qflash.attention(small, small, small).tobytes() == right.tobytes() for _ in range(20))

def send(after=0.2):
    global sent
    time.sleep(after)
    sent = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)

def interrupted(call):
    "How long after Ctrl-C the call ended."
    threading.Thread(target=send, daemon=True).start()
    try:
        call()
    except KeyboardInterrupt:
        return time.monotonic() - sent
    raise AssertionError("the call was over before it was interrupted, or never noticed")
"""

# One call each, that takes tens of seconds on two threads if nobody stops it.
_LONG = {
    "attention": "x = np.ones((1, 1 << 16, 4, 256), np.float32); call = lambda: qflash.attention(x, x, x)",
    "int8": "x = np.ones((1, 1 << 16, 4, 256), 'f'); call = lambda: qflash.attention(x, x, x, precision='int8')",
    "int8_matmul": "x = np.ones((1 << 14, 1 << 14), np.int8); call = lambda: qflash.int8_matmul(x, x)",
    "linear": """
x, w = (np.broadcast_to(np.ones(shape[1], np.float32), shape) for shape in ((1 << 15, 1 << 16), (1 << 16, 1 << 12)))
call = lambda: qflash.linear(x, w)
""",
    "backward": """
from qflash.call.prepare import prepare
from qflash.ops.attention import plan_of_backward
from qflash.testing import Case, runner
case = Case(q_len=1 << 15, k_len=1 << 15, q_heads=4, kv_heads=2, head_dim=128)
x = case.make_inputs()
lse, gradients = np.full((1, 4, 1 << 15), 20, np.float32), [np.empty_like(a) for a in (x.q, x.k, x.v)]
arrays = runner.arrays_of(x) | {"out": x.q, "lse": lse, "dout": x.q}
prepared = prepare(plan_of_backward(runner.problem_of(case, x, "cpu", "cpu"), arrays, False))
call = lambda: runner.launch(prepared, arrays, gradients)
""",
}
_IN_TORCH = """
import torch
torch.set_num_threads(1)
x = torch.ones(1, 1 << 16, 4, 256)
qflash.attention(*[x[:, :9]] * 3)  # else the interrupt would come into the import of the front end
call = lambda: qflash.attention(x, x, x)
"""
# One that takes most of a second, several times what it takes to send a signal, and what it gives.
_MIDDLING = """
y = rng.standard_normal((1, 10000, 4, 128), np.float32)
def middling():
    return qflash.attention(y, y, y, causal=True)
"""


def run(code: str, threads: int = 2) -> str:
    command = [sys.executable, "-c", _START + code, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


_EACH = "for threads in (1, 2): qflash.set_num_threads(threads); print(interrupted(call)); assert works()"


@pytest.mark.parametrize("name", _LONG)
def test_comes_soon_and_leaves_the_engine_whole(name: str) -> None:
    assert all(float(line) < SOON for line in run(f"{_LONG[name]}\n{_EACH}", threads=1).split())


def test_comes_soon_in_pytorch_and_its_autograd() -> None:
    pytest.importorskip("torch")
    code = f"""
{_IN_TORCH}
{_EACH}
qflash.set_num_threads(1)
x = torch.ones(1, 1 << 12, 8, 128, requires_grad=True)
loss = qflash.attention(x, x, x).sum()
print(interrupted(loss.backward)); assert works()
"""
    times = [float(line) for line in run(code, threads=1).split()]
    assert len(times) == 3 and all(time < SOON for time in times)


def test_comes_soon_among_busy_python_threads() -> None:
    busy = "for _ in range(2): threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()"
    assert float(run(f"{_LONG['attention']}\n{busy}\nprint(interrupted(call)); assert works(); os._exit(0)")) < SOON


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_comes_soon_in_a_forked_child() -> None:
    """Forked from the main thread, and from another, which is the child's main thread then."""
    child = "print(interrupted(call), flush=True); assert works(); os._exit(0)"
    code = f"""
{_LONG["attention"]}
def fork():
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        return
    try:
        {child}
    finally:
        os._exit(1)
fork()
other = threading.Thread(target=lambda: (works(), fork()))
other.start(); other.join()
assert works()
"""
    assert all(float(line) < SOON for line in run(code).split())


@pytest.mark.parametrize("threads", [1, 2])
def test_handlers_run_meanwhile_and_may_call_the_engine(threads: int) -> None:
    """A handler that raises nothing changes nothing, though it uses the scratch of the thread that it interrupts."""
    code = f"""
{_MIDDLING}
want, seen, inside = middling(), [], False
def handle(*_):
    if inside: seen.append(works())
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.07, 0.07)
inside = True
got = middling()
inside = False
signal.setitimer(signal.ITIMER_REAL, 0)
assert len(seen) > 2 and all(seen), seen
assert got.tobytes() == want.tobytes()
"""
    run(code, threads)


def test_calls_of_other_threads_go_on() -> None:
    """Python's main thread takes signals; what another one computes is not its business."""
    code = f"""
{_MIDDLING}
want, got, done = middling(), [], threading.Event()
threading.Thread(target=lambda: (got.append(middling()), done.set())).start()
print(interrupted(done.wait))
done.wait()
assert got[0].tobytes() == want.tobytes() and works()
"""
    assert float(run(code)) < SOON
