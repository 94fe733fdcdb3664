"""The results of an unfinished run, problem by problem, so that an interrupted run can continue where it stopped.

The first line of a file NAME.part next to the rows identifies the run: commit, machine, versions, and how it measures.
Each further line is a finished problem. The next run of that name takes the rows of these problems from it, if all of
that is the same; `rows.save` removes it.
"""

from __future__ import annotations

import json
from typing import Any

from bench import rows as store

Row = dict[str, Any]


class Journal:
    """The finished problems of a run.

    shared: the part of a row that all rows of a run share. how: what else determines the set of rows and their quality.
    """

    def __init__(self, shared: Row, how: Row):
        self._path = store.part_path(shared["machine"], shared["preset"])
        self._run = json.loads(json.dumps(shared | how))
        # For a tree with uncommitted changes, or without a commit, it is unknown whether it is still the same.
        commit = shared.get("commit", "unknown")
        told = commit != "unknown" and not commit.endswith("+")
        self._done = _read(self._path.read_text(), self._run) if told and self._path.exists() else {}
        self._path.unlink(missing_ok=True)
        for case, found in self._done.items():
            self._write(case, found)

    def __len__(self) -> int:
        return len(self._done)

    def rows_of(self, case: Any) -> list[Row] | None:
        """The rows measured for a problem; None if it is still to be measured."""
        return self._done.get(repr(case))

    def add(self, case: Any, found: list[Row]) -> None:
        """Store the rows of a problem: they are in the file on return. A problem without rows is tried again."""
        if found:
            self._write(repr(case), found)

    def _write(self, case: str, found: list[Row]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [[case, found]] if self._path.exists() else [self._run, [case, found]]
        with self._path.open("a") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _read(text: str, run: Row) -> dict[str, list[Row]]:
    """The rows of each problem, from a file's complete lines. Empty if it belongs to another run."""
    first, *lines = [json.loads(line) for line in text.split("\n")[:-1]] or [None]
    return dict(lines) if first == run else {}
