"""docs/results/<machine>/: every committed row, with a page for each subject. The pages are generated, never edited."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench import profiles
from bench import rows as store

FOLDER = store.ROOT / "docs" / "results"
MADE = "<!-- Made by `qflash report` from the rows in bench/results; edits are lost. -->"
Pages = dict[Path, str]


@dataclass(frozen=True)
class Page:
    """Contents of a page: presets with their headings, the page of docs/kernels that explains them, how to read it."""

    name: str
    title: str
    explained_by: str | None
    presets: Mapping[str, str]
    about: str = ""
    picture: tuple[str, str] | None = None  # the name and the title of a plot of several presets, if there is one


PAGES = (
    Page(
        "ladder",
        "The ladder: every CUDA rung",
        None,
        {"ladder": "float16, B·T = 16384", "cuda": "float32 and bfloat16"},
        "The CUDA kernels from the first rung to the last run in one process with PyTorch's three ways. Short calls "
        "are replayed from CUDA graphs, and the L2 cache is flushed before each. Latency is the median; × PyTorch is "
        "the speed-up over its FlashAttention-2 backend. The quantized rungs include their quantization; `fa_int8`'s "
        '"kernel alone" attends to q and k quantized beforehand. [The ladder](../../learn.md) explains each rung.',
    ),
    Page(
        "sm90",
        "sm90_fwd and the best that runs on Hopper",
        "sm90_fwd",
        {"sm90": "Forward", "sm90-rope": "With and without rope", "sm90-jax": "From JAX, jitted"},
        "The peers are cuDNN and FlashAttention 2, both through PyTorch, and FlashAttention 3.",
    ),
    Page(
        "backward",
        "Gradients, and the best that runs on Hopper",
        "sm90_bwd",
        {"backward": "Backward alone"},
        "The forward pass ran once, before, and is not counted; delta = rowsum(dO ∘ O) is. A backward pass counts five "
        "products, 2.5 times the forward FLOP, whatever a kernel computes again. The peers are cuDNN and "
        "FlashAttention 2 through PyTorch; both add dQ in an order that is left to chance, unless PyTorch is told to "
        "be deterministic.",
    ),
    Page(
        "int8",
        "sm90_int8 and sm90_int8_fp8",
        "sm90_int8",
        {"sm90_int8": "With quantization and alone"},
        'Rows count the quantization of q, k and v, or only that of q ("kv ready"), or none ("kernel alone"). '
        "FlashAttention 3 in FP8 gets arrays that are E4M3 already; its cast is not counted.",
    ),
    Page(
        "accuracy",
        "Error of quantized attention",
        "sm90_int8",
        {"int8-accuracy": "Against float64"},
        "The inputs are normal numbers, keys with a bias in some channels, values with a mean of 3, one value in a "
        "thousand ten times as large, and long sequences.",
        ("accuracy-speed", "Error against speed"),
    ),
    Page(
        "quality",
        "A trained model, quantized",
        None,
        {"quality": "Mode by mode", "training": "Training"},
        "A byte-level Llama of transformers, trained on the standard library's sources, reads files that were held "
        "out. [Quality of a quantized model](../../guide/quality.md) says what the columns mean.",
    ),
    Page(
        "models",
        "Text from whole models of transformers",
        None,
        {"models": "Random weights in bfloat16"},
        "Greedy text after prompts of one length. The first token is known when the device has its logits; tokens a "
        "second count the whole batch, those of decoding without the first token, and the factors are of these. "
        '"Joined" and "INT8 linear" are models after `fuse_projections` and `quantize_linears`; '
        "[the guide](../../guide/transformers.md) says what these do. Transformers' compiled step is the one that "
        '`cache_implementation="static"` brings.',
    ),
    Page(
        "serving",
        "Many requests to a model of transformers",
        None,
        {"serving": "Random weights"},
        "Requests of different lengths, all there from the start: a `Batcher`, `generate` with as many at a time, "
        "which all wait for the longest, and `generate` with one. Tokens a second are of the answers, and the time for "
        "prompts counts. [The guide](../../guide/transformers.md) says what a `Batcher` does.",
    ),
    Page("fa_mma", "fa_mma and FlashAttention 2", "fa_mma", {"fa_mma": "bfloat16", "fa_mma-f16": "float16"}),
    Page("fa_int8", "fa_int8 with its quantization and alone", "fa_int8", {"fa_int8": "bfloat16"}),
    Page(
        "ring",
        "Context parallelism without its links",
        None,
        {"ring": "All ranks on one GPU"},
        "The parts of all ranks, one after the other on one device, beside one call on the whole sequence: what a ring "
        "costs in computation. [The guide](../../guide/parallel.md) explains it.",
    ),
    Page("quantize", "quantize and dequantize", "quantize", {"quantize": "Beside a copy"}),
    Page("sm90_quantize", "quantize_kv on Hopper", "sm90_quantize", {"sm90_quantize": "Beside a copy"}),
    Page("int8_gemm", "INT8 matrix products", "int8_gemm_tc", {"int8-gemm": "Beside PyTorch's"}),
    Page(
        "linear",
        "Linear layers",
        "gemm_mma",
        {"linear": "Beside PyTorch's", "linear-backward": "Gradients"},
        "A product with a weight, bias, and GeLU or SwiGLU behind it. PyTorch computes it in separate kernels (torch), "
        "compiled with max-autotune (torch.compile), with cuBLASLt's epilogue (torch._addmm_activation) and, for "
        "comparison, without what follows the product (torch product). INT8 rows count the quantization of x. Of "
        "gradients the forward pass is not counted, and torch products are dx and dw from a gradient that is there.",
    ),
    Page(
        "linear_accuracy",
        "Error of linear layers in INT8",
        "cpu_int8_matmul",
        {"linear-accuracy": "Against float64"},
        "x and the weight are bfloat16, and so are results. One channel in a hundred of x is 20 times as large, or one "
        "value in a thousand 10 times, or one token in a hundred 100 times. Ways other than qflash's are simulated.",
    ),
    Page(
        "reductions",
        "softmax, layer_norm and cross_entropy",
        "reductions",
        {"reductions": "On a GPU", "reductions-cpu": "On a CPU"},
    ),
    Page(
        "cuda-vs-triton",
        "CUDA and Triton side by side",
        "triton",
        {
            "triton-costs": "Calls, lines, compilation and first calls",
            "triton": "Attention",
            "triton-decode": "Decoding",
            "triton-linear": "Linear layers",
            "triton-rows": "softmax and rope",
            "triton-tiles": "Tiles of triton_fwd",
        },
        "Kernels of the same operation in one process. Lines are those with code on them, in a kernel's own files and "
        "in all that these include. The first call of a process loads what an earlier one compiled; compilation is how "
        "much longer it takes with empty caches. PyTorch takes part eager and compiled with max-autotune, and Triton "
        "with the attention kernel of its tutorial, tuned by its autotuner.",
    ),
    Page(
        "cpu",
        "The CPU engine",
        "cpu",
        {"cpu": "Forward", "cpu-train": "Forward and backward"},
        "Everyone has the same number of threads. The bold column is the speed-up over "
        "`torch.nn.functional.scaled_dot_product_attention` on contiguous `[B, H, T, D]` tensors, the layout it likes "
        "best. Forward and backward together count 3.5 times the forward FLOP.",
    ),
    Page(
        "decode",
        "One query against a long cache",
        "cpu",
        {
            "decode": "On a GPU",
            "decode_pages": "On pages",
            "decode_mixed": "Sequences of different lengths",
            "kv_write": "New tokens into pages",
            "cpu-decode": "On a CPU",
            "cpu-decode-pages": "On pages, on a CPU",
        },
        "GB/s count K and V once; those of INT8 pages are the bytes that such pages have, with their scales.",
    ),
    Page(
        "words",
        "What each argument costs",
        None,
        {"words": "With the argument and without"},
        "`return_lse=True` on causal prompts, `batch_invariant=True` on decode steps, and `share_prefix` on sequences "
        "that begin with the same tokens: each compared with the same call without it.",
    ),
    Page(
        "overhead",
        "What a call costs the host",
        None,
        {"cpu-overhead": "CPU arrays", "cuda-overhead": "CUDA tensors"},
        "The arrays are so small that next to nothing is computed.",
    ),
)


def render(tables: Mapping[str, Callable[[str], str]], profile_table: Callable[[str, str], str]) -> Pages:
    """All pages, by path. tables: a preset's rows on one machine; profile_table: a kernel's profile on one GPU."""
    found: Pages = {}
    index = ["# Results", "Every committed row, by machine. The rows are in [bench/results](../../bench/results)."]
    for folder in sorted(path for path in store.RESULTS.iterdir() if path.is_dir()):
        pages = {page.name: (page.title, _page(page, folder, tables)) for page in PAGES if _committed(page, folder)}
        gpu = profiles.folder_of(folder.name)
        kernels = sorted(path.stem for path in (profiles.PROFILES / gpu).glob("*.csv"))
        if kernels:
            figures = [f"## {kernel}\n\n{profile_table(kernel, gpu)}" for kernel in kernels]
            pages["profiles"] = ("Profiles, by ncu", _text("# Profiles, by ncu", *_roofline(gpu), *figures))
        found |= {FOLDER / folder.name / f"{name}.md": text for name, (_, text) in pages.items()}
        links = [f"- [{title}]({folder.name}/{name}.md)" for name, (title, _) in pages.items()]
        if links:  # `qflash run` leaves a folder too, whose contents are not committed
            index += [f"## {folder.name}", "\n".join(links)]
    return found | {FOLDER / "README.md": _text(*index)}


def _roofline(gpu: str) -> list[str]:
    if not (profiles.PROFILES / gpu / "roofline.svg").exists():
        return []
    where = "Each rung stands between the memory's roof and the arithmetic units', on the problem it was profiled with."
    return [where, f"![Roofline of the {gpu}](../../../profiles/{gpu}/roofline.svg)"]


def _text(*parts: str) -> str:
    return "\n\n".join((MADE, *parts)) + "\n"


def _committed(page: Page, folder: Path) -> list[str]:
    return [name for name in page.presets if (folder / f"{name}.jsonl").exists()]


def _page(page: Page, folder: Path, tables: Mapping[str, Callable[[str], str]]) -> str:
    parts = [f"# {page.title}"]
    if page.explained_by:
        parts.append(f"[{page.explained_by}](../../kernels/{page.explained_by}.md) says what these rows show.")
    parts += [page.about] if page.about else []
    if page.picture and (folder / f"{page.picture[0]}.svg").exists():
        parts.append(_plot(folder, *page.picture))
    for name in _committed(page, folder):
        parts.append(f"## {page.presets[name]}")
        if (folder / f"{name}.svg").exists():
            parts.append(_plot(folder, name, f"{page.title}: {page.presets[name]}"))
        parts.append(tables[name](folder.name))
    return _text(*parts)


def _plot(folder: Path, name: str, title: str) -> str:
    return f"![{title}](../../../bench/results/{folder.name}/{name}.svg)"


def update(pages: Pages, check_only: bool = False) -> list[str]:
    """Update the folder (or only check). Returns the pages that were not up to date. A page without rows is removed."""
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    orphans = sorted(set(FOLDER.rglob("*.md")) - set(pages))
    if not check_only:
        for path in stale:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages[path])
        for path in orphans:
            path.unlink()
    return [str(path.relative_to(FOLDER.parent.parent)) for path in (*stale, *orphans)]
