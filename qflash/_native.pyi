"""What csrc/bindings exports to Python: launch trampolines, settings of the CPU engine, XLA handlers.

Addresses are plain ints, 0 for null. tests/unit/test_native_stub.py compares these names with the module's.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, SupportsIndex

ABI: Final[str]  # a digest of op_layouts
cpu_entries: Final[dict[str, int]]  # addresses of the CPU kernels by name, and of "status_text"
op_layouts: Final[dict[str, tuple[int, dict[str, tuple[int, str]]]]]  # {struct: (bytes, {field: (offset, kind)})}

class Call:
    """A prepared kernel call: its packed struct without addresses. Immutable, so threads can share it.

    Raises KeyError for a struct that no kernel takes or a pointer it lacks, ValueError for params of another size.
    """

    def __new__(
        cls,
        struct: str,
        params: bytes,
        pointers: Sequence[str],
        entry: int,
        status_text: int,
        workspace: int,
        context: int = 0,
    ) -> Call: ...
    @property
    def workspace_bytes(self) -> int: ...
    def __call__(self, *args: Any) -> None:
        """Takes addresses, or arrays with a data_ptr(), in the order of `pointers`; workspace, stream, num_threads."""

class Cubins:
    """A kernel in machine code from another compiler, launched through NVIDIA's driver.

    choices: (conditions, passes) in order of preference. A pass is its grid and the sources of its arguments: "field"
    or "has" with the offset of a field, "region" with the index of a region. Conditions, grids and regions (their
    offsets in the workspace, then its end) are numbers computed from fields: (operation, operand) in postfix order.
    compile(choice): returns (machine code, kernel, bytes of shared memory, threads per block) for each pass of a
    choice.
    """

    def __init__(
        self,
        struct: str,
        choices: Sequence[tuple[Sequence[_Size], Sequence[tuple[_Size, Sequence[tuple[str, int]]]]]],
        regions: Sequence[_Size],
        compile: Callable[[int], Sequence[tuple[bytes, str, int, int]]],
    ) -> None: ...
    def load(self, choice: int) -> None:
        """Compile a choice and load it into the driver now, instead of on first use."""

    @property
    def functions(self) -> tuple[int, int, int, int]:
        """(entry, status_text, workspace, context), valid for the lifetime of the object."""

_Size = Sequence[tuple[str, int]]

def plan_key(
    op: object, arrays: Sequence[Any], words: Sequence[Any], classes: tuple[type, ...], torch: bool
) -> tuple[Any, ...] | None:
    """The key of a call in the plan cache; None if an array is neither None nor of one of `classes`."""

def cpu_isa() -> str:
    """The instruction set used by the CPU engine: amx, avx512, avx2 or generic."""

def get_num_threads() -> int:
    """The number of threads used by a call on the CPU. Default: one per available core."""

def set_num_threads(num_threads: SupportsIndex, /) -> None:
    """Set the number of threads used by calls on the CPU, 1 or more. Applies to the whole process."""

# Only in modules built with jaxlib's headers.

def xla_targets() -> list[tuple[str, str, object]]:
    """The XLA FFI handlers to register: (name, XLA platform, capsule)."""

def register_xla_kernel(
    key: str, entry: int, status_text: int, workspace: int, takes: str, context: int = 0
) -> None: ...
def set_xla_resolver(resolver: Callable[[str], object], /) -> None:
    """`resolver` is called with a key missing from the registry; it must register the key or raise."""
