"""Small problems that together take every path of every CUDA kernel, for runs under compute-sanitizer.

compute-sanitizer --tool memcheck python -m qflash.testing.sanitize             (everything)
compute-sanitizer --tool memcheck python -m qflash.testing.sanitize sm90_fwd    (only these attention kernels)

Arrays are made and checked on the host: initcheck watches only qflash's kernels, and would consider memory written by
PyTorch uninitialized.
"""

from __future__ import annotations

import sys
from itertools import product

import numpy as np

from qflash import api, dispatch
from qflash.call.spec import ACTIVATIONS, MOST_DECODE_ROWS, Spec
from qflash.ops.kv import quantize_kv
from qflash.ops.kv_write import paged_write
from qflash.ops.matmul import int8_matmul
from qflash.ops.paged import PagedKV
from qflash.rotary import Rope, rope_tables
from qflash.testing import cuda_gemm, cuda_linear, page_writes
from qflash.testing.cases import BY_NAME
from qflash.testing.gemm_case import GemmCase
from qflash.testing.linear_calls import spec_of
from qflash.testing.linear_problems import LinearProblem, check_near, gradients, linear, operands, upstream
from qflash.testing.op_cases import CASES, OpCase
from qflash.testing.runner import arch_of, named_kernel, refusals, run_backward, run_case, suited, to_torch

# One of each kind: masks, lengths, layouts, head dims on either side of a bucket, dtypes, nonfinite values.
NAMES = (
    "gqa_8_2", "window_both", "padding", "packed", "rope_half", "rope_partial_interleaved", "dim_3", "dim_100",
    "dim_136", "dim_255", "layout_gaps_half", "nan_v", "softcap", "float16_rope", "bfloat16_odd_dim",
    "decode_four_rows", "rising_causal",
)  # fmt: skip


def main(only: list[str]) -> None:
    """Run every case on every CUDA attention kernel, long rows and bad lengths, which no case has, and operations."""
    import torch

    arch = arch_of("cuda")
    rows = [row for row in dispatch.variants_of("attention", "cuda") if not dispatch.arch_reasons(row.kernel, arch)]
    backward = dispatch.variants_of("attention_backward", "cuda")
    backward = tuple(row for row in backward if not dispatch.arch_reasons(row.kernel, arch))
    if unknown := set(only) - {row.name for row in (*rows, *backward)}:
        raise SystemExit(f"no attention kernel of this GPU: {', '.join(sorted(unknown))}")
    rows = [row for row in rows if not only or row.name in only]
    for row in rows:
        for case in (suited(BY_NAME[name], row.name, arch) for name in NAMES):
            if not refusals(case, row.name, arch):
                run_case(case, row.name, "native-cuda")
        kernel, precision = named_kernel(row.name)
        dtype = getattr(torch, row.dtypes[0])
        lengths = (MOST_DECODE_ROWS if row.kernel.few_rows else 70, 2500)
        q, k = (torch.randn(1, tokens, 1, 64, dtype=dtype).cuda() for tokens in lengths)
        api.attention(q, k, k, kernel=kernel, precision=precision)
        too_long = torch.tensor([999], dtype=torch.int32, device="cuda")
        out = api.attention(q, q, q, kv_lens=too_long, kernel=kernel, precision=precision)
        if not out.cpu().isnan().all():
            raise SystemExit(f"{kernel}: a length past the keys must give NaN, and did not")
    print(f"ran {len(NAMES) + 2} problems, or those of them that it serves, on {', '.join(row.name for row in rows)}")
    for row in (row for row in backward if not only or row.name in only):
        for case in (suited(BY_NAME[name], row.name, arch) for name in NAMES):
            run_backward(case, row.name, "native-cuda")
        print(f"ran the gradients of {len(NAMES)} problems on {row.name}")
    _pages(arch, only)
    _kept_keys(arch, only)
    if only:
        return
    _hopper_layers(arch)
    _page_writes()
    for row in dispatch.kernels_of("linear", "cuda"):
        if "int8" in row.precisions and not dispatch.arch_reasons(row, arch):
            print(f"ran {_products(row.name)} products on {row.name}")
    _linear_layers(arch)
    _operations()


