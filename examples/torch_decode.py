"""Generate token by token with a key/value cache: grouped queries, rotary embedding, sequences of different lengths.

The cache holds unrotated keys; attention rotates them as it loads them, so a key is written once and never modified.
Each step must equal the last row of attention over the whole sequence so far; the script checks this.

python examples/torch_decode.py
"""

import torch

import qflash

BATCH, STEPS, ROOM, Q_HEADS, KV_HEADS, HEAD_DIM = 3, 8, 64, 8, 2, 64


def main() -> None:
    torch.manual_seed(0)
    cos, sin = map(torch.from_numpy, qflash.rope_tables(ROOM, HEAD_DIM))
    rope = qflash.Rope(cos, sin)
    lengths = torch.tensor([5, 17, 32], dtype=torch.int32)  # the number of tokens that each sequence has seen so far
    keys, values = torch.randn(2, BATCH, ROOM, KV_HEADS, HEAD_DIM)

    worst = 0.0
    for _ in range(STEPS):
        q = torch.randn(BATCH, 1, Q_HEADS, HEAD_DIM)
        rows = torch.arange(BATCH)
        keys[rows, lengths.long()] = torch.randn(BATCH, KV_HEADS, HEAD_DIM)
        values[rows, lengths.long()] = torch.randn(BATCH, KV_HEADS, HEAD_DIM)
        lengths += 1
        out = qflash.attention(q, keys, values, causal=True, kv_lens=lengths, rope=rope)

        for b, length in enumerate(lengths.tolist()):
            whole = torch.randn(1, length, Q_HEADS, HEAD_DIM)
            whole[0, -1] = q[b, 0]
            seen = keys[b : b + 1, :length], values[b : b + 1, :length]
            expected = qflash.attention(whole, *seen, causal=True, rope=rope)[0, -1]
            worst = max(worst, (out[b, 0] - expected).abs().max().item())
    assert worst < 1e-5, worst
    print(
        f"{STEPS} steps of {BATCH} sequences, now {lengths.tolist()} long; worst difference to a full pass {worst:.1e}"
    )


if __name__ == "__main__":
    main()
