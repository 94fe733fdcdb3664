"""A kernel is added by a row of dispatch.KERNELS and, in CUDA C++, a folder; nothing else knows kernels by name."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import qflash
from qflash import dispatch, machine
from qflash.backends import cuda
from qflash.backends.arch import ARCHES
from qflash.call import cache
from qflash.call.array import Array
from qflash.call.op import Plan
from qflash.call.prepare import prepare
from qflash.call.spec import ACTIVATIONS, KV_KINDS, OP_DTYPES, PRECISIONS, Spec
from qflash.cli.usable import usable_kernels
from qflash.dispatch import Kernel
from qflash.jit import toolchain
from qflash.ops.attention import ATTENTION

PACKAGE = Path(qflash.__file__).parent
CUDA_ROWS = [row for row in dispatch.KERNELS if row.backend == "cuda"]


@pytest.fixture
def add(monkeypatch) -> Callable[..., Kernel]:
    """add(row): KERNELS as if it had one more row, the last or the first. What was made from the rows follows."""

    def forget() -> None:
        dispatch.choose.cache_clear()
        prepare.cache_clear()

    def add_row(row: Kernel, first: bool = False) -> Kernel:
        rows = (row, *dispatch.KERNELS) if first else (*dispatch.KERNELS, row)
        monkeypatch.setattr(dispatch, "KERNELS", rows)
        monkeypatch.setitem(dispatch.BY_NAME, row.name, row)
        for name, variant in dispatch._variants().items():
            monkeypatch.setitem(dispatch.VARIANTS, name, variant)
        monkeypatch.setattr(cache, "_plans", {})
        forget()
        return row

    yield add_row
    forget()  # later tests must not find the row in what was remembered


# A backend of its own, whose kernels take arrays ---------------------------------------------------------------------


@pytest.fixture
def backend(monkeypatch) -> list[tuple[str, Spec]]:
    """A module qflash.backends.toy, as a file toy.py there would be. Returns the list of what was launched."""
    launched = []

    def entry(kernel: Kernel, spec: Spec) -> Callable[..., None]:
        def bind(plan: Plan) -> Callable[..., None]:
            def launch(operands, results, stream):
                launched.append((kernel.name, spec))
                operands = [np.asarray(x, np.float64) for x in operands]
                compute[spec.op](operands, np.asarray(results[0]), dict(plan.fields)["scale"])

            return launch

        return bind

    module = ModuleType("qflash.backends.toy")
    module.entry = entry
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return launched


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def compute_attention(operands: list[np.ndarray], out: np.ndarray, scale: float) -> None:
    q, k, v = operands
    scores = np.einsum("bmhd,bnhd->bhmn", q, k) * scale
    out[...] = np.einsum("bhmn,bnhd->bmhd", softmax(scores), v)


def compute_softmax(operands: list[np.ndarray], out: np.ndarray, scale: float) -> None:
    out[...] = softmax(operands[0] * scale)


compute = {"attention": compute_attention, "softmax": compute_softmax}


def toy(op: str = "attention", **columns) -> Kernel:
    return Kernel(**{"name": "toy", "device": "cpu", "summary": "a toy", "op": op, "backend": "toy", **columns})


def as_numpy(x: np.ndarray) -> np.ndarray:
    return x


def as_torch(x: np.ndarray):
    return pytest.importorskip("torch").from_numpy(x)


@pytest.mark.parametrize("convert", [as_numpy, as_torch])
def test_attention_runs_it(add, backend, convert):
    add(toy())
    q, k, v = (convert(x) for x in np.random.default_rng(0).normal(size=(3, 2, 5, 3, 16)).astype(np.float32))
    for _ in range(2):  # prepared, then looked up
        out = qflash.attention(q, k, v, kernel="toy")
        assert type(out) is type(q)
        np.testing.assert_allclose(out, qflash.attention(q, k, v), atol=1e-5)
    assert [name for name, _ in backend] == ["toy", "toy"]
    out = qflash.attention(q, k, v, kernel="toy", scale=0.7)  # words come with the plan
    np.testing.assert_allclose(out, qflash.attention(q, k, v, scale=0.7), atol=1e-5)
    assert backend[0][1] == Spec("cpu", 0, "float32", 16, few_rows=True)


@pytest.mark.parametrize("convert", [as_numpy, as_torch])
def test_another_operation_runs_it(add, backend, convert):
    add(toy("softmax"))
    x = convert(np.random.default_rng(1).normal(size=(4, 7)).astype(np.float32))
    np.testing.assert_allclose(qflash.softmax(x, kernel="toy"), qflash.softmax(x), atol=1e-6)
    assert len(backend) == 1


def test_order_is_preference(add, backend):
    x = np.zeros((2, 3), np.float32)
    qflash.softmax(x)  # a plan for these shapes exists before the row does
    add(toy("softmax"))
    qflash.softmax(x)
    assert not backend
    add(toy("softmax", name="toy_first"), first=True)
    qflash.softmax(x)
    assert [name for name, _ in backend] == ["toy_first"]


def test_jax_says_that_it_has_other_arrays(add, backend):
    jax = pytest.importorskip("jax")
    add(toy("softmax"))
    with pytest.raises(NotImplementedError, match="'toy' takes arrays of another framework"):
        jax.block_until_ready(qflash.softmax(jax.numpy.zeros((2, 3)), kernel="toy"))


def test_its_columns_are_its_limits(add, backend):
    add(toy(dtypes=("float32",), also=lambda spec: ["has no mask"] if spec.window else []))
    x = np.zeros((1, 2, 1, 8), np.float32)
    with pytest.raises(qflash.NoKernelError, match="has no mask"):
        qflash.attention(x, x, x, causal=True, kernel="toy")
    with pytest.raises(qflash.NoKernelError, match="takes float32, not float16"):
        qflash.attention(*[x.astype(np.float16)] * 3, kernel="toy")
    with pytest.raises(ValueError, match="kernel is 'toy'; allowed: None, 'cpu_softmax', 'softmax'"):
        qflash.softmax(x, kernel="toy")
    assert not backend


def test_explain_tells_of_it(add):
    row = add(toy())
    x = np.zeros((1, 2, 1, 8), np.float32)
    assert ("toy", "could", f"cpu comes first; {row.summary}") in qflash.explain(x, x, x).rows
    assert ("toy", "runs", row.summary) in qflash.explain(x, x, x, kernel="toy").rows


def test_doctor_lists_it(add, invoke):
    assert "toy" not in invoke("doctor").output
    add(toy())
    usable = invoke("doctor").output.partition("Kernels")[2].partition("not usable")[0]
    assert re.search(r"\btoy\b", usable)


def test_doctor_asks_for_nvcc_only_where_it_compiles(add, monkeypatch, cache_dir):
    monkeypatch.setattr(machine, "gpus", lambda: ((machine.Gpu("a GPU", 90, 1, "1"),), ""))
    monkeypatch.setattr(toolchain, "find", _no_compiler)
    add(toy(device="cuda"))
    found = usable_kernels()
    assert found["toy"].why_not == ""
    assert "no CUDA compiler" in found["fa"].why_not
    assert "toy" not in {unit.name for unit in cuda.specialisations([90])}  # `qflash build` leaves it to its backend


def _no_compiler() -> None:
    raise qflash.ToolchainError("none")


def test_it_is_a_variant_to_test_and_measure(add):
    row = add(toy())
    assert dispatch.VARIANTS["toy"].kernel is row
    assert "toy" in [variant.name for variant in dispatch.variants_of("attention", "cpu")]


# A folder of csrc/kernels --------------------------------------------------------------------------------------------

LAUNCH = """
    #include "qflash.h"

    extern "C" const char* qf_status_text(int) { return "toy"; }
    extern "C" int64_t qf_toy_workspace(const QfAttnParams* p) { return p->q_len; }
    extern "C" int qf_toy(const QfAttnParams* p, void*) {
      if (p->struct_bytes != int32_t(sizeof(QfAttnParams))) return QF_BAD_ABI;
      const float compiled_for[] = {QF_DTYPE, QF_ARCH, QF_HEAD_DIM, QF_PRECISION, QF_KV_KIND, QF_PLAIN_SCORES};
      for (int i = 0; i < 6; ++i) static_cast<float*>(p->out.data)[i] = compiled_for[i];
      return QF_OK;
    }
