"""Small problems that between them take every path of every CUDA kernel, to be run under compute-sanitizer.

compute-sanitizer --tool memcheck python -m qflash.testing.sanitize
"""

from __future__ import annotations

from qflash import api, dispatch
from qflash.testing.cases import BY_NAME
from qflash.testing.runner import run_case

# One of each kind: masks, lengths, layouts, head dims on either side of a bucket, dtypes, non-finite values.
NAMES = (
    "gqa_8_2", "window_both", "padding", "packed", "rope_half", "rope_partial_interleaved", "dim_3", "dim_100",
    "dim_136", "dim_255", "layout_gaps_half", "nan_v", "softcap", "float16_rope", "bfloat16_odd_dim",
    "decode_four_rows",
)  # fmt: skip


def main() -> None:
    """Run every case on every CUDA kernel of native precision, then what no case holds: long rows and bad lengths."""
    import torch

    kernels = [row.name for row in dispatch.kernels_of("attention", "cuda") if row.precision == "native"]
    for kernel in kernels:
        for name in NAMES:
            run_case(BY_NAME[name], kernel, "native-cuda")
        q = torch.randn(1, 70, 1, 64, device="cuda")
        k = torch.randn(1, 2500, 1, 64, device="cuda")
        api.attention(q, k, k, kernel=kernel)
        too_long = torch.tensor([999], dtype=torch.int32, device="cuda")
        out = api.attention(q, q, q, kv_lens=too_long, kernel=kernel)
        torch.cuda.synchronize()
        if not out.isnan().all():
            raise SystemExit(f"{kernel}: a length past the keys must give NaN, and did not")
    print(f"ran {len(NAMES) + 2} problems on {', '.join(kernels)}")


if __name__ == "__main__":
    main()
