"""Quantize the keys and values of a prompt once, then let many queries attend to them. For Hopper GPUs.

The result of `quantize_kv` gives the same bits as quantizing in the call, in half the memory ("int8_fp8"), and every
call after the first saves the pass over k and v. On another machine the script prints which kernel it would need.

python examples/torch_kept_prompt.py
"""

import torch

import qflash

PROMPT, TURNS, Q_HEADS, KV_HEADS, HEAD_DIM = 4096, 4, 16, 4, 128


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    k, v = torch.randn(2, 1, PROMPT, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    cos, sin = (torch.from_numpy(table).to(device) for table in qflash.rope_tables(PROMPT, HEAD_DIM))
    rope = qflash.Rope(cos, sin)
    try:
        kv = qflash.quantize_kv(k, v, precision="int8_fp8", rope=rope)
    except qflash.NoKernelError as error:
        print(error)
        return
    for _ in range(TURNS):
        q = torch.randn(1, 64, Q_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
        out = qflash.attention(q, kv, causal=True, rope=rope)
        assert torch.equal(out, qflash.attention(q, k, v, causal=True, rope=rope, precision="int8_fp8"))
    kept = sum(x.nbytes for x in (kv.k, kv.v, kv.k_scale, kv.v_exponents))
    print(f"{TURNS} calls on a prompt of {PROMPT} keys, kept in {kept / (k.nbytes + v.nbytes):.2f} of its memory")


if __name__ == "__main__":
    main()
