"""What csrc/bindings gives Python: launch trampolines, the CPU engine's switches, XLA handlers.

Addresses are plain ints, 0 for null. tests/unit/test_native_stub.py compares these names with the module's.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, SupportsIndex

ABI: Final[str]  # a digest of op_layouts
cpu_entries: Final[dict[str, int]]  # addresses of the CPU kernels by name, and of "status_text"
op_layouts: Final[dict[str, tuple[int, dict[str, tuple[int, str]]]]]  # {struct: (bytes, {field: (offset, kind)})}

class Call:
    """A prepared call of a kernel: its struct with everything but addresses. Immutable, so threads share it.

    KeyError for a struct that no kernel takes or a pointer it lacks, ValueError for params of another size.
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
        """Addresses, or arrays that have a data_ptr(), in the order of `pointers`; workspace, stream, num_threads."""

class Cubins:
    """A kernel that is machine code of somebody else's compiler, launched through NVIDIA's driver.

    choices: (conditions, passes) by falling preference; a pass is (its grid, where its arguments come from: "field" or
    "has" with the offset of a field, "region" with the index of a region). Conditions, grids and regions, where they
    begin in the workspace and last where it ends, are numbers made of fields: (operation, operand) in postfix order.
    compile(choice): (machine code, kernel, bytes of shared memory, threads of a block) for each pass of a choice.
    """

    def __init__(
        self,
        struct: str,
        choices: Sequence[tuple[Sequence[_Size], Sequence[tuple[_Size, Sequence[tuple[str, int]]]]]],
        regions: Sequence[_Size],
        compile: Callable[[int], Sequence[tuple[bytes, str, int, int]]],
    ) -> None: ...
    def load(self, choice: int) -> None:
        """Compile a choice and hand it to the driver now, not when a call first needs it."""

    @property
    def functions(self) -> tuple[int, int, int, int]:
        """(entry, status_text, workspace, context), for as long as the object lives."""

_Size = Sequence[tuple[str, int]]

def plan_key(
    op: object, arrays: Sequence[Any], words: Sequence[Any], classes: tuple[type, ...], torch: bool
) -> tuple[Any, ...] | None:
    """A key of the cache of plans; None where an array is neither None nor of one of `classes`."""

def cpu_isa() -> str:
    """The instruction set that the CPU engine runs: amx, avx512, avx2 or generic."""

def get_num_threads() -> int:
    """How many threads a call on the CPU uses: by default, one for every core it may use."""

def set_num_threads(num_threads: SupportsIndex, /) -> None:
    """Let calls on the CPU use `num_threads` threads, 1 or more. It holds for the process."""

# The module has these where it was built with jaxlib's headers.

def xla_targets() -> list[tuple[str, str, object]]:
    """The XLA FFI handlers to register: (name, XLA platform, capsule)."""

def register_xla_kernel(
    key: str, entry: int, status_text: int, workspace: int, takes: str, context: int = 0
) -> None: ...
def set_xla_resolver(resolver: Callable[[str], object], /) -> None:
    """`resolver` is called with a key that the registry does not know; it must register it or raise."""
