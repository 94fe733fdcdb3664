"""What an unfinished run has measured, problem by problem, so that a run that is cut off can go on where it was.

A file NAME.part beside the rows has a line for each problem that is done. The next run of that name takes the rows of
these problems from it, where they are of the same commit, machine and versions; `rows.save` removes it.
"""

from __future__ import annotations

import json
from typing import Any

from bench import rows as store

Row = dict[str, Any]


class Journal:
    """The problems of a run that are done. `shared`: the part of a row that all of a run have."""

    def __init__(self, shared: Row):
        self._path = store.part_path(shared["machine"], shared["preset"])
        # Of a tree that has changed since its commit, or of no commit, nobody can tell whether it is still the same.
        commit = shared.get("commit", "unknown")
        told = commit != "unknown" and not commit.endswith("+")
        self._done = dict(_read(self._path.read_text(), shared)) if told and self._path.exists() else {}
        self._path.unlink(missing_ok=True)
        for case, found in self._done.items():
            self._write(case, found)

    def __len__(self) -> int:
        return len(self._done)

    def rows_of(self, case: Any) -> list[Row] | None:
        """What was measured of a problem; None if it is still to be."""
        return self._done.get(repr(case))

    def add(self, case: Any, found: list[Row]) -> None:
        """Keep the rows of a problem: they are in the file when this returns. One without rows is tried again, because
        nothing would say of which commit and machine it was."""
        if found:
            self._write(repr(case), found)

    def _write(self, case: str, found: list[Row]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps([case, found], ensure_ascii=False) + "\n")


def _read(text: str, shared: Row) -> list[tuple[str, list[Row]]]:
    """(problem, its rows) of a file's whole lines. Nothing where one row is not of this run."""
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    ours = all(row.items() >= shared.items() for _, found in lines for row in found)
    return [(case, found) for case, found in lines] if ours else []