def _pages(arch: int, only: list[str]) -> None:
    """Run the same cases on pages, and a page table with an entry out of range."""
    import torch

    for row in (row for kv in ("pages", "pages_int8") for row in dispatch.variants_of("attention", "cuda", kv)):
        if dispatch.arch_reasons(row.kernel, arch) or (only and row.kernel.name not in only):
            continue
        for case in (suited(BY_NAME[name], row.name, arch) for name in NAMES):
            if not refusals(case, row.name, arch):
                run_case(case, row.name, "torch-cuda")
        int8 = row.kv == "pages_int8"
        pool = torch.ones(3, 1, 16, 64, dtype=torch.int8 if int8 else getattr(torch, row.dtypes[0])).cuda()
        scales = {name: torch.ones(3, 1, 16).cuda() for name in ("k_scale", "v_scale")} if int8 else {}
        table = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32).cuda()
        kv = PagedKV(pool, pool, table, torch.tensor([17, 32], dtype=torch.int32).cuda(), **scales)
        q = torch.ones(2, 1, 2, 64, dtype=getattr(torch, row.dtypes[0])).cuda()
        lost = api.attention(q, kv, kernel=row.kernel.name).cpu().isnan()
        if not lost[0].all() or lost[1].any():
            raise SystemExit(f"{row.name}: an entry outside the pool must give NaN, and nothing else may")
        print(f"ran {len(NAMES) + 1} problems, or those of them that it serves, on {row.name}")


