"""Serve a small Llama in plain JAX: prompts of different lengths, then greedy text, with keys and values in pages.

The weights are the repository's checkpoint, a byte-level model of the standard library's sources. Both programs,
prefill and decode step, take the pages as donated arguments, so that `qflash.paged_write` stores new tokens in them and
nothing is copied. The step is compiled once and serves every token. A model without a cache, which computes all of the
text at once, must also predict each of its bytes as the most likely one; the script checks this.

python examples/jax_serve_llama.py
python examples/jax_serve_llama.py --prompt "class Queue:" --prompt "import os" --new-tokens 60
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from llama import checkpoint
from llama.jax_model import Weights, forward, qflash_attention
from llama.shape import Shape

import qflash

SMALL = Path(__file__).resolve().parent / "llama" / "stdlib-small"
PROMPTS = ("def __init__(self, ", "    def close(self):\n        ", "import ")
PAGE = 16  # tokens
# No GPU kernel reads pages of float32.
DTYPE = jnp.float32 if jax.default_backend() == "cpu" else jnp.float16
# How far a byte's logit may be below the best one, where both are about equally likely and rounding decides.
NEAR = 1e-3 if DTYPE is jnp.float32 else 0.2

Pools = list[tuple[jax.Array, jax.Array]]  # for each layer: the pages of keys and those of values


class Server:
    """Sequences of a batch in one pool of pages, each with a row of the page table."""

    def __init__(self, weights: Weights, shape: Shape) -> None:
        self.weights = in_dtype(weights)
        rope = qflash.Rope(*map(jnp.asarray, qflash.rope_tables(shape.length, shape.head_dim)))

        @partial(jax.jit, donate_argnames="pools", static_argnames="longest")
        def prefill(weights, pools, page_table, lens, tokens, starts, longest):
            """The first new token of every sequence, after prompts concatenated in tokens [1, total]."""

            def attend(q, kv):
                return qflash.attention_varlen(
                    q[0], kv, None, starts, None, longest, None, causal=True, rope=rope
                )[None]  # fmt: skip

            def write(kv, k, v):
                return qflash.paged_write(kv, k[0], v[0], rope=rope, cu_seqlens=starts)

            logits, pools = paged(weights, tokens, shape, pools, page_table, lens, write, attend)
            return logits[0, starts[1:] - 1].argmax(-1).astype(jnp.int32), pools

        @partial(jax.jit, donate_argnames="pools")
        def decode(weights, pools, page_table, lens, tokens):
            """The next token of every sequence after tokens [B], which lens already include."""
            logits, pools = paged(
                weights,
                tokens[:, None],
                shape,
                pools,
                page_table,
                lens,
                partial(qflash.paged_write, rope=rope),
                lambda q, kv: qflash.attention(q, kv, causal=True, rope=rope),
            )
            return logits[:, -1].argmax(-1).astype(jnp.int32), pools

        self.shape, self.prefill, self.decode = shape, prefill, decode

    def generate(self, prompts: list[bytes], new_tokens: int) -> list[bytes]:
        """The model's text after each prompt."""
        counts = np.array([len(prompt) for prompt in prompts], np.int32)
        longest = int(counts.max()) + new_tokens
        if not counts.all() or longest > self.shape.length:
            allowed = f"allowed: prompts with a byte, up to {self.shape.length} with what is to come"
            raise ValueError(f"prompts have {counts.tolist()} bytes and new_tokens is {new_tokens}; {allowed}")
        columns = -(-longest // PAGE)
        page_table = jnp.arange(len(prompts) * columns, dtype=jnp.int32).reshape(-1, columns)
        starts = jnp.asarray(np.concatenate([[0], counts.cumsum()]), jnp.int32)
        tokens, lens = jnp.asarray(np.frombuffer(b"".join(prompts), np.uint8), jnp.int32)[None], jnp.asarray(counts)
        pools = self.empty_pages(page_table.size)
        token, pools = self.prefill(self.weights, pools, page_table, lens, tokens, starts, int(counts.max()))
        found = [token]
        for _ in range(new_tokens - 1):
            lens = lens + 1
            token, pools = self.decode(self.weights, pools, page_table, lens, token)
            found.append(token)  # the loop does not wait for it: JAX computes asynchronously
        return [bytes(row) for row in np.stack(found, 1).astype(np.uint8)]

    def empty_pages(self, count: int) -> Pools:
        size = (count, self.shape.kv_heads, PAGE, self.shape.head_dim)
        return [(jnp.zeros(size, DTYPE), jnp.zeros(size, DTYPE)) for _ in range(self.shape.layers)]


def in_dtype(weights: Weights) -> Weights:
    return jax.tree.map(lambda x: jnp.asarray(x, DTYPE), weights)


def paged(weights, tokens, shape, pools, page_table, lens, write, attend) -> tuple[jax.Array, Pools]:
    """The model's forward pass; attention writes new tokens to the pages of its layer and reads them from there."""
    written: Pools = []

    def attend_in_pages(q, k, v):
        kv = write(qflash.PagedKV(*pools[len(written)], page_table, lens), k, v)
        written.append((kv.k_pages, kv.v_pages))  # in the order of layers
        return attend(q, kv)

    logits = forward(weights, tokens, shape, attend_in_pages)
    return logits, written


def shortfall(weights: Weights, shape: Shape, prompt: bytes, text: bytes) -> float:
    """The largest difference of a byte's logit from the best one, in one pass over the whole text."""
    tables = [jnp.asarray(x) for x in qflash.rope_tables(shape.length, shape.head_dim)]
    tokens = jnp.asarray(np.frombuffer(prompt + text, np.uint8), jnp.int32)
    logits = forward(in_dtype(weights), tokens[None], shape, lambda q, k, v: qflash_attention(q, k, v, *tables))
    logits = logits[0, len(prompt) - 1 : -1].astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[len(prompt) :, None], -1)[:, 0]
    return float((logits.max(-1) - chosen).max())


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a small Llama in plain JAX, with keys and values in pages.")
    parser.add_argument("--checkpoint", type=Path, default=SMALL, help="a folder of examples/train_stdlib_model.py")
    parser.add_argument("--prompt", action="append", help="may come several times")
    parser.add_argument("--new-tokens", type=int, default=40)
    given = parser.parse_args()
    shape, weights = checkpoint.load(given.checkpoint)
    prompts = [text.encode() for text in given.prompt or PROMPTS]
    server = Server(weights, shape)
    for prompt, text in zip(prompts, server.generate(prompts, given.new_tokens), strict=True):
        assert shortfall(weights, shape, prompt, text) < NEAR, (prompt, text)
        print(f"--- {prompt.decode()}|{text.decode(errors='replace')}")
    assert server.decode._cache_size() == (given.new_tokens > 1)  # compiled once
    print(f"{len(prompts)} sequences of {given.new_tokens} new tokens, as without a cache")


if __name__ == "__main__":
    main()
