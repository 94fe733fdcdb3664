"""Train a small Llama-like model on the standard library's sources, byte by byte: RMSNorm, rope, GQA, SwiGLU.

python examples/train_llama.py --framework torch --attention qflash --curve qflash.jsonl
python examples/train_llama.py --framework torch --attention sdpa --curve sdpa.jsonl

"qflash" computes attention and cross entropy, forward and backward, with qflash; "sdpa" with the framework's own
functions. Weights and batches are the same, so the two losses are comparable. A loss curve is a file of JSON lines, one
per step; `python -m bench.curves qflash.jsonl sdpa.jsonl` draws several. The defaults are for a CPU, in float32;
--device cuda computes in bfloat16.
"""

import argparse
import importlib
import json
import time
from pathlib import Path

from llama.shape import Shape, first_weights
from llama.text import batches


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama-like model on the standard library's sources.")
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--attention", choices=("qflash", "sdpa"), default="qflash")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=3e-3, help="Adam's learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curve", type=Path, help="a file to write the loss of every step to")
    for name in ("layers", "heads", "kv_heads", "head_dim", "hidden", "length", "batch"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Shape, name))
    return parser.parse_args()


def main() -> None:
    given = arguments()
    sizes = ("layers", "heads", "kv_heads", "head_dim", "hidden", "length", "batch")
    shape = Shape(**{name: getattr(given, name) for name in sizes})
    model = importlib.import_module(f"llama.{given.framework}_model")
    weights = first_weights(shape, given.seed)
    tokens = batches(shape.batch, shape.length, given.steps, given.seed)
    start, rows = time.perf_counter(), []
    for step, loss in enumerate(model.train(weights, shape, given.attention, given.device, given.rate, tokens)):
        seconds = round(time.perf_counter() - start, 3)
        rows.append({"framework": given.framework, "attention": given.attention, "device": given.device})
        rows[-1] |= {"step": step, "loss": loss, "seconds": seconds}
        if step % 20 == 0 or step == given.steps - 1:
            print(f"step {step:5d}   loss {loss:.4f}   {seconds:7.1f} s")
    if given.curve is not None:
        given.curve.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
