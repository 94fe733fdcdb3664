"""What one call costs before any arithmetic: tiny tensors, eager, beside torch's own attention.

Prints one JSON row per way of calling: the best time of many interleaved rounds, in microseconds, and its ratio to
F.scaled_dot_product_attention in the same process. `engine` is the compiled call alone, which every qflash row
includes.

    python bench/overhead.py [--rounds 150] [--calls 200]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import qflash
from qflash import planning
from qflash.frontends import torch as frontend
from qflash.problem import Options


def cases() -> dict[str, Callable[[], object]]:
    """The ways of calling, by name."""
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    theirs = [x.transpose(1, 2) for x in (q, k, v)]
    grads = [x.clone().requires_grad_() for x in (q, k, v)]
    their_grads = [x.clone().requires_grad_() for x in theirs]
    lens = torch.tensor([4], dtype=torch.int32)
    rope = qflash.Rope(*(torch.from_numpy(table) for table in qflash.rope_tables(4, 8)))
    arrays = [x.numpy() for x in (q, k, v)]
    call = planning.prepare(frontend.problem_of(q, k, v, Options())).call
    out = torch.empty_like(q)
    addresses = [x.data_ptr() for x in (q, k, v, out)] + [0] * 10 + [1]
    return {
        "sdpa": lambda: F.scaled_dot_product_attention(*theirs),
        "engine": lambda: call(*addresses),
        "qflash": lambda: qflash.attention(q, k, v),
        "qflash causal": lambda: qflash.attention(q, k, v, causal=True),
        "qflash lse": lambda: qflash.attention(q, k, v, return_lse=True),
        "qflash scale": lambda: qflash.attention(q, k, v, causal=True, scale=0.5),
        "qflash kv_lens": lambda: qflash.attention(q, k, v, kv_lens=lens),
        "qflash rope": lambda: qflash.attention(q, k, v, rope=rope),
        "qflash numpy": lambda: qflash.attention(*arrays),
        "sdpa grad": lambda: F.scaled_dot_product_attention(*their_grads),
        "qflash grad": lambda: qflash.attention(*grads),
        "sdpa grad+backward": lambda: F.scaled_dot_product_attention(*their_grads).backward(theirs[0]),
        "qflash grad+backward": lambda: qflash.attention(*grads).backward(q),
    }


def measure(rounds: int, calls: int) -> list[dict[str, object]]:
    """Best microseconds per call of each case; the cases take turns, so that noise meets them alike."""
    table = cases()
    best = dict.fromkeys(table, float("inf"))
    for _ in range(rounds):
        for name, function in table.items():
            start = time.perf_counter_ns()
            for _ in range(calls):
                function()
            best[name] = min(best[name], (time.perf_counter_ns() - start) / calls / 1e3)
    rows = []
    for name, us in best.items():
        peer = "sdpa" + name.partition("grad")[1] + name.partition("grad")[2]
        peer = peer.replace("sdpagrad", "sdpa grad")
        rows.append({"bench": "overhead", "case": name, "us": round(us, 2), "ratio_to_sdpa": round(us / best[peer], 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads; 1 keeps thread wake-ups out of the figures"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for row in measure(arguments.rounds, arguments.calls):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
