"""Pictures: what they show, whether they can be read, and whether the committed ones are of the committed rows."""

import re
from functools import cache, partial
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from qflash.cli.bench import load

matplotlib = pytest.importorskip("matplotlib")
plot, store, limits, presets, tables = (load(name) for name in ("plot", "rows", "limits", "presets", "tables"))
page, speed, style, tradeoff, labels, sections, legend = (
    load(f"drawing.{name}") for name in ("page", "speed", "style", "tradeoff", "labels", "sections", "legend")
)
PICTURES = {
    str(picture.path.relative_to(store.ROOT)): picture for picture in plot.everything() if picture.path.exists()
}
each_picture = pytest.mark.parametrize("name", PICTURES)
RATES = {"forward", "backward", "train", "decode"}


@cache
def figure(name):
    """A picture as matplotlib has it, laid out."""
    with matplotlib.rc_context(page.SETTINGS):
        drawn = PICTURES[name].make()
        drawn.draw_without_rendering()
    return drawn


def shown_texts(drawn):
    """Every text that is visible. Axes also keep ticks that lie outside of what they show."""
    hidden = set()
    for axes in drawn.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            hidden |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    found = drawn.findobj(matplotlib.text.Text)
    return [text for text in found if text.get_visible() and text.get_text().strip() and text not in hidden]


def rows_of(name):
    return [row for path in PICTURES[name].sources if path.suffix == ".jsonl" for row in store.read(path)]


def test_every_preset_with_rates_has_its_picture():
    expected = {
        str(path.with_suffix(".svg").relative_to(store.ROOT))
        for path in store.RESULTS.glob("*/*.jsonl")
        if path.stem != "run" and store.read(path)[0]["kind"] in RATES | {"accuracy", "models"}
    }
    others = {"profiles/h200/roofline.svg", "bench/results/nvidia-h200/accuracy-speed.svg"}
    assert set(PICTURES) == expected | others
    committed = {str(path.relative_to(store.ROOT)) for path in store.RESULTS.glob("*/*.svg") if path.stem != "run"}
    assert committed == expected | others - {"profiles/h200/roofline.svg"}  # no picture is left of rows that went


@pytest.mark.drawing
@each_picture
def test_the_committed_file_is_that_of_the_committed_rows(name):
    picture = PICTURES[name]
    committed = picture.path.read_text()
    assert not picture.stale, "`qflash report` draws it anew"
    by = re.search(r"Matplotlib v([\d.]+)", committed)[1]
    if by != matplotlib.__version__:
        pytest.skip(f"drawn by matplotlib {by}; this one is {matplotlib.__version__}")
    assert page.render(picture.make, picture.digest) == committed, "`qflash report` draws it anew"


@each_picture
def test_sizes_at_900_pixels(name):
    text = PICTURES[name].path.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups())
    assert f'width="{width:g}pt"' in text and width / page.PX == page.WIDTH == 900
    assert 250 < height / page.PX < 900
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", text)]
    assert sizes and min(sizes) * 900 / width >= 11


@pytest.mark.drawing
@each_picture
def test_texts_do_not_overlap_and_stay_on_the_page(name):
    drawn = figure(name)
    renderer = drawn.canvas.get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in shown_texts(drawn)]
    for (one, box), (other, another) in combinations(boxes, 2):
        assert not box.overlaps(another), f"{one!r} lies on {other!r}"
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0, text
        assert box.x1 <= drawn.bbox.x1 and box.y1 <= drawn.bbox.y1, text


@pytest.mark.drawing
@each_picture
def test_texts_do_not_lie_on_markers(name):
    drawn = figure(name)
    renderer = drawn.canvas.get_renderer()
    texts = [(text.get_text(), text.get_window_extent(renderer)) for text in shown_texts(drawn)]
    for axes in drawn.axes:
        for line in axes.lines:
            if line.get_marker() in ("None", "|"):
                continue
            for x, y in axes.transData.transform(line.get_xydata()):
                for text, box in texts:
                    assert not (box.x0 < x < box.x1 and box.y0 < y < box.y1), f"{text!r} lies on a marker"


