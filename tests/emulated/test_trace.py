"""`qflash trace`: an emulated run in a model of time, as a Chrome trace and as a picture."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from qflash.cli import main
from qflash.testing import Case, emulator
from qflash.testing import trace as traces
from qflash.testing.trace_picture import WIDTH, picture

CASE = Case("trace", 192, 600, 1, 1, 64, dtype="bfloat16", causal=True)
KERNELS = ["sm90_fwd", "sm90_int8_fp8", "fa_mma", "fa"]


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch, library):
    """Kernels of this run's cache."""
    monkeypatch.setattr(emulator, "kernel_library", library)


@pytest.mark.parametrize("kernel", KERNELS)
def test_spans_of_a_row_follow_each_other(kernel):
    spans = traces.trace(kernel, CASE)
    rows = defaultdict(list)
    for span in spans:
        assert 0 <= span.begin <= span.end and span.name
        if span.kind != "arrive":
            assert span.begin < span.end
            rows[span.launch, span.block, span.row].append(span)
    for row in rows.values():
        assert all(before.end <= after.begin for before, after in pairwise(sorted(row, key=lambda span: span.begin)))


def test_a_chrome_trace_names_its_rows_and_says_what_it_is():
    found = json.loads(json.dumps(traces.chrome(traces.trace("sm90_fwd", CASE), "title")))
    assert "not a measurement" in found["otherData"]["time"]
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in found["traceEvents"]
             if event["name"] == "thread_name"}  # fmt: skip
    for role in ("producer, warp 0", "describe_work, warp 1", "inspector, warp 2", "consumer 2, warp 3",
                 "copy of K, stage 1", "tensor cores"):  # fmt: skip
        assert role in named.values()
    for event in found["traceEvents"]:
        assert event["ph"] in ("M", "X", "i") and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["dur"] > 0 and (event["pid"], event["tid"]) in named
    names = {event["name"] for event in found["traceEvents"]}
    assert {"wait: K full, stage 0", "wait: products", "arrive: V empty, stage 1", "S = Q Kᵀ, consumer 0"} <= names


def test_scores_of_the_next_tile_run_under_exponentials():
    """What the design is for: tensor cores work while a consumer weighs."""
    spans = traces.trace("sm90_fwd", CASE)
    weighs = [span for span in spans if span.name == "exponentials" and span.row == "consumer 0, warp 0"]
    products = [span for span in spans if span.kind == "product"]
    assert any(p.begin < w.end and w.begin < p.end for w in weighs[1:] for p in products)


def test_a_trace_and_its_picture_are_the_same_every_time():
    first, second = (traces.trace("sm90_fwd", CASE) for _ in range(2))
    assert first == second and picture(first, "t") == picture(second, "t")


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_picture_is_of_the_width_of_a_page(kernel):
    root = ElementTree.fromstring(picture(traces.trace(kernel, CASE), kernel))
    bars = [item for item in root.iter() if item.tag.endswith("rect")]
    assert int(root.get("width")) == WIDTH <= 900 and len(bars) > 5
    assert all(float(bar.get("x")) >= 0 and float(bar.get("x")) + float(bar.get("width")) <= WIDTH for bar in bars)


def test_the_command_writes_both(tmp_path):
    out, svg = tmp_path / "t.json", tmp_path / "t.svg"
    words = ["--kernel", "sm90_fwd", "--head-dim", "64", "--k-len", "600", "--out", str(out), "--svg", str(svg)]
    done = CliRunner().invoke(main, ["trace", *words])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["traceEvents"] and svg.read_text().startswith("<svg")
    assert "not a measurement" in done.output.replace("\n", " ")


def test_the_command_refuses_what_it_cannot_trace(tmp_path):
    done = CliRunner().invoke(main, ["trace", "--kernel", "cpu", "--svg", str(tmp_path / "t.svg")])
    assert done.exit_code == 2 and "'cpu' is no CUDA kernel of attention; allowed: " in done.output
    done = CliRunner().invoke(main, ["trace", "--kernel", "fa"])
    assert done.exit_code == 2 and "--out file.json" in done.output


def test_the_command_refuses_a_head_dim_that_the_kernel_does_not_serve(tmp_path):
    """It would trace another problem than its title says."""
    done = CliRunner().invoke(main, ["trace", "--kernel", "sm90_fwd", "--head-dim", "63", "--svg", str(tmp_path / "t")])
    assert done.exit_code == 2
    assert "63 is no head_dim that sm90_fwd serves; allowed: 64" in " ".join(done.output.split())
    assert not (tmp_path / "t").exists()


def test_the_command_says_which_file_it_could_not_write(tmp_path):
    svg = tmp_path / "missing" / "t.svg"
    words = ["--kernel", "sm90_fwd", "--head-dim", "64", "--q-len", "64", "--k-len", "64", "--svg", str(svg)]
    done = CliRunner().invoke(main, ["trace", *words])
    assert done.exit_code == 1
    said = "".join(done.output.split())
    assert "missing/t.svg" in said and "Nosuchfileordirectory" in said
