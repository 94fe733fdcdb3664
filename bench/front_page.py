"""Contents of the README: features by device, where INT8 pays, six results, the contract. All of it is made from the
table of kernels, from the figures that tests enforce and from committed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from bench import rows as store
from bench.presets import PRESETS
from bench.tables import Row, best_peer, markdown, problem, rate, ratio
from qflash.call.spec import Spec
from qflash.dispatch import VARIANTS, Kernel, choose
from qflash.errors import NoKernelError
from qflash.testing import compare

# Column -> a Spec of that device. The same kernels serve every GPU since Ampere other than Hopper.
DEVICES = {
    "CPU": Spec("cpu", 0, "float32", 128),
    "Turing (7.5)": Spec("cuda", 75, "float16", 128),
    "Ampere and later (≥ 8.0)": Spec("cuda", 86, "float16", 128),
    "Hopper (9.0)": Spec("cuda", 90, "float16", 128),
}
Change = Callable[[Spec], Spec]


def _with(**words: object) -> Change:
    return lambda spec: replace(spec, **words)


def _on_pages(kv: str) -> tuple[Change, ...]:
    """Prefill, decoding, and the write of new tokens."""
    return (
        _with(kv=kv, kv_lens=True),
        _with(kv=kv, kv_lens=True, few_rows=True),
        _with(op="kv_write", kv=kv, kv_lens=True),
    )


FEATURES: dict[str, tuple[Change, ...]] = {
    "float32": (_with(dtype="float32"),),
    "float16": (_with(dtype="float16"),),
    "bfloat16": (_with(dtype="bfloat16"),),
    "grouped queries, causal masks, windows, `softcap`, padding": (_with(window=True, softcap=True, kv_lens=True),),
    "rotary embedding (`rope=`)": (_with(rope="half"),),
    "attention sinks (`sinks=`)": (_with(sinks=True),),
    "the same bits in every batch (`batch_invariant=`)": (_with(batch_invariant=True),),
    "packed sequences (`attention_varlen`)": (_with(packed=True),),
    "few queries on a long cache (decoding)": (_with(few_rows=True, kv_lens=True),),
    "keys and values in pages (`KVCache`)": _on_pages("pages"),
    'INT8 pages (`KVCache(precision="int8")`)': _on_pages("pages_int8"),
    'INT8 QKᵀ (`precision="int8"`)': (_with(precision="int8"),),
    'INT8 QKᵀ, E4M3 PV (`precision="int8_fp8"`)': (_with(precision="int8_fp8"),),
    "K and V quantized once (`quantize_kv`)": (_with(precision="int8", kv="kept"),),
    "gradients": (_with(op="attention_backward"),),
    "softmax, layer norm, cross entropy": tuple(_with(op=op) for op in ("softmax", "layer_norm", "cross_entropy")),
    "standalone rotary embedding (`qflash.rope`)": (_with(op="rope"),),
    "linear layers: activations, SwiGLU, residual; gradients": (
        _with(op="linear", activation="gelu"),
        _with(op="linear", activation="swiglu"),
        _with(op="linear_backward", activation="gelu"),
    ),
    'linear layers in INT8 (`linear(precision="int8")`)': (_with(op="linear", precision="int8", activation="gelu"),),
    "quantize, dequantize, INT8 matrix products": (
        _with(op="quantize"),
        _with(op="dequantize"),
        _with(op="linear", precision="int8"),
    ),
}


def _chosen(spec: Spec) -> Kernel | None:
    try:
        return choose(spec)
    except NoKernelError:
        return None


def _linked(kernels: Iterable[Kernel]) -> str:
    """The names of kernels as links, or that of a page that describes several of them."""
    names: dict[str, set[str]] = {}
    for row in kernels:
        names.setdefault(row.page or row.name, set()).add(row.name)
    return ", ".join(
        f"[{page if len(rows) > 1 else rows.pop()}](docs/kernels/{page}.md)" for page, rows in names.items()
    )


def features() -> str:
    """A line per feature: the kernel that each device selects for it."""
    lines = []
    for feature, changes in FEATURES.items():
        cells = []
        for spec in DEVICES.values():
            found = [_chosen(change(spec)) for change in changes]
            cells.append("–" if None in found else _linked(row for row in found if row))
        lines.append([feature, *cells])
    return markdown(["", *DEVICES], lines).replace("---:", "---")


HEAD_DIMS = (64, 128, 256)
_KV_WORDS = {"arrays": "k and v as arrays", "kept": "k and v from `quantize_kv`"}


def pays_from() -> str:
    """The numbers of queries and keys from which each quantized kernel is faster than the device's 16-bit kernel."""
    lines = []
    for variant in VARIANTS.values():
        least = dict(variant.kernel.pays_from).get((variant.precision, variant.kv))
        if least is None:
            continue
        cells = []
        for head_dim in HEAD_DIMS:
            tokens = next(tokens for most, tokens in least if head_dim <= most)
            cells.append("never" if tokens is None else f"{tokens} tokens")
        what = f'`{variant.kernel.name}`, `"{variant.precision}"`, {_KV_WORDS[variant.kv]}'
        lines.append([what, *cells])
    header = ["faster than 16 bits from", f"head_dim ≤ {HEAD_DIMS[0]}", *(f"≤ {most}" for most in HEAD_DIMS[1:])]
    return markdown(header, lines)