@pytest.mark.drawing
@each_picture
def test_every_candidate_has_its_name_and_its_colour(name):
    drawn, rows = figure(name), rows_of(name)
    texts = {text.get_text() for text in shown_texts(drawn)}
    shown = [row for row in rows if name != "profiles/h200/roofline.svg" or row["kernel"] in presets.LADDER]
    parts = {row["candidate"] for row in shown if row.get("kernel") and sections.is_part(row)}
    candidates = {row["candidate"] for row in shown}
    if name.endswith("roofline.svg"):
        texts = {f"qflash {text.partition(',')[0]}" for text in texts}
    if name.endswith("accuracy-speed.svg"):
        parts |= {"per-tensor FP8 (simulated)"}  # it was simulated, so it has no speed
    assert candidates - parts <= texts
    colours = {line.get_color() for axes in drawn.axes for line in axes.lines}
    colours |= {matplotlib.colors.to_hex(bar.get_edgecolor()) for axes in drawn.axes for bar in axes.patches}
    colours |= {matplotlib.colors.to_hex(bar.get_facecolor()) for axes in drawn.axes for bar in axes.patches}
    for candidate in candidates - parts:
        assert style.known(candidate).colour.light in colours, candidate


@each_picture
def test_every_candidate_is_in_the_table_of_colours(name):
    unknown = {row["candidate"] for row in rows_of(name) if style.known(row["candidate"]) is None}
    assert not unknown, "bench/drawing/style.py has no line for them"


@pytest.mark.parametrize(
    "name", [name for name in PICTURES if "results" in name and not re.search("accuracy|models", name)]
)
def test_every_row_is_drawn_once_where_it_belongs(name):
    rows = rows_of(name)
    drawn = figure(name)
    by_title = {axes.get_title(): axes for axes in drawn.axes}
    found = sections.sections(rows)
    assert len(drawn.axes) == sum(len(section.panels) for section in found)
    expected = sorted(section.rate(row) for section in found for row in section.rows)
    bars = [bar.get_height() for axes in drawn.axes for bar in axes.patches]
    points = [y for axes in drawn.axes for line in axes.lines if line.get_marker() != "None" for y in line.get_ydata()]
    assert sorted([*bars, *points]) == expected
    for section in found:
        for title in section.panels if not section.bars else ():
            assert by_title[title].get_xscale() == "log" and by_title[title].xaxis.get_transform().base == 2
            assert section.kind == "decode" or re.fullmatch(r"D = \d+, (full|causal)", title)


def test_a_bar_for_each_contender_of_a_model():
    name = "bench/results/nvidia-h200/models.svg"
    rows = [row for row in rows_of(name) if "skipped" not in row]
    points = {(row["model"], row["B"], row["prompt"]) for row in rows}
    assert len(figure(name).axes) == len(points) > 1
    assert [bar.get_width() for axes in figure(name).axes for bar in axes.patches] == [
        row["decode_tokens_s"] for row in rows
    ]


def test_the_limits_are_drawn():
    def heights(preset):
        axes = figure(f"bench/results/nvidia-h200/{preset}.svg").axes
        return [{float(line.get_ydata()[0]) for line in one.lines if line.get_marker() == "None"} for one in axes]

    assert (limits.SIXTEEN_BITS["h200"].rate, limits.INT8["h200"].rate) == (912, 1761)
    assert heights("sm90") == [{912}] * 7
    assert heights("sm90_int8") == [{912, 1761}] * 6
    assert heights("ladder") == [{912, 1761}] * 4
    assert heights("cuda") == [{59}] * 4 + [{912}] * 4
    said = {text.get_text() for text in shown_texts(figure("bench/results/nvidia-h200/sm90_int8.svg"))}
    assert {"912", "1761", "limit: INT8 tensor cores, 1761 TFLOP/s"} <= said


# Colours


def luminance(colour):
    parts = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in matplotlib.colors.to_rgb(colour)
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("side", ["light", "dark"])
def test_colours_are_seen_on_both_pages(side):
    paper = getattr(style.PAPER, side)
    for ink in (style.INK, style.QUIET):  # text
        assert contrast(getattr(ink, side), paper) >= 4.5
    for colour in style.every_colour():
        if colour not in (style.PAPER, style.GRID):
            assert contrast(getattr(colour, side), paper) >= 3, colour


def test_a_colour_stands_for_one_candidate():
    lights = [colour.light for colour in style.every_colour()]
    assert len(set(lights)) == len(lights)  # the dark half is found by the light one
    for name in PICTURES:
        found = style.looks(row["candidate"] for row in rows_of(name))
        if "rope" not in name:  # one kernel, with and without
            whole = {one: look for one, look in found.items() if look.filled}
            assert len({look.colour for look in whole.values()}) == len(whole), name
        if "models" not in name:  # bars, whose names stand beside them
            assert len(set(found.values())) >= len(found) - sum("(" in one for one in found), name


