"""Train on one sequence whose tokens are distributed over processes: every rank has a part, attention sees all tokens.

The task is recall: every position must return the value `SHIFT` positions before it, even if that token is on another
rank. Each rank computes the loss of its own tokens; the gradients of the parameters are summed over the ranks, as for
any model. At the end every strategy is compared with attention on one process.

torchrun --nproc-per-node 4 examples/context_parallel.py
"""

import os

import torch
import torch.distributed as dist

import qflash
from qflash.parallel import torch as parallel

BATCH, LENGTH, HEADS, HEAD_DIM, SHIFT, STEPS = 2, 64, 4, 32, 3, 60


def start() -> torch.device:
    """The default group: that of torchrun, or a group of this process alone."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device("cuda" if on_gpu else "cpu")


def train(device: torch.device) -> tuple[float, float]:
    """The loss of all tokens, before and after."""
    torch.manual_seed(0)  # the same parameters and batches on every rank
    parameters = [torch.randn(HEADS, HEAD_DIM, device=device, requires_grad=True) for _ in "qk"]
    tables = qflash.rope_tables(LENGTH, HEAD_DIM, base=100.0)
    rope = qflash.Rope(*(torch.from_numpy(x).to(device) for x in tables))
    # The tokens of this rank: two chunks, so that a causal mask leaves every rank the same work.
    own = parallel.positions(LENGTH, causal=True, device=device).long()
    counted = (own >= SHIFT).nonzero()[:, 0]
    losses = []
    for _ in range(STEPS):
        values = torch.randn(BATCH, LENGTH, HEADS, HEAD_DIM).to(device)
        targets = values[:, own[counted] - SHIFT]
        v = parallel.shard(values, causal=True)
        q, k = (x.expand(BATCH, len(own), HEADS, HEAD_DIM) for x in parameters)
        out = parallel.attention(q, k, v, causal=True, strategy="ring", rope=rope)
        loss = ((out[:, counted] - targets) ** 2).sum() / (BATCH * (LENGTH - SHIFT) * HEADS * HEAD_DIM)
        loss.backward()
        dist.all_reduce(loss.detach())
        losses.append(loss.item())
        with torch.no_grad():
            for x in parameters:
                dist.all_reduce(x.grad)
                x -= 30.0 * x.grad
                x.grad = None
    return losses[0], losses[-1]


def compare(device: torch.device) -> dict[str, float]:
    """The difference of each strategy's unsharded result from attention on one process."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(BATCH, LENGTH, heads, HEAD_DIM).to(device) for heads in (HEADS, HEADS // 2, HEADS // 2))
    expected = qflash.attention(q, k, v, causal=True)
    parts = [parallel.shard(x, causal=True) for x in (q, k, v)]
    worst = {}
    for strategy in ("ring", "all_gather", "ulysses"):
        out = parallel.attention(*parts, causal=True, strategy=strategy)
        worst[strategy] = float((parallel.unshard(out, causal=True) - expected).abs().max())
    return worst


def main() -> None:
    device = start()
    first, last = train(device)
    worst = compare(device)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"{ranks} ranks, {LENGTH} tokens: loss {first:.3f} at the start, {last:.3f} after {STEPS} steps")
        print("worst difference to one process:", ", ".join(f"{name} {x:.1e}" for name, x in worst.items()))
    assert last < 0.5 * first and max(worst.values()) < 1e-5
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
