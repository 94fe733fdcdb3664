"""Tables of the README and the kernel pages, made from committed rows between `<!-- qflash:NAME -->` markers; and the
pages of docs/results, which consist only of such tables."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from bench import (
    beside_triton,
    front_page,
    highlights,
    int8_accuracy,
    int8_gemm,
    kv_write,
    linear,
    linear_accuracy,
    linear_backward,
    mixed,
    models,
    plot,
    profiles,
    quality,
    quantize,
    reductions,
    result_pages,
    ring,
    rungs,
    serving,
    sm90_quantize,
    training,
    triton_tiles,
    words,
)
from bench import rows as store
from bench.presets import PRESETS, Preset
from bench.tables import (
    FP8,
    best_peer,
    candidate,
    error,
    geometric_means,
    markdown,
    peers_of,
    problem,
    rate,
    ratio,
    source,
    time,
    unrepeated,
)
from qflash.dispatch import KERNELS, VARIANTS, Kernel, kernels_of

CUDA_KERNELS = tuple(variant.name for variant in VARIANTS.values() if variant.device == "cuda")
# Every page that may have marked sections; the pages of docs/results are generated entirely.
PAGES = (
    store.ROOT / "README.md",
    *sorted(set((store.ROOT / "docs").rglob("*.md")) - set(result_pages.FOLDER.rglob("*.md"))),
)
Row = dict[str, Any]
LONG = 4096  # number of keys from which quantized kernels should be faster
# Presets on pages: the candidate that all others are compared with, in addition to peers, and its column's title.
PAGED = {
    "decode_pages": ("qflash sm90_decode, pages of 256", "16-bit pages of 256"),
    "cpu-decode-pages": ("qflash cpu", "arrays"),
}
BEHIND = 0.95  # of a peer's speed: below it a kernel counts as slower, not as equal


# Tables


def _where(kernel: Kernel) -> str:
    if kernel.device == "cpu":
        return "CPU"
    return f"CUDA, compute capability {'≥ ' if kernel.later_arches else ''}{kernel.min_arch / 10}"


def kernels_table() -> str:
    """The attention kernels."""
    lines = []
    for kernel in (*kernels_of("attention"), *kernels_of("attention_backward")):
        passes = "forward" if kernel.op == "attention" else "backward"
        chosen = "" if kernel.automatic else " Only by name."
        precisions = ", ".join(kernel.precisions)
        lines.append([f"`{kernel.name}`", _where(kernel), precisions, passes, f"{kernel.summary}.{chosen}"])
    header = ["kernel", "runs on", "precision", "pass", "what it is"]
    return markdown(header, lines).replace("---:", "---")


def operations_table() -> str:
    """The kernels of the other operations."""
    lines = []
    for kernel in sorted((row for row in KERNELS if not row.op.startswith("attention")), key=lambda row: row.op):
        chosen = "" if kernel.automatic else " Only by name."
        lines.append([f"`{kernel.op}`", f"`{kernel.name}`", _where(kernel), f"{kernel.summary}.{chosen}"])
    return markdown(["operation", "kernel", "runs on", "what it is"], lines).replace("---:", "---")


def preset_table(name: str, machine: str | None = None) -> str:
    """One table per machine with committed rows: a problem per line, qflash's kernels next to their peers."""
    parts = []
    for rows in store.committed(name, machine).values():
        means = [f"- {line}" for line in means_of(PRESETS[name], rows)] if PRESETS[name].peers is not None else []
        lines = _lines(rows, PRESETS[name].best)
        parts.append("\n\n".join([source(rows[0]), lines, *(["\n".join(means)] if means else [])]))
    return "\n\n".join(parts) or _no_rows(name)


def ladder_table(machine: str | None = None, fold: bool = True) -> str:
    """One table per machine, head_dim and mask: the rungs of each problem from first to last, then their peers. fold:
    only the first table, which most readers need, is visible; the others unfold."""
    parts = []
    for rows in store.committed("ladder", machine).values():
        parts.append(source(rows[0]))
        groups: dict[tuple[int, bool], list[Row]] = {}
        for row in rows:
            groups.setdefault((row["D"], row["causal"]), []).append(row)
        for (head_dim, causal), group in groups.items():
            title = f"head dim {head_dim}, {'causal' if causal else 'full'}, {group[0]['dtype']}"
            parts.append(_titled(title, _rungs(group), fold and len(parts) > 1))
    return "\n\n".join(parts) or _no_rows("ladder")


