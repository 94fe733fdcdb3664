"""A trace as a picture: about three key tiles of one work tile, a row for each role."""

from __future__ import annotations

from html import escape

from qflash.testing.trace import NOTE, TENSOR_CORES, Span

WIDTH, LEFT, RIGHT, TOP = 900, 130, 10, 46
ROW, GAP, LANE_GAP = 26, 6, 1
TILES = 3
# Fills that contrast with white and with black; text in them is dark.
FILLS = {
    "copy": "#74b9e8", "S": "#8fd18f", "O": "#e89a9a", "mma": "#8fd18f", "exponentials": "#f2b134", "wait": "#b8bcc4",
}  # fmt: skip
WORDS = {
    "copy": "TMA copy", "S": "S = Q Kᵀ, of consumer n", "O": "O += P V, of consumer n", "mma": "mma",
    "exponentials": "exponentials", "wait": "wait",
}  # fmt: skip
CHARACTER = 5.6  # pixels per character


def fill_of(span: Span) -> str:
    """The key in FILLS of a span's color."""
    return span.name[0] if span.kind == "product" else span.name if span.kind == "work" else span.kind


def window(spans: list[Span]) -> tuple[int, int]:
    """The time range shown: key tiles from the second on. They begin with their scores, or else with exponentials."""
    for fill in ("S", "exponentials"):
        found = [span for span in spans if fill_of(span) == fill]
        starts = sorted(span.begin for span in found if (span.row, span.name) == (found[0].row, found[0].name))
        if len(starts) > TILES + 1:
            return starts[1], starts[1 + TILES]
    return min(span.begin for span in spans), max(span.end for span in spans)


def labels_of(span: Span) -> tuple[str, ...]:
    """Labels of a bar, in order of preference: the first one that fits is used."""
    short = span.name.replace(", stage", "")
    if span.kind == "copy":
        return (span.row.removeprefix("copy of ").replace(", stage", ""),)
    if span.kind == "product":
        return (f"{span.name[0]} {span.name.rpartition(' ')[2]}",)
    return (f"waits: {short}", short) if span.kind == "wait" else (short,)


def rows_of(spans: list[Span]) -> dict[str, list[Span]]:
    """The rows from top to bottom: copies of each tensor, the tensor cores, then the first warp of each role."""
    rows: dict[str, list[Span]] = {}
    for span in spans:
        name = span.row.split(", ")[0]
        if "," in span.row and span.kind != "copy" and name != TENSOR_CORES:
            first = min(other.row for other in spans if other.row.split(", ")[0] == name)
            if span.row != first:
                continue
        rows.setdefault(name, []).append(span)

    def order(name: str) -> tuple[int, str]:
        copies = name.startswith("copy")
        return (0 if copies else 1 if name == TENSOR_CORES else 3 if name.startswith("consumer") else 2, name)

    return {name: rows[name] for name in sorted(rows, key=order)}


def lanes_of(spans: list[Span]) -> list[list[Span]]:
    """Overlapping spans of one row, assigned to lanes."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        free = next((lane for lane in lanes if lane[-1].end <= span.begin), None)
        if free is None:
            lanes.append(free := [])
        free.append(span)
    return lanes


def picture(spans: list[Span], title: str) -> str:
    """An SVG of the last launch's first block."""
    last = max(span.launch for span in spans)
    block = min(span.block for span in spans if span.launch == last)
    chosen = [s for s in spans if (s.launch, s.block) == (last, block) and s.kind != "arrive" and s.end > s.begin]
    begin, end = window(chosen)
    shown = [span for span in chosen if span.begin < end and span.end > begin]
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)
    rows = rows_of(shown)
    height = TOP + len(rows) * (ROW + GAP) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        "<style>text{fill:#24292f} .in{fill:#1b1f24;font-size:10px} line{stroke:#8885}"
        " @media (prefers-color-scheme: dark){text{fill:#e6edf3} .in{fill:#1b1f24}}</style>",
        f'<text x="{LEFT}" y="16" font-size="13">{escape(title)}</text>',
    ]
    x = float(LEFT)
    for key in FILLS:
        if not any(fill_of(span) == key for span in shown):
            continue
        parts.append(f'<rect x="{x:.0f}" y="25" width="10" height="10" fill="{FILLS[key]}"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="34">{escape(WORDS[key])}</text>')
        x += 14 + CHARACTER * len(WORDS[key]) + 22
    for i, (name, of_row) in enumerate(rows.items()):
        y = TOP + i * (ROW + GAP)
        parts.append(f'<text x="{LEFT - 8}" y="{y + ROW / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y + ROW + GAP / 2}" y2="{y + ROW + GAP / 2}"/>')
        lanes = lanes_of(of_row)
        tall = ROW / len(lanes)
        for lane, of_lane in enumerate(lanes):
            for span in of_lane:
                parts += bar(span, LEFT + (max(span.begin, begin) - begin) * scale,
                             LEFT + (min(span.end, end) - begin) * scale, y + lane * tall, tall - LANE_GAP)  # fmt: skip
    parts.append(f'<text x="{LEFT}" y="{height - 12}">{escape(f"{end - begin} units of {NOTE}")}</text>')
    return "\n".join([*parts, "</svg>", ""])


def bar(span: Span, left: float, right: float, y: float, height: float) -> list[str]:
    """One span, with its label if it fits."""
    told = f"{escape(span.name)}: {span.begin} to {span.end}"
    drawn = [
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(right - left, 0.5):.1f}" height="{height:.1f}" '
        f'fill="{FILLS[fill_of(span)]}" rx="1.5"><title>{told}</title></rect>'
    ]
    room = right - left - 4 if height >= 11 else 0
    label = next((label for label in labels_of(span) if CHARACTER * len(label) < room), "")
    if label:
        middle, base = (left + right) / 2, y + height / 2 + 3.5
        drawn.append(f'<text class="in" x="{middle:.1f}" y="{base:.1f}" text-anchor="middle">{escape(label)}</text>')
    return drawn