@each_picture
def test_every_colour_has_its_dark_half(name):
    text = PICTURES[name].path.read_text()
    rules, drawing = text.split("</style>", 1)
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawing))
    assert used <= {colour.light for colour in style.every_colour()}
    for colour in style.every_colour():
        if colour.light in used:
            assert f'[style*="fill: {colour.light}"]{{fill:{colour.dark}!important}}' in rules
            assert f'[style*="stroke: {colour.light}"]{{stroke:{colour.dark}!important}}' in rules
    assert "<text" in drawing and "fill: #000000" not in drawing


def test_candidates_without_a_line_take_spare_looks():
    found = style.looks([*(f"peer {index}" for index in range(8)), "qflash cpu", "qflash fa_int8 (kernel alone)"])
    assert found["qflash cpu"] == style.KERNELS["cpu"]
    assert found["qflash fa_int8 (kernel alone)"].colour == style.KERNELS["fa_int8"].colour
    assert not found["qflash fa_int8 (kernel alone)"].filled
    assert found["peer 0"] == style.SPARE[0] != found["peer 1"]


# Made-up rows


def row(candidate, gflops, **changes):
    kernel = candidate.removeprefix("qflash ") if candidate.startswith("qflash") else None
    base = {"preset": "cpu", "machine": "m-2c", "cpu": "A Processor", "isa": "avx2", "threads": 2, "gpu": None}
    base |= {"driver": None, "commit": "abc", "versions": {"torch": "2.13.0"}, "kind": "forward", "B": 1, "Tq": 1024}
    base |= {"Tk": 1024, "Hq": 8, "Hkv": 8, "D": 64, "dtype": "float32", "causal": True, "candidate": candidate}
    base |= {"kernel": kernel, "precision": "native", "rel_l2": 3e-7, "gflops": gflops, "us": {"p50": 1e3 / gflops}}
    return base | changes


def svg(rows):
    return page.render(partial(speed.figure, rows))


def test_any_number_of_candidates_fits():
    many = [row(f"{who} {index}", 1.0) for who in ("qflash k", "peer") for index in range(12)]
    text = svg(many)
    assert "peer 11" in text and "qflash k 11" in text
    assert legend.lines([one["candidate"] for one in many]) == 4
    assert not sections.sections([row("x", 1.0, kind="overhead")])


def test_parts_of_a_kernels_work_are_drawn_where_there_is_room():
    alone = row("qflash fa_int8 (kernel alone)", 2.0)
    few = [row("qflash fa_int8", 1.0), alone, row("torch FA2", 1.0)]
    many = [*few, *(row(f"peer {index}", 1.0) for index in range(4))]
    assert "kernel alone" in svg(few) and "are in the tables" not in svg(few)
    assert "kernel alone" not in svg(many) and "are in the tables" in svg(many)


def test_bars_for_few_lengths_lines_for_more_and_logarithms_for_the_ladder():
    def of(lengths, rates=(1.0, 2.0)):
        return sections.sections([row("x", rate, Tk=length) for length in lengths for rate in rates])[0]

    assert of((512, 1024)).bars and not of((512, 1024, 2048)).bars
    assert of((512, 1024, 2048), (1.0, 30.0)).steep and not of((512, 1024, 2048)).steep
    assert not of((512,), (1.0, 30.0)).steep  # bars stand on zero


def test_presets_of_one_run_have_panels_of_their_own():
    slow, fast = row("qflash cpu", 200.0), row("qflash fa", 30e3, preset="cuda", gpu="NVIDIA H200")
    found = sections.sections([slow, fast])
    assert [(section.preset, section.unit) for section in found] == [("cpu", "GFLOP/s"), ("cuda", "TFLOP/s")]
    text = svg([slow, fast])
    assert "cpu, float32" in text and "cuda, float32" in text and "limit: float32 FMA, 59 TFLOP/s" in text


def test_decoding_has_a_panel_per_batch_and_heads():
    def of(batch, length, **heads):
        return row("qflash cpu", 1.0, kind="decode", gbs=5.0, B=batch, Tk=length, D=128, causal=False, **heads)

    rows = [of(batch, length) for batch in (1, 8, 64) for length in (2048, 4096, 8192)]
    rows += [of(1, length, Hq=32, Hkv=4) for length in (2048, 4096, 8192)] + [of(16, 2048)]
    (section,) = sections.sections(rows)
    assert section.columns == 4 and section.depth == 2
    assert [section.place(index) for index in range(5)] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    assert list(section.panels)[:2] == ["B = 1, H = 8/8, D = 128", "B = 1, H = 32/4, D = 128"]
    assert svg(rows).count("GB/s of K and V") == 2