def _titled(title: str, table: str, fold: bool) -> str:
    if fold:
        return f"<details><summary>{title}</summary>\n\n{table}\n\n</details>"
    return f"{title.capitalize()}:\n\n{table}"


def _rungs(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        ratios = [ratio(row["speedup"].get(peer)) for peer in ("torch naive", "torch FA2")]
        lines.append([_shape(row), candidate(row), time(row), rate(row), error(row), *ratios])
    header = ["(B, H, T, D)", "candidate", "latency", "rate", "error", "× naive", "× PyTorch (FA2)"]
    return markdown(header, unrepeated(lines))


def _shape(row: Row) -> str:
    return f"({row['B']}, {row['Hq']}, {row['Tq']}, {row['D']})"


def paged_table(name: str, machine: str | None = None) -> str:
    """A preset on pages: a line per problem and candidate, because there are too many candidates for columns."""
    parts = []
    base, called = PAGED[name]
    for rows in store.committed(name, machine).values():
        lines = []
        for row in rows:
            ratios = [_against(row, None) if row["kernel"] else "", ratio(row["speedup"].get(base))]
            lines.append([problem(row), candidate(row), time(row), rate(row), error(row), *ratios])
        header = ["problem", "candidate", "latency", "rate", "error", "× best peer", f"× {called}"]
        means = "\n".join(f"- {line}" for line in means_of(PRESETS[name], rows))
        parts.append("\n\n".join([source(rows[0]), markdown(header, unrepeated(lines)), means]))
    return "\n\n".join(parts) or _no_rows(name)


def quantized_summaries() -> str:
    """sm90_int8 on long sequences, a table of means per machine."""
    parts = [f"{source(rows[0])}\n\n{quantized_means(rows)}" for rows in store.committed("sm90_int8").values()]
    return "\n\n".join(parts) or _no_rows("sm90_int8")


def quantized_table(machine: str | None = None, fold: bool = True) -> str:
    """sm90_int8, one table per machine, head_dim and mask: ours with and without quantization, then their peers."""
    parts = []
    for rows in store.committed("sm90_int8", machine).values():
        parts += [source(rows[0]), quantized_means(rows)]
        groups: dict[tuple[int, bool], list[Row]] = {}
        for row in rows:
            groups.setdefault((row["D"], row["causal"]), []).append(row)
        for (head_dim, causal), group in groups.items():
            title = f"head dim {head_dim}, {'causal' if causal else 'full'}, {group[0]['dtype']}"
            parts.append(_titled(title, _quantized_lines(group), fold))
    return "\n\n".join(parts) or _no_rows("sm90_int8")


def _quantized_lines(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        best = best_peer(row) if row["kernel"] else None
        ratios = [
            f"{ratio(best[1])} {best[0]}" if best else "",
            ratio(row["speedup"].get(FP8)) if row["kernel"] else "",
        ]
        lines.append([_shape(row), candidate(row), time(row), rate(row), error(row), *ratios])
    header = ["(B, H, T, D)", "candidate", "latency", "rate", "error", "× best of 16 bits", f"× {FP8}"]
    return markdown(header, unrepeated(lines))


def quantized_means(rows: list[Row]) -> str:
    """A line per candidate of ours: over the best 16-bit peer and over FP8, by head_dim, on long sequences."""
    long = [row for row in rows if row["kernel"] and row["Tk"] >= LONG]
    head_dims = sorted({row["D"] for row in long})
    lines = []
    for name in dict.fromkeys(row["candidate"] for row in long):
        cells = []
        for head_dim in head_dims:
            ours = [row for row in long if (row["D"], row["candidate"]) == (head_dim, name)]
            cells.append(_mean_and_range([found[1] for row in ours if (found := best_peer(row))]))
            cells.append(_mean_and_range([row["speedup"][FP8] for row in ours if FP8 in row["speedup"]]))
        lines.append([name, *cells])
    heads = [f"D={head_dim}, × {who}" for head_dim in head_dims for who in ("16 bits", "FP8")]
    return markdown([f"T ≥ {LONG}", *heads], lines)


def _mean_and_range(values: list[float]) -> str:
    if not values:
        return "–"
    mean = math.exp(sum(map(math.log, values)) / len(values))
    return f"**{mean:.2f}** ({min(values):.2f}–{max(values):.2f})"


def _no_rows(name: str) -> str:
    return f"No rows are committed yet; `qflash bench {name}` makes them."


def against_the_best(rows: list[Row]) -> list[str]:
    """A sentence per kernel and dtype: the speed-up over the best peer of each problem, whichever that is."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["kernel"] and best_peer(row):
            groups.setdefault((row["candidate"], row["dtype"]), []).append(row)
    sentences = []
    for (name, dtype), ours in groups.items():
        ratios = [best_peer(row)[1] for row in ours]
        peers = [peer for peer in peers_of(ours) if not peer.startswith("qflash") and peer != FP8]
        among = f"geometric mean of {len(ratios)} problems, {min(ratios):.2f} to {max(ratios):.2f}"
        behind = sum(value < BEHIND for value in ratios)
        mean = ratio(math.exp(sum(map(math.log, ratios)) / len(ratios)))
        sentences.append(f"{name}, {dtype}: {mean} the best of {', '.join(peers)} ({among}; {behind} under {BEHIND}×)")
    return sentences


# Preset -> its kernel on the front page.
BEST_OF_HOPPER = {"sm90": "qflash sm90_fwd", "backward": "qflash sm90_bwd", "decode": "qflash sm90_decode"}


def best_of_hopper() -> str:
    """Hopper's kernels on all problems of their presets, in a sentence per machine and dtype."""
    found = [
        line
        for preset, name in BEST_OF_HOPPER.items()
        for rows in store.committed(preset).values()
        for line in against_the_best([row for row in rows if row["candidate"] == name])
    ]
    return "\n".join(f"- {line}" for line in found) or _no_rows("sm90")


def means_of(preset: Preset, rows: list[Row]) -> list[str]:
    """A preset's results in sentences. On pages there are too many pairs: only ours, and those with the best peer."""
    pairs = geometric_means(rows)
    if preset.page_sizes:
        pairs = [line for line in pairs if "× qflash" in line]
    return pairs + (against_the_best(rows) if preset.best else [])


def _against(row: Row, peer: str | None) -> str:
    """A row's speed-up over `peer` in bold; None: over the best one, with its name."""
    if peer is None:
        found = best_peer(row)
        return f"**{ratio(found[1])}** {found[0]}" if found else ""
    return f"**{ratio(row['speedup'][peer])}**" if peer in row["speedup"] else ""


def _lines(rows: list[Row], best: bool = False) -> str:
    candidates = list(dict.fromkeys(row["candidate"] for row in rows))
    if rows[0]["kind"] == "overhead":
        lines = [[row["candidate"], time(row), f"{row['us']['min']:.1f} µs", _peer_ratio(row)] for row in rows]
        return markdown(["one call", "median", "best", "speed-up"], lines)
    peers = [name for name in candidates if not name.startswith("qflash")]
    ours = [name for name in candidates if name.startswith("qflash")]
    grouped: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault((problem(row), row["dtype"]), {})[row["candidate"]] = row
    peer = None if best else peers_of(rows)[0]
    header = ["problem", *(head for name in ours for head in (name, f"× {peer or 'best peer'}", "error")), *peers]
    lines = []
    for (what, dtype), by_name in grouped.items():
        cells = [f"{what} {dtype}"]
        for name in ours:
            row = by_name.get(name)
            cells += [rate(row), _against(row, peer), error(row)] if row else ["–"] * 3
        cells += [rate(by_name[name]) if name in by_name else "–" for name in peers]
        lines.append(cells)
    return markdown(header, lines)


def kernel_table(name: str) -> str:
    """Every committed row of one kernel, machine by machine."""
    parts = []
    for preset in PRESETS.values():
        if name not in preset.kernels or preset.kind == "overhead":
            continue
        for rows in store.committed(preset.name).values():
            ours = [row for row in rows if row["kernel"] == name]
            if not ours:
                continue
            peers = peers_of(ours)
            lines = [
                [problem(row) + (" rope" if row.get("rope") else ""), row["dtype"], time(row), rate(row), error(row)]
                + [ratio(row["speedup"].get(peer)) for peer in peers]
                for row in ours
            ]
            header = ["problem", "dtype", "time", "rate", "error", *(f"× {peer}" for peer in peers)]
            parts.append(f"{source(rows[0])}\n\n{markdown(header, lines)}")
    return "\n\n".join(parts) or "No rows are committed yet."


def _peer_ratio(row: Row) -> str:
    return ", ".join(f"{ratio(value)} over {peer}" for peer, value in row["speedup"].items())


def profile_table(name: str, gpu: str | None = None) -> str:
    """ncu's figures of one kernel, GPU by GPU: a line per figure, a column per launch."""
    parts = []
    for folder, profile in profiles.committed(name).items():
        if gpu not in (None, folder):
            continue
        header = ["", *(f"`{launch}`" for launch in profile.launches)]
        parts.append(f"{profiles.source(profile)}\n\n{markdown(header, profiles.figures(profile))}")
    return "\n\n".join(parts) or f"No profile is committed yet; `qflash profile --kernel {name}` makes it."


def tradeoff() -> str:
    """Error against speed of every kernel, machine by machine, for a page of docs/guide."""
    found = sorted(store.RESULTS.glob("*/accuracy-speed.svg"))
    links = [f"../../bench/results/{path.parent.name}/{path.name}" for path in found]
    return "\n".join(f"![Error against speed on {link.split('/')[-2]}]({link})" for link in links)


# All rows of a preset: of one machine, or, without an argument, of all.
TABLES: dict[str, Callable[..., str]] = {
    **{name: partial(preset_table, name) for name in PRESETS},
    "ladder": ladder_table,
    "sm90_int8": quantized_table,
    **{name: partial(paged_table, name) for name in PAGED},
    mixed.NAME: mixed.table,
    kv_write.NAME: kv_write.table,
    int8_gemm.NAME: int8_gemm.table,
    linear.NAME: linear.table,
    linear_accuracy.NAME: linear_accuracy.table,
    linear_backward.NAME: linear_backward.table,
    int8_accuracy.NAME: int8_accuracy.table,
    quality.NAME: quality.table,
    training.NAME: training.table,
    ring.NAME: ring.table,
    words.NAME: words.table,
    models.NAME: models.table,
    serving.NAME: serving.table,
    **beside_triton.TABLES,
    triton_tiles.NAME: triton_tiles.table,
    **{name: partial(quantize.table, name) for name in (quantize.NAME, sm90_quantize.NAME)},
    **{name: partial(reductions.table, name) for name in reductions.PRESET.values()},
}
# The same for separate pages, where nothing needs to be folded.
UNFOLDED = TABLES | {name: partial(TABLES[name], fold=False) for name in ("ladder", "sm90_int8")}

SECTIONS: dict[str, Callable[[], str]] = {
    "kernels": kernels_table,
    "operations": operations_table,
    "features": front_page.features,
    "pays-from": front_page.pays_from,
    "results": front_page.results,
    "results-means": best_of_hopper,
    "accuracy-speed": tradeoff,
    "contract": front_page.contract,
    **TABLES,
    "sm90_int8-means": quantized_summaries,
    f"{int8_accuracy.NAME}-l2": int8_accuracy.summary,
    **{f"results-{page}": table for page, table in highlights.TABLES.items()},
    "rungs": rungs.table,
    **{f"rung-{name}": partial(rungs.sentence, name) for name in rungs.BELOW},
    **{f"profile-{name}": (lambda name=name: profile_table(name)) for name in CUDA_KERNELS},
    **{f"kernel-{name}": (lambda name=name: kernel_table(name)) for name in VARIANTS},
}


def rewrite(text: str) -> tuple[str, list[str]]:
    """`text` with every marked section regenerated, and the names of those that changed."""
    changed = []

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in SECTIONS:
            raise ValueError(f"a page has a section {name!r}; allowed: {', '.join(SECTIONS)}")
        fresh = f"\n{SECTIONS[name]()}\n"
        if fresh != match["body"]:
            changed.append(name)
        return f"<!-- qflash:{name} -->{fresh}<!-- /qflash:{name} -->"

    pattern = r"<!-- qflash:(?P<name>[a-z0-9_-]+) -->(?P<body>.*?)<!-- /qflash:(?P=name) -->"
    return re.sub(pattern, fill, text, flags=re.DOTALL), changed


def update(check_only: bool = False) -> list[str]:
    """Update every picture and page (or only check). Returns the files and "page: section" that were stale."""
    stale = plot.update(check_only)  # before the pages, which show the existing pictures
    for page in PAGES:
        text, changed = rewrite(page.read_text())
        stale += [f"{page.relative_to(store.ROOT)}: {name}" for name in changed]
        if changed and not check_only:
            page.write_text(text)
    return stale + result_pages.update(result_pages.render(UNFOLDED, profile_table), check_only)
