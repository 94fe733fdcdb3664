"""The result of `explain`: which kernel serves a call, why the others do not, and how gradients are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qflash import dispatch
from qflash.call.op import Plan
from qflash.call.spec import Spec
from qflash.ops.backward_memory import Scores, ds_within, get_backward_memory
from qflash.typing import Layout

_MANY_HEADS = 128  # more heads than this and than tokens are probably a mistaken layout


@dataclass(frozen=True)
class Explanation:
    """Which kernel would run, and why the others would not. Returned by `explain`; print it.

    Attributes:
        kernel: its name, or None if no kernel supports the call.
        spec: the properties of the call that selected it.
        rows: (kernel, verdict, reason) for every kernel.
        notes: remarks on the choice.
        backward: the kernel that computes the gradients of such a call, or None if there is none.
        dq: how that kernel computes dQ, if it has more than one way.
    Example:
        >>> import numpy as np
        >>> import qflash
        >>> x = np.zeros((1, 16, 2, 64), np.float32)
        >>> name, verdict, reason = qflash.explain(x, x, x).rows[0]
        >>> name, verdict
        ('cpu', 'runs')
    """

    kernel: str | None
    spec: Spec
    rows: list[tuple[str, str, str]]
    notes: tuple[str, ...] = ()  # remarks on the choice
    backward: str | None = None
    dq: str = ""

    @property
    def title(self) -> str:
        """The choice in one line."""
        place = f"compute capability {self.spec.arch / 10}" if self.spec.arch else "the CPU"
        return f"{self.kernel or 'no kernel'} serves this problem on {place}"

    def __str__(self) -> str:
        return "\n".join([self.title, dispatch.table(self.shown), *self.lines])

    @property
    def shown(self) -> list[tuple[str, str, str]]:
        """The rows that are printed: all but kernels of another device that would reject the call there too."""
        return [row for row in self.rows if row[0] not in self._nowhere]

    @property
    def lines(self) -> list[str]:
        """What is printed below the rows."""
        nowhere = [f"not for this call on any device: {', '.join(self._nowhere)}"] if self._nowhere else []
        return [*nowhere, self.gradients, *(f"note: {note}" for note in self.notes)]

    @property
    def _nowhere(self) -> tuple[str, ...]:
        """The kernels named without their reasons. If no kernel serves the call, every reason is shown: it may help."""
        if self.kernel is None:
            return ()
        there = [kernel for kernel in dispatch.kernels_of(self.spec.op) if kernel.device != self.spec.device]
        return tuple(kernel.name for kernel in there if len(dispatch.reasons(kernel, self.spec)) > 1)

    @property
    def gradients(self) -> str:
        """How gradients are computed, in one line."""
        return f"gradients: {self.backward or 'none'}" + (f", {self.dq}" if self.dq else "")


def explanation_of(plan: Plan, arch: int, layout: Layout = "bthd", backward_memory: int | None = None) -> Explanation:
    """The explanation of a checked attention call on a device of compute capability `arch`/10 (0: the CPU).

    backward_memory: the memory limit of its gradients; None: `get_backward_memory()`.
    """
    limit = get_backward_memory() if backward_memory is None else backward_memory
    spec, kernel = plan.spec(arch), plan.kernel
    if kernel is not None:
        dispatch.choose(spec, kernel)  # raises for a name that is unknown or cannot serve
    rows = dispatch.verdicts(spec, kernel)
    chosen = next((name for name, verdict, _ in rows if verdict == "runs"), None)
    sizes: dict[str, Any] = dict(plan.fields)
    q_len, k_len, kv_heads = (sizes[name] for name in ("q_len", "k_len", "kv_heads"))
    notes = []
    if not spec.packed and kv_heads > max(q_len, k_len, _MANY_HEADS):
        notes.append(
            f"k has {kv_heads} heads and {k_len} tokens; if that is the wrong way round, pass the "
            f"other layout than {layout!r}"
        )
    notes += dispatch.notes(spec, chosen, min(q_len, k_len))
    backward = dispatch.backward_of(spec)
    if backward is None:
        return Explanation(chosen, spec, rows, tuple(notes))
    return Explanation(chosen, spec, rows, tuple(notes), backward.name, _way_of_dq(plan, spec, backward, limit))


def _way_of_dq(plan: Plan, spec: Spec, backward: dispatch.Kernel, limit: int) -> str:
    """How a backward kernel computes dQ of a call, as text; "" if it has only one way."""
    if backward.drops_ds is None:
        return ""
    again = "dQ from S and dP computed again"
    if why := backward.drops_ds(spec):
        return f"{again}: {why}"
    sizes: dict[str, Any] = dict(plan.fields)
    batch, q_heads, kv_heads, q_len, k_len, left, right = (
        sizes[name] for name in ("batch", "q_heads", "kv_heads", "q_len", "k_len", "window_left", "window_right")
    )
    scores = Scores(batch, q_heads, kv_heads, q_len, k_len, (left, right), plan.for_spec.packed)
    if 0 in (batch, q_len, k_len):
        return ""
    if scores.packed:
        return f"{again}: sequences are packed"
    kept = ds_within(scores, limit)
    if kept is None:
        return f"{again}: {limit} bytes (set_backward_memory) hold too few heads of dS"
    turns = "" if kept.sections == 1 else f", in {kept.sections} turns"
    return f"dQ from dS kept in {kept.nbytes} bytes{turns}"