def _kept_keys(arch: int, only: list[str]) -> None:
    """Run quantize_kv, and attention on its result: every bucket, rope, lengths, random rounding, a NaN in k and v."""
    import torch

    kept = dispatch.variants_of("attention", "cuda", "kept")
    for row in (row for row in kept if not dispatch.arch_reasons(row.kernel, arch)):
        if only and row.name.removesuffix("_kv") not in only:
            continue
        for length, head_dim in ((300, 64), (130, 128), (77, 200), (1, 8)):
            q, k, v = (torch.randn(2, length, 2, head_dim, dtype=getattr(torch, row.dtypes[0])) for _ in range(3))
            k[0, 0, 0, 0] = v[1, 0, 1, 0] = torch.nan
            q = q[:, -MOST_DECODE_ROWS:] if row.kernel.few_rows else q
            lens = torch.tensor([length, length // 2], dtype=torch.int32).cuda()
            rope = Rope(*(torch.from_numpy(table).cuda() for table in rope_tables(length, 8)))
            words = {"precision": row.precision, "rope": rope, "lens": lens, "rounding": "stochastic", "seed": 1}
            kv = quantize_kv(k.cuda(), v.cuda(), **words)
            out = api.attention(q.cuda(), kv, causal=True, rope=rope, kernel=row.kernel.name)
            if not out.cpu()[0, -1, 0].isnan().all():
                raise SystemExit(f"{row.name}: a key that is NaN must give NaN, and did not")
        print(f"ran 4 problems on quantize_kv and {row.name}")


def _page_writes() -> None:
    """Run every case of paged_write, then tables, lengths and offsets that are out of range."""
    import torch

    def turn(x: np.ndarray) -> torch.Tensor:
        return to_torch(x, "cuda")

    for case in page_writes.CASES:
        good = page_writes.arrays_of(case)
        bad = good.copied()
        bad.page_table, bad.lens = bad.page_table.copy(), bad.lens.copy()
        bad.page_table[-1], bad.lens[0] = len(bad.pools["k_pages"]), -1
        for x in (good, bad):
            wanted = x.replay()
            kv = page_writes.on_device(x, turn)
            paged_write(kv, turn(x.k), turn(x.v), **page_writes.words_of(x, turn))
            page_writes.check_pools(kv, wanted)
    print(f"ran {2 * len(page_writes.CASES)} problems on kv_write")


def _hopper_layers(arch: int) -> None:
    """Both tiles of sm90_gemm, clusters, splits, both layouts, copies of what TMA cannot address, every epilogue."""
    if dispatch.arch_reasons(dispatch.BY_NAME["sm90_gemm"], arch):
        return
    full = {"bias": "float32", "residual": True, "pre": True}
    cases = [
        *(GemmCase(*shape, w_along=along) for shape in ((1, 1, 0), (300, 520, 130), (20, 600, 3000)) for along in "kn"),
        *(GemmCase(300, n, 130, activation=word, **full) for n in (520, 521) for word in ACTIVATIONS),
        *(GemmCase(m, 520, 2050, "int8", "float16", scales="each", **full) for m in (20, 300)),
        GemmCase(700, 1100, 300, "int8"),
        GemmCase(300, 131, 77, gaps=(1, 3, 5), offsets=(1, 1, 1), residual=True),
    ]
    for case in cases:
        cuda_gemm.check(case)
    print(f"ran {len(cases)} problems on sm90_gemm")


def _takes(kernel: str, layout: str) -> bool:
    """Whether the kernel supports int8 weights with this contiguous dimension."""
    row = dispatch.BY_NAME[kernel]
    spec = Spec("cuda", row.min_arch, "int32", precision="int8", op="linear", layout=layout)
    return not dispatch.reasons(row, spec)


def _products(kernel: str) -> int:
    """Every path of operands into shared memory, tails on every side, both tile sizes, vector and scalar stores."""
    import torch

    count = 0
    for m, n, k in ((130, 144, 400), (37, 75, 333), (2176, 2048, 256), (1, 1, 0)):
        for along_k in (True, False) if _takes(kernel, "n") else (True,):
            for offset in (0, 1):
                a, b = (torch.randint(-128, 128, (rows * k + 1,), dtype=torch.int8).cuda() for rows in (m, n))
                a = a[offset : offset + m * k].view(m, k)
                b = b[offset : offset + n * k]
                b = b.view(n, k).T if along_k else b.view(k, n)
                sums = int8_matmul(a, b, kernel=kernel)
                if not torch.equal(sums.cpu().double(), a.cpu().double() @ b.cpu().double()):
                    raise SystemExit(f"{kernel}: wrong sums at {m} x {n} x {k}, b along {'k' if along_k else 'n'}")
                count += 1
    return count


# m, n, k: tails on every side, one tile and several, k = 0. The last has a wide tile for each SM.
LAYERS = ((130, 144, 72), (37, 75, 45), (3, 5, 0), (2104, 2112, 136))


def _linear_layers(arch: int) -> None:
    """Every activation in every layout, aligned and not, on the portable linear-layer kernels; gradients on all."""
    portable = [row for row in dispatch.kernels_of("linear", "cuda") if row.later_arches and "native" in row.precisions]
    for kernel in (*portable, *dispatch.kernels_of("linear_backward", "cuda")):
        count = 0
        for dtype, shape, activation in product(kernel.dtypes, LAYERS, ACTIVATIONS):
            large = shape == LAYERS[-1]  # float64 is slow
            if large and activation not in ("", "swiglu"):
                continue
            for x_layout, w_layout, at_end in product("km", "kn", (False,) if large else (False, True)):
                lies = {"x_layout": x_layout, "w_layout": w_layout, "at_end": at_end}
                problem = LinearProblem(*shape, dtype, activation, bias="float32", residual=True, **lies)
                if not dispatch.reasons(kernel, spec_of(kernel.name, problem, arch)):
                    count += _layer(kernel, problem)
        print(f"ran {count} problems on {kernel.name}")


def _layer(kernel: dispatch.Kernel, problem: LinearProblem) -> int:
    if kernel.op == "linear_backward":
        if problem.x_layout == "m":
            return 0
        arrays = operands(problem)
        dout, saved = upstream(problem, arrays)
        got = cuda_linear.run_gradients(kernel.name, problem, arrays, dout, saved)
        check_near(got, *gradients(problem, arrays, dout, saved))
        return 1
    if problem.x_layout == "m" and not kernel.automatic:
        return 0
    arrays = operands(problem)
    check_near(
        cuda_linear.run_linear(kernel.name, problem, arrays, pad=problem.at_end, keep_pre=True),
        *linear(problem, arrays),
    )
    return 1


def ready_arrays(case: OpCase) -> dict[str, np.ndarray]:
    """All inputs of a kernel as it reads them: PyTorch would write what a front end converts or fills."""
    numbers = {name: x for name, x in getattr(case.call, "keywords", {}).items() if name in ("a_scale", "b_scale")}
    arrays = {**case.arrays, **{name: np.array(x, np.float32) for name, x in numbers.items()}}
    return {name: x.astype(np.int32) if x.dtype == np.int64 else x for name, x in arrays.items()}


def _operations() -> None:
    """Run every call of the other operations on each of their CUDA kernels."""
    import torch

    for name, case in CASES.items():
        arrays = {key: torch.from_numpy(x).cuda() for key, x in ready_arrays(case).items()}
        kernels = case.kernels("cuda")
        for kernel in kernels:
            case.call(**arrays, kernel=kernel)
        print(f"ran {name} on {', '.join(kernels)}")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