@dataclass(frozen=True)
class Highlight:
    """One line of results: selected by its problem, never by the measurement."""

    what: str
    page: str  # of docs/results/<machine>/
    preset: str
    candidate: str
    head_dim: int
    keys: int
    causal: bool
    machine: str = ""  # "": all that have it


RESULTS = (
    Highlight("forward", "sm90", "sm90", "qflash sm90_fwd", 128, 16384, True),
    Highlight("gradients", "backward", "backward", "qflash sm90_bwd", 128, 16384, True),
    Highlight("INT8, quantization included", "int8", "sm90_int8", "qflash sm90_int8", 128, 16384, False),
    Highlight("one query, long cache", "decode", "decode", "qflash sm90_decode", 128, 32768, False),
    Highlight("forward", "cpu", "cpu", "qflash cpu", 128, 4096, True, "intel-xeon-processor-2c"),
)
TEXT = {"model": "llama-1b", "B": 1, "prompt": 900}  # the point of bench.models that is shown
OURS = "qflash, joined"


def _result(one: Highlight, machine: str, rows: list[Row]) -> list[str] | None:
    key = (one.candidate, one.head_dim, one.keys, one.causal)
    row = next((row for row in rows if (row["candidate"], row["D"], row["Tk"], row["causal"]) == key), None)
    if row is None:
        return None
    best = best_peer(row)
    same = [other for other in rows if (problem(other), other["dtype"]) == (problem(row), row["dtype"])]
    peer = next((other for other in same if best and other["candidate"] == best[0]), None)
    against = [f"{best[0]}, {rate(peer)}", f"**{ratio(best[1])}**"] if best and peer else ["–", ""]
    where = row["gpu"] or f"{row['cpu']}, {row['threads']} threads"
    what = f"[{one.what}](docs/results/{machine}/{one.page}.md)"
    return [where, what, f"{problem(row)} {row['dtype']}", rate(row), *against, f"{row['rel_l2']:.0e}"]


def _text(machine: str, rows: list[Row]) -> list[str] | None:
    """Text generation, compared with the faster of transformers' own ways."""
    found = [row for row in rows if TEXT.items() <= row.items() and "skipped" not in row]
    ours = next((row for row in found if row["candidate"] == OURS), None)
    peers = [row for row in found if not row["candidate"].startswith("qflash")]
    if ours is None or not peers:
        return None
    best = max(peers, key=lambda row: row["decode_tokens_s"])
    what = f"[text from a model](docs/results/{machine}/models.md)"
    point = f"{ours['model']} B={ours['B']} prompt of {ours['prompt']} {ours['dtype']}"
    against = f"transformers ({best['candidate'].removeprefix('HF ')}), {best['decode_tokens_s']:.0f} tokens/s"
    speed_up = ratio(ours["decode_tokens_s"] / best["decode_tokens_s"])
    speeds = [f"{ours['decode_tokens_s']:.0f} tokens/s", against, f"**{speed_up}**"]
    return [ours["gpu"] or ours["cpu"], what, point, *speeds, ""]  # errors of the others are relative to float64


def results() -> str:
    """The six results: each against the best peer of at least 16 bits in the same process."""
    lines = []
    for one in RESULTS:
        for machine, rows in store.committed(one.preset, one.machine or None).items():
            line = _result(one, machine, rows)
            lines += [line] if line else []
    lines += [line for machine, rows in store.committed("models").items() if (line := _text(machine, rows))]
    return markdown(["machine", "what", "problem", "qflash", "best peer", "speed-up", "error"], lines).replace(
        "---:", "---", 2
    )


def _worst(dtypes: tuple[str, ...], precision: str) -> str:
    """The largest relative L2 error in the committed rows of our kernels in one precision."""
    found = [
        row["rel_l2"]
        for preset in PRESETS
        for rows in store.committed(preset).values()
        for row in rows
        if row["kernel"] and row["dtype"] in dtypes and row["precision"] == precision and row["rel_l2"] is not None
    ]
    return f"{max(found):.1e}" if found else "–"


def contract() -> str:
    """The contract in five lines, with the figures of qflash.testing.compare and the worst of the committed rows."""

    def quantized(bound: dict[str, float]) -> str:
        return f"relative L2 ≤ {bound['l2']:.1e} and cosine ≥ {bound['cosine']} on N(0, 1) inputs"

    def biased(bound: dict[str, float]) -> str:
        return f"; cosine ≥ {bound['biased_cosine']} with channel-biased keys"

    halves = ("float16", "bfloat16")
    every = ("float32", *halves)
    replay = f"≤ {compare.REPLAY:.0e} from a bit-exact NumPy replay, so no bug hides in quantization noise"
    lines = [
        ["float32", f"relative L2 ≤ {compare.FLOAT32_L2:.0e}", _worst(("float32",), "native")],
        [
            "float16, bfloat16",
            f"≤ {compare.HALF_FACTOR:g} × the error of PyTorch's own math in that type; "
            f"float16 on N(0, 1) ≤ {compare.FLOAT16_ABSOLUTE:.0e} absolute",
            _worst(halves, "native"),
        ],
        ['`"int8"`', quantized(compare.INT8) + biased(compare.INT8), _worst(every, "int8")],
        ['`"int8_fp8"`', quantized(compare.INT8_FP8) + biased(compare.INT8_FP8), _worst(every, "int8_fp8")],
        ["both quantized", replay, ""],
    ]
    return markdown(["type", "promise, against float64", "worst committed row"], lines).replace("---:", "---", 1)
