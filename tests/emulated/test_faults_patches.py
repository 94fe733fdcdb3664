"""The patched copy that provoked faults are compiled from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qflash.backends import cuda
from qflash.dispatch import VARIANTS
from qflash.testing import emulator
from qflash.testing.faults import Fault, patched_unit

FILE = "attn/wgmma/producer.cuh"
EMPTY = Fault(FILE, "at.wait_empty(ring);")


def patched(faults: list[Fault], folder) -> str:
    unit = patched_unit(cuda.unit_of(VARIANTS["sm90_fwd"], "bfloat16", 64, 90), faults, folder)
    assert unit.source.is_relative_to(folder) and all(path.is_relative_to(folder) for path in unit.include_dirs)
    return (folder / "csrc" / FILE).read_text()


def test_faults_of_one_place_and_of_places_that_overlap(tmp_path):
    """Whatever their order, each has its own branch, and the code as it is stands in the last."""
    after = Fault(FILE, "mbarrier_arrive_expect(full, Tile::kBytes);",
                  within="at.wait_empty(ring);\n  mbarrier_arrive_expect(full, Tile::kBytes);")  # fmt: skip
    faults = [EMPTY, after, replace(EMPTY, instead="f();"), Fault(FILE, "work_at.release(*s.work_ring)")]
    text = patched(faults, tmp_path)
    assert "if (qf_provoked == 3) { f(); } else if (qf_provoked == 1) {  } else at.wait_empty(ring);" in text
    assert "if (qf_provoked == 2) {  } else mbarrier_arrive_expect(full, Tile::kBytes);" in text
    assert "(qf_provoked == 4 ? (void)(0) : (void)(work_at.release(*s.work_ring)))" in text
    assert (emulator.CSRC / FILE).read_text().count("qf_provoked") == 0


@pytest.mark.parametrize(
    ("fault", "count"), [(Fault(FILE, "no such line;"), 0), (Fault(FILE, "at.wait_empty(*s.work_ring);"), 2)]
)
def test_code_that_moved_is_an_error(tmp_path, fault, count):
    with pytest.raises(ValueError, match=f"occurs {count} times in {FILE}; allowed: once"):
        patched([fault], tmp_path)