"""
# The C++ compiler in nvcc's place, for a launch.cu with nothing of CUDA in it
NVCC = """\
    #!{python}
    import subprocess
    import sys

    if "--version" in sys.argv:
        sys.exit(print("Cuda compilation tools, release 13.0, V13.0.88"))
    kept = [word for word in sys.argv if word.startswith(("-I", "-D"))]
    sys.exit(subprocess.call(["g++", "-shared", "-fPIC", "-x", "c++", *kept, *sys.argv[-3:]]))
"""


@pytest.fixture
def folder(fake, fake_nvcc, monkeypatch, tmp_path) -> Path:
    """csrc with one kernel in it, toy, and the library's own header."""
    fake_nvcc.write_text(textwrap.dedent(NVCC).format(python=sys.executable))
    csrc = tmp_path / "csrc"
    (csrc / "kernels" / "attention" / "toy").mkdir(parents=True)
    (csrc / "kernels" / "attention" / "toy" / "launch.cu").write_text(textwrap.dedent(LAUNCH))
    (csrc / "include").symlink_to(cuda._CSRC / "include")
    monkeypatch.setattr(cuda, "_CSRC", csrc)
    return csrc


TOY_CUDA = Kernel(
    name="toy",
    device="cuda",
    summary="a toy",
    dtypes=("float32", "bfloat16"),
    precisions=("native", "int8"),
    min_arch=80,
    head_dims=(64, 128),
    per_precision=True,
    per_kv=True,
    per_scores=True,
)


