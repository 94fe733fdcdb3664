"""Serve three sequences that share a prefix from one paged cache: prefill, questions of different lengths, decoding.

The prefix is computed and stored once; `fork` shares its pages, and each sequence needs memory only for its own tokens.
Every result must equal plain attention over the whole sequence; the script checks this. It runs in PyTorch, on a GPU if
there is one, or in NumPy.

python examples/serve_three_sequences.py
"""

import numpy as np

import qflash

try:
    import torch
except ImportError:
    torch = None

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 2, 8, 2, 64, 32
PREFIX, QUESTIONS, STEPS = 300, (12, 40, 7), 8
LONGEST = PREFIX + max(QUESTIONS) + STEPS

on_gpu = torch is not None and torch.cuda.is_available()
dtype = torch.bfloat16 if on_gpu else torch.float32 if torch is not None else np.float32
bound = 2e-2 if on_gpu else 1e-5


def as_array(x):
    """Convert NumPy's x to the framework and the dtype of the cache."""
    return x if torch is None else torch.from_numpy(x).to("cuda" if on_gpu else "cpu", dtype)


def as_numpy(x):
    return x if torch is None else x.float().cpu().numpy()


class Model:
    """Stands in for a model: random queries, keys and values of each layer, and plain attention to check against."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        tables = qflash.rope_tables(LONGEST, HEAD_DIM)
        self.rope = qflash.Rope(*(x if torch is None else torch.from_numpy(x).to("cuda" if on_gpu else "cpu")
                                  for x in tables))  # fmt: skip
        self.seen: dict[int, list[tuple]] = {}  # for each sequence: its keys and values, one part per step
        self.worst = 0.0

    def new_tokens(self, shape: tuple[int, ...]):
        """q, k and v of a layer."""
        heads = (Q_HEADS, KV_HEADS, KV_HEADS)
        return [as_array(self.random.standard_normal((*shape, h, HEAD_DIM), np.float32)) for h in heads]

    def check(self, sequence: int, layer: int, q, k, v, out) -> None:
        """Compare the result of a sequence's new tokens, `[T, H, D]`, with attention over all of its tokens so far."""
        pieces = self.seen.setdefault(sequence, [])
        pieces.append((layer, k, v))
        join = np.concatenate if torch is None else torch.cat
        k, v = (join([piece[i] for piece in pieces if piece[0] == layer])[None] for i in (1, 2))
        expected = qflash.attention(q[None], k, v, causal=True, rope=self.rope)[0]
        self.worst = max(self.worst, float(np.abs(as_numpy(out) - as_numpy(expected)).max()))


def main() -> None:
    model = Model()
    device = "cuda" if on_gpu else None
    cache = qflash.KVCache(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, pages=64, page_size=PAGE,
                           dtype=dtype, device=device)  # fmt: skip

    # The prefix, once.
    first = cache.open()
    step = cache.extend([first], PREFIX)
    for layer in range(LAYERS):
        q, k, v = model.new_tokens((1, PREFIX))
        kv = step.write(layer, k, v, rope=model.rope)
        out = qflash.attention(q, kv, causal=True, rope=model.rope)
        model.check(first, layer, q[0], k[0], v[0], out[0])

    # Three questions after it. They have different lengths, so tokens are packed, with the sequences concatenated.
    sequences = [first, cache.fork(first), cache.fork(first)]
    for sequence in sequences[1:]:
        model.seen[sequence] = list(model.seen[first])
    step = cache.extend(sequences, QUESTIONS)
    ends = np.cumsum(QUESTIONS)
    for layer in range(LAYERS):
        q, k, v = model.new_tokens((sum(QUESTIONS),))
        kv = step.write(layer, k, v, rope=model.rope)
        out = qflash.attention_varlen(
            q, kv, None, step.cu_seqlens, None, step.max_new, None, causal=True, rope=model.rope
        )
        for sequence, end, count in zip(sequences, ends, QUESTIONS, strict=True):
            own = slice(end - count, end)
            model.check(sequence, layer, q[own], k[own], v[own], out[own])

    # One token of each at a time. The step and its tables are made once, with space for all later tokens; on a GPU they
    # could be part of a CUDA graph.
    step = cache.extend(sequences, 1, columns=-(-LONGEST // PAGE))
    for at in range(STEPS):
        if at > 0:
            cache.extend(sequences, 1, into=step)
        for layer in range(LAYERS):
            q, k, v = model.new_tokens((len(sequences), 1))
            kv = step.write(layer, k, v, rope=model.rope)
            out = qflash.attention(q, kv, causal=True, rope=model.rope)
            for row, sequence in enumerate(sequences):
                model.check(sequence, layer, q[row], k[row], v[row], out[row])

    assert model.worst < bound, model.worst
    used = cache.pages - cache.free_pages
    alone = sum(len(cache.pages_of(sequence)) for sequence in sequences)
    lengths = [cache.length(sequence) for sequence in sequences]
    print(
        f"{len(sequences)} sequences of {lengths} tokens in {used} pages, {alone} if nothing were shared; "
        f"worst difference to plain attention {model.worst:.1e}"
    )
    for sequence in sequences:
        cache.close(sequence)
    assert cache.free_pages == cache.pages


if __name__ == "__main__":
    main()
