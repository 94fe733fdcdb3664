"""What an unfinished run has measured, problem by problem, so that a run that is cut off can go on where it was.

A file NAME.part beside the rows says in its first line what the run is: commit, machine, versions, and how it measures.
Each further line is a problem that is done. The next run of that name takes the rows of these problems from it, where
it is the same in all that; `rows.save` removes it.
"""

from __future__ import annotations

import json
from typing import Any

from bench import rows as store

Row = dict[str, Any]


class Journal:
    """The problems of a run that are done.

    shared: the part of a row that all of a run have. how: what else decides which rows there are and how good they are.
    """

    def __init__(self, shared: Row, how: Row):
        self._path = store.part_path(shared["machine"], shared["preset"])
        self._run = json.loads(json.dumps(shared | how))
        # Of a tree that has changed since its commit, or of no commit, nobody can tell whether it is still the same.
        commit = shared.get("commit", "unknown")
        told = commit != "unknown" and not commit.endswith("+")
        self._done = _read(self._path.read_text(), self._run) if told and self._path.exists() else {}
        self._path.unlink(missing_ok=True)
        for case, found in self._done.items():
            self._write(case, found)

    def __len__(self) -> int:
        return len(self._done)

    def rows_of(self, case: Any) -> list[Row] | None:
        """What was measured of a problem; None if it is still to be."""
        return self._done.get(repr(case))

    def add(self, case: Any, found: list[Row]) -> None:
        """Keep the rows of a problem: they are in the file when this returns. One without rows is tried again."""
        if found:
            self._write(repr(case), found)

    def _write(self, case: str, found: list[Row]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [[case, found]] if self._path.exists() else [self._run, [case, found]]
        with self._path.open("a") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _read(text: str, run: Row) -> dict[str, list[Row]]:
    """The rows of each problem, of a file's whole lines. Nothing where it is of another run."""
    first, *lines = [json.loads(line) for line in text.split("\n")[:-1]] or [None]
    return dict(lines) if first == run else {}