@pytest.mark.process
@pytest.mark.parametrize("scores", [{}, {"softcap": 5.0}, {"scale": -1.0}], ids=str)
def test_a_folder_and_a_row_are_compiled_loaded_and_called(add, folder, scores):
    add(TOY_CUDA)
    x = Array((1, 3, 2, 72), (432, 144, 72, 1), "float32", "cuda:0")
    words = {"kernel": "toy", "precision": "int8", "causal": False, "return_lse": False, "interleaved": False}
    words |= {"batch_invariant": False, "backward_memory": 0, **scores}
    arrays = (x, x, x, *[None] * (len(ATTENTION.arrays) - 3))
    prepared = prepare(ATTENTION.plan(*arrays, *(words.get(word) for word in ATTENTION.words)), arch=90)
    assert prepared.kernel is TOY_CUDA
    assert prepared.workspace_bytes == 3
    q, out = np.zeros(x.shape, np.float32), np.zeros(x.shape, np.float32)
    prepared.call(*[array.ctypes.data for array in (q, q, q, out)], 0, 0, 0)
    want = [OP_DTYPES.index("float32"), 90, 128, PRECISIONS.index("int8"), KV_KINDS.index("arrays"), not scores]
    assert out.ravel()[:6].tolist() == want


@pytest.mark.process
def test_a_folder_and_a_row_are_built_ahead(add, folder):
    add(TOY_CUDA)
    units = cuda.specialisations([75, 90], ["toy"])
    assert {unit.source for unit in units} == {folder / "kernels" / "attention" / "toy" / "launch.cu"}
    assert {unit.target for unit in units} == {"90a"}
    assert len(units) == 2 * 2 * 2 * 2  # dtypes, head dims, precisions, kinds of scores
    plain = [dict(unit.defines)["QF_PLAIN_SCORES"] for unit in units]
    assert plain == ["1"] * 8 + ["0"] * 8  # what nearly every call needs comes first
    assert [unit for unit in cuda.specialisations([90]) if unit.name == "toy"] == units
    assert len(cuda.build([90], ["toy"])) == len(units)


# The rows that are there ---------------------------------------------------------------------------------------------

AXES = {
    "QF_DTYPE", "QF_ARCH", "QF_HEAD_DIM", "QF_PRECISION", "QF_KV_KIND", "QF_BATCH_INVARIANT", "QF_ACTIVATION",
    "QF_PLAIN_SCORES",
}  # fmt: skip


def defines_of(row: Kernel, spec: Spec) -> dict[str, str]:
    """What the row's columns say."""
    found = {}
    if row.per_dtype:
        found["QF_DTYPE"] = OP_DTYPES.index(spec.dtype)
    if row.per_arch:
        found["QF_ARCH"] = spec.arch
    if row.head_dims:
        found["QF_HEAD_DIM"] = min(dim for dim in row.head_dims if dim >= spec.head_dim)
    if row.per_precision:
        found["QF_PRECISION"] = PRECISIONS.index(spec.precision)
    if row.per_kv:
        found["QF_KV_KIND"] = KV_KINDS.index(dict(row.shared_kvs).get(spec.kv, spec.kv))
    if row.per_batch_invariance:
        found["QF_BATCH_INVARIANT"] = int(spec.batch_invariant)
    if row.per_activation:
        found["QF_ACTIVATION"] = ACTIVATIONS.index(spec.activation)
    if row.per_scores:
        found["QF_PLAIN_SCORES"] = int(spec.plain_scores)
    return {name: str(value) for name, value in found.items()}


def test_every_folder_has_a_row():
    folders = (cuda._CSRC / "kernels").glob("*/*")
    assert {(path.parent.name, path.name) for path in folders} == {(row.op, row.name) for row in CUDA_ROWS}


@pytest.mark.parametrize("row", CUDA_ROWS, ids=lambda row: row.name)
def test_units_are_what_the_columns_say(row):
    specs = [spec for arch in ARCHES for spec in cuda.specs(row, arch)]
    assert specs
    for spec in specs:
        unit = cuda.unit(row, spec)
        assert unit.source == cuda._CSRC / "kernels" / row.op / row.name / "launch.cu"
        assert unit.source.is_file()
        assert dict(unit.defines) == defines_of(row, spec)
        assert set(dict(unit.defines)) <= AXES
        assert unit.parts == row.parts
    code = " ".join(re.sub(r"//.*", "", path.read_text()) for path in unit.source.parent.iterdir())
    assert AXES & set(re.findall(r"\bQF_[A-Z_]+\b", code)) <= set(dict(unit.defines))


def literals(path: Path) -> set[str]:
    """The words in the strings of a module, but for docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {word for node in strings if id(node) not in docstrings for word in re.findall(r"\w+", node.value)}


@pytest.mark.parametrize("room", ["backends", "call", "frontends", "jit"])
def test_wiring_names_no_kernel(room):
    devices = {row.device for row in dispatch.KERNELS}  # "cpu" is a device's name too
    names = ({row.name for row in dispatch.KERNELS} | set(dispatch.VARIANTS)) - devices
    names |= {f"qf_{name}" for name in names}
    named = {str(path.relative_to(PACKAGE)): literals(path) & names for path in sorted((PACKAGE / room).rglob("*.py"))}
    assert named
    assert {path: found for path, found in named.items() if found} == {}
