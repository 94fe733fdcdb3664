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
