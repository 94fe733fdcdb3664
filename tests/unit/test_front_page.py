"""What `qflash report` writes into the README: features, six results, where INT8 pays, the contract."""

import re

import pytest

from qflash import dispatch
from qflash.cli.bench import load
from qflash.testing import compare

front_page, store = load("front_page"), load("rows")


def cells(table: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    return {line[0]: line[1:] for line in lines[2:]}


def test_features_name_the_kernel_that_dispatch_chooses():
    found = cells(front_page.features())
    assert set(found) == set(front_page.FEATURES)
    assert found["float32"] == ["[cpu](docs/kernels/cpu.md)", *["[fa](docs/kernels/fa.md)"] * 3]
    assert found["bfloat16"][1:3] == ["[fa](docs/kernels/fa.md)", "[fa_mma](docs/kernels/fa_mma.md)"]
    # A kernel by its name on a page of another name; several of one page by the page's.
    assert found["few queries on a long cache (decoding)"][3] == "[sm90_decode](docs/kernels/decode.md)"
    assert found["softmax, layer norm, cross entropy"][0] == "[reductions](docs/kernels/reductions.md)"


def test_a_feature_without_a_kernel_is_a_dash(monkeypatch):
    def only_cpu(spec):
        if spec.device == "cuda":
            raise dispatch.NoKernelError("none")
        return dispatch.BY_NAME["cpu"]

    monkeypatch.setattr(front_page, "choose", only_cpu)
    assert cells(front_page.features())["gradients"] == ["[cpu](docs/kernels/cpu.md)", "–", "–", "–"]


def test_where_int8_pays_is_what_explain_says():
    found = cells(front_page.pays_from())
    rows = sum(len(kernel.pays_from) for kernel in dispatch.KERNELS)
    assert len(found) == rows > 0
    least = dict(dispatch.BY_NAME["sm90_int8"].pays_from)[("int8", "arrays")]
    tokens = dict(least)[256]
    assert found['`sm90_int8`, `"int8"`, k and v as arrays'][-1] == f"{tokens} tokens"


def test_there_are_six_results_each_with_its_page():
    assert len(front_page.RESULTS) == 5  # and text from a model
    lines = front_page.results().splitlines()[2:]
    assert len(lines) == 6
    for line in lines:
        (page,) = re.findall(r"\]\((.*?)\)", line)
        assert (store.ROOT / page).exists()


def test_a_problem_that_was_not_measured_has_no_line(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    assert len(front_page.results().splitlines()) == 2
    assert cells(front_page.contract())["float32"][-1] == "–"


@pytest.mark.parametrize("name", ["INT8", "INT8_FP8"])
def test_the_contract_has_the_tested_figures(name, monkeypatch):
    monkeypatch.setitem(getattr(compare, name), "cosine", 0.123)
    assert front_page.contract().count("cosine ≥ 0.123 ") == 1


def test_the_contract_has_five_lines():
    assert len(cells(front_page.contract())) == 5