def test_a_limit_out_of_reach_is_not_drawn():
    def of(gflops, **changes):
        base = {"gpu": "NVIDIA H200", "dtype": "bfloat16"} | changes
        return [limit.rate for limit in sections.sections([row("x", gflops, **base)])[0].limits]

    assert of(400e3) == [912] and of(300e3) == []
    assert of(800e3, precision="int8") == [912, 1761] and of(600e3, precision="int8") == [912]
    assert of(40e3, dtype="float32") == [59]
    assert of(1.0, kind="decode", gbs=3000.0) == [4270] and of(1.0, kind="decode", gbs=1000.0) == []
    assert of(800e3, gpu="NVIDIA T4") == [] and of(400e3, gpu=None) == []


def test_names_are_spread_without_changing_their_order():
    assert labels.spread([0, 100], 10) == [0, 100]
    assert labels.spread([0, 4, 100], 10) == [-3, 7, 100]
    assert labels.spread([4, 0, 1], 3) == pytest.approx([14 / 3, -4 / 3, 5 / 3])
    close = labels.spread([0, 9, 18, 19], 10)
    assert all(b - a >= 10 - 1e-9 for a, b in pairwise(close))


def test_speed_is_held_against_the_fastest_16_bit_peer_of_each_problem():
    def of(candidate, us, error, **changes):
        base = {"Tk": 4096, "Tq": 4096, "D": 128, "us": {"p50": us}, "rel_l2": error}
        return row(candidate, 1.0, **base | changes)

    rows = [
        of("qflash sm90_int8", 80.0, 0.01),
        of("qflash sm90_int8 (kv ready)", 50.0, 0.01),
        of("qflash sm90_int8 (kernel alone)", 10.0, 0.01),
        of("FlashAttention 3", 100.0, 0.002),
        of("torch FA2", 200.0, 0.002),
        of(tables.FP8, 40.0, 0.05),
        of("qflash sm90_int8", 80.0, 0.01, Tk=8192),
        of("torch FA2", 60.0, 0.002, Tk=8192),
        of("torch FA2", 1.0, 0.002, Tk=2048),
    ]
    assert tradeoff.points(rows) == {
        128: {
            "qflash sm90_int8": [(0.01, 1.25), (0.01, 0.75)],
            "qflash sm90_int8 (kv ready)": [(0.01, 2.0)],
            "FlashAttention 3": [(0.002, 1.0)],
            "torch FA2": [(0.002, 0.5), (0.002, 1.0)],
            tables.FP8: [(0.05, 2.5)],
        }
    }
    errors = [of("a", 1.0, error) for error in (0.1, 0.3, 0.2)]
    assert tradeoff.worst(errors) == {(128, "a"): 0.3}


def test_a_picture_is_stale_when_its_rows_change(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    monkeypatch.setattr(store, "ROOT", tmp_path)
    monkeypatch.setattr(limits, "MEMORY", {})
    path = tmp_path / "m-2c" / "cpu.jsonl"
    store.write(path, [row("qflash cpu", 200.0)])
    assert plot.update(check_only=True) == ["m-2c/cpu.svg"] and not path.with_suffix(".svg").exists()
    assert plot.draw_from(path) == [path.with_suffix(".svg")]
    assert plot.update(check_only=True) == [] == plot.update()
    store.write(path, [row("qflash cpu", 300.0)])
    assert plot.update(check_only=True) == ["m-2c/cpu.svg"] == plot.update()
    assert plot.update(check_only=True) == []
    store.write(tmp_path / "m-2c" / "run.jsonl", [row("qflash cpu", 1.0)])
    assert plot.update() == []  # `qflash run` draws that one


def test_rows_that_feed_two_pictures_draw_both(tmp_path, monkeypatch):
    monkeypatch.setattr(plot.Picture, "draw", lambda picture: True)
    for name in (plot.QUANTIZED, "int8-accuracy"):
        store.write(tmp_path / f"{name}.jsonl", store.committed(name)["nvidia-h200"])
    assert [path.name for path in plot.draw_from(tmp_path / "sm90_int8.jsonl")] == [
        "sm90_int8.svg",
        "accuracy-speed.svg",
    ]
    assert [path.name for path in plot.draw_from(tmp_path / "int8-accuracy.jsonl")] == [
        "int8-accuracy.svg",
        "accuracy-speed.svg",
    ]


def test_a_roofline_drawn_alone_is_the_same(tmp_path):
    path = load("roofline").draw("h200", tmp_path / "roofline.svg")
    assert not plot.Picture(path, PICTURES["profiles/h200/roofline.svg"].sources, None).stale


def test_without_matplotlib_nothing_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(plot.machine, "version", lambda name: None)
    path = tmp_path / "cpu.jsonl"
    store.write(path, [row("qflash cpu", 200.0)])
    assert plot.draw_from(path) == [] and not path.with_suffix(".svg").exists()
    assert plot.update() == []
