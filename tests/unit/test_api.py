"""The public calls as a user makes them: NumPy arrays, bad values, threads, processes, imports."""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import qflash
from qflash import reference
from qflash.testing import BY_NAME, cases, check_contract
from qflash.testing.runner import call


def arrays(batch=2, q_len=16, k_len=32, q_heads=4, kv_heads=2, head_dim=16, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = [(batch, q_len, q_heads, head_dim), *[(batch, k_len, kv_heads, head_dim)] * 2]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def test_out_alone_or_with_lse() -> None:
    q, k, v = arrays()
    out = qflash.attention(q, k, v)
    again, lse = qflash.attention(q, k, v, return_lse=True)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 16), np.float32)
    assert out.tobytes() == again.tobytes()


def test_inputs_are_left_alone() -> None:
    q, k, v = arrays()
    copies = [x.copy() for x in (q, k, v)]
    for x in (q, k, v):
        x.flags.writeable = False
    qflash.attention(q, k, v, causal=True)
    assert all((a == b).all() for a, b in zip((q, k, v), copies, strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtype_in_is_dtype_out(dtype) -> None:
    q, k, v = arrays(dtype=dtype)
    assert qflash.attention(q, k, v).dtype == dtype


@pytest.mark.parametrize("precision", [None, "int8"])
def test_precision(precision: str | None) -> None:
    q, k, v = arrays()
    out = qflash.attention(q, k, v, precision=precision)
    want, _ = reference.attention(q, k, v)
    assert np.abs(out - want).max() < (2e-6 if precision is None else 5e-2)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"q": [[1.0]]}, TypeError, ["q is", "list", "numpy.ndarray"]),
        ({"k": [[1.0]]}, TypeError, ["k is", "list", "numpy.ndarray"]),
        ({"q": np.zeros((2, 16, 4, 16), np.int32)}, TypeError, ["q ", "int32", "float32"]),
        ({"q": np.zeros((2, 16, 4, 16))}, TypeError, ["q ", "float64", "float32"]),
        ({"q": np.zeros((2, 16, 4, 32), np.float32)[..., ::2]}, ValueError, ["q ", "stride 2", "last dimension"]),
        ({"q": np.zeros((2, 16, 4, 16), ">f4")}, TypeError, ["q ", "byte order", "native"]),
        ({"q": np.zeros((2, 16, 4, 16), "V0")}, TypeError, ["q ", "void", "float32"]),
        ({"causal": np.array([True, False])}, TypeError, ["causal is a numpy.ndarray", "True or False"]),
        ({"causal": np.array(True)}, TypeError, ["causal is a numpy.ndarray", "True or False"]),
        ({"return_lse": "no"}, TypeError, ["return_lse is 'no'", "True or False"]),
        ({"return_lse": None}, TypeError, ["return_lse is None", "True or False"]),
        ({"precision": np.array(["int8", "int8"])}, TypeError, ["precision is a numpy.ndarray", "'int8'"]),
        ({"kv_lens": [1, 2.0]}, TypeError, ["kv_lens contains 2.0", "ints"]),
        ({"kv_lens": "12"}, TypeError, ["kv_lens", "str", "list"]),
        ({"kv_lens": np.array([1, 2**31])}, ValueError, ["kv_lens contains 2147483648", "int32"]),
        ({"kv_lens": np.array([1.0, 2.0])}, TypeError, ["kv_lens", "float64", "integer"]),
        ({"kv_lens": np.array([1, 33], np.int32)}, ValueError, ["kv_lens[1] is 33", "0 to 32"]),
        ({"kv_lens": np.array([-1, 3], np.int32)}, ValueError, ["kv_lens[0] is -1", "0 to 32"]),
        ({"rope": (1, 2)}, TypeError, ["rope", "tuple", "qflash.Rope"]),
        ({"kernel": "nope"}, ValueError, ["kernel", "'nope'", "'cpu'"]),
        ({"kernel": "fa"}, qflash.NoKernelError, ["'fa'", "runs on cuda", "cpu_int8"]),
        ({"kernel": "cpu", "precision": "int8"}, qflash.NoKernelError, ["'cpu'", 'precision None, not "int8"']),
        ({"precision": "int8_fp8"}, qflash.NoKernelError, ["no kernel serves", "cpu_int8"]),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_bad_input(arguments: dict, kind: type, words: list[str]) -> None:
    q, k, v = arrays()
    with pytest.raises(kind) as raised:
        qflash.attention(arguments.pop("q", q), arguments.pop("k", k), v, **arguments)
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ({"positions_q": np.arange(16, dtype=np.int32) + 20}, ["rope.positions_q", "32", "-31 to 31"]),
        ({"positions_k": -np.arange(32, dtype=np.int32) - 1}, ["rope.positions_k", "-32", "-31 to 31"]),
    ],
)
@pytest.mark.parametrize("precision", [None, "int8"])
def test_positions_out_of_range(positions: dict, words: list[str], precision: str | None) -> None:
    q, k, v = arrays()
    rope = qflash.Rope(*qflash.rope_tables(32, 16), **positions)
    with pytest.raises(ValueError) as raised:
        qflash.attention(q, k, v, rope=rope, precision=precision)
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "words"),
    [
        ((0, 10, 20), (0, 15, 14), ["cu_seqlens_k[2] is 14", "15 or more"]),
        ((0, 10, 21), (0, 15, 30), ["cu_seqlens_q[2] is 21", "20"]),
        ((0, 10, 19), (0, 15, 30), ["cu_seqlens_q[2] is 19", "20"]),
        ((1, 10, 20), (0, 15, 30), ["cu_seqlens_q[0] is 1", "0"]),
        ((0, 13, 20), (0, 15, 30), ["cu_seqlens_q[1]", "13", "max_seqlen_q"]),
        ((0, 10, 20), (0, 13, 30), ["cu_seqlens_k[2]", "17", "max_seqlen_k"]),
        ((0, -5, 20), (0, 15, 30), ["cu_seqlens_q[1] is -5", "0"]),
    ],
)
@pytest.mark.parametrize("precision", [None, "int8"])
def test_bad_cumulative_lengths(cu_q, cu_k, words: list[str], precision: str | None) -> None:
    q, k, v = np.zeros((20, 2, 8), np.float32), *np.zeros((2, 30, 2, 8), np.float32)
    cu = [np.array(x, np.int32) for x in (cu_q, cu_k)]
    with pytest.raises(ValueError) as raised:
        qflash.attention_varlen(q, k, v, *cu, 12, 16, precision=precision)
    assert [word for word in words if word not in str(raised.value)] == []


def test_packed_kv_lens_out_of_range() -> None:
    q, k, v = np.zeros((20, 2, 8), np.float32), *np.zeros((2, 30, 2, 8), np.float32)
    cu = [np.array(x, np.int32) for x in ((0, 10, 20), (0, 14, 30))]
    with pytest.raises(ValueError, match=r"kv_lens\[0\] is 15; allowed: 0 to 14"):
        qflash.attention_varlen(q, k, v, *cu, 10, 16, kv_lens=np.array([15, 2], np.int32))


def test_the_engine_works_after_an_error() -> None:
    q, k, v = arrays()
    before = qflash.attention(q, k, v)
    with pytest.raises(ValueError, match="kv_lens"):
        qflash.attention(q, k, v, kv_lens=np.array([99, 0], np.int32))
    assert qflash.attention(q, k, v).tobytes() == before.tobytes()


def test_explain_names_the_kernel_and_every_other() -> None:
    q, k, v = arrays()
    explanation = qflash.explain(q, k, v, causal=True)
    assert explanation.kernel == "cpu"
    text = str(explanation)
    assert text.startswith("cpu serves")
    assert all(name in text for name, _, _ in explanation.rows)
    for name, verdict, why in explanation.shown:
        assert name in text and verdict in text and why in text
    left_out = set(explanation.rows) - set(explanation.shown)
    assert left_out and all(why.startswith("runs on cuda, the arrays are on cpu; ") for _, _, why in left_out)
    assert dict((row[0], row[1]) for row in explanation.rows)["fa"] == "no"


def test_explain_of_a_forced_kernel_and_of_none() -> None:
    q, k, v = arrays()
    assert qflash.explain(q, k, v, precision="int8", kernel="cpu_int8").kernel == "cpu_int8"
    nothing = qflash.explain(q, k, v, precision="int8_fp8")
    assert nothing.kernel is None
    assert str(nothing).startswith("no kernel serves")
    with pytest.raises(qflash.NoKernelError):
        qflash.explain(q, k, v, kernel="fa")


def test_explain_checks_its_arguments() -> None:
    q, k, v = arrays()
    with pytest.raises(TypeError, match="kv_lens"):
        qflash.explain(q, k, v, kv_lens=np.zeros(2))
    with pytest.raises(TypeError, match="window"):
        qflash.explain(q, k, v, window=3)


def test_rope_tables() -> None:
    cos, sin = qflash.rope_tables(10, 8, base=100.0)
    assert cos.shape == sin.shape == (10, 4)
    assert cos.dtype == sin.dtype == np.float32
    assert np.allclose(cos**2 + sin**2, 1)
    assert np.isclose(sin[3, 1], np.sin(3 * 100.0 ** (-2 / 8)))
    for bad in ((-1, 8), (10, 7), (10, 0), (10, 8, -1.0), (10, 8, np.inf)):
        with pytest.raises(ValueError, match="allowed"):
            qflash.rope_tables(*bad)
    for bad, name in (((1.5, 8), "positions"), ((10, "8"), "rotary_dim"), ((10, 8, "x"), "base")):
        with pytest.raises(TypeError, match=f"{name} is .*; allowed"):
            qflash.rope_tables(*bad)


@pytest.mark.parametrize("bad", ["no", None, 2, 1.0, np.array([True]), [True]])
def test_interleaved_is_true_or_false(bad) -> None:
    """A word would count as True."""
    with pytest.raises(TypeError, match=r"interleaved is .*; allowed: True or False"):
        qflash.Rope(*qflash.rope_tables(8, 4), interleaved=bad)


def test_interleaved_by_any_name() -> None:
    q, k, v = arrays()
    tables = qflash.rope_tables(32, 16)
    half, pairs = (qflash.attention(q, k, v, rope=qflash.Rope(*tables, interleaved=x)) for x in (False, True))
    assert half.tobytes() != pairs.tobytes()
    for also, want in ((0, half), (np.False_, half), (1, pairs), (np.True_, pairs)):
        assert qflash.attention(q, k, v, rope=qflash.Rope(*tables, interleaved=also)).tobytes() == want.tobytes()


def test_number_of_threads() -> None:
    before = qflash.get_num_threads()
    try:
        qflash.set_num_threads(3)
        assert qflash.get_num_threads() == 3
        with pytest.raises(ValueError, match="num_threads is 0; allowed: 1 or more"):
            qflash.set_num_threads(0)
    finally:
        qflash.set_num_threads(before)


@pytest.mark.process
@pytest.mark.parametrize("name", ["torch", "jax", "click", "rich", "qflash.testing", "qflash.cli", "filelock"])
def test_importing_qflash_does_not_import(name: str) -> None:
    code = (
        "import sys, numpy as np, qflash\n"
        "x = np.ones((1, 2, 1, 4), np.float32)\n"
        "qflash.attention(x, x, x)\n"
        f"sys.exit({name!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_threads_call_at_once() -> None:
    """Different problems on the same engine at the same time give what they give alone."""
    chosen = [case for case in cases("quick") if case.finite]
    inputs = [case.make_inputs() for case in chosen]
    alone = [call(case, given, "cpu") for case, given in zip(chosen, inputs, strict=True)]
    start = threading.Barrier(8)

    def work(worker: int) -> None:
        start.wait()
        for step in range(3 * len(chosen)):
            i = (worker + step) % len(chosen)
            out, lse = call(chosen[i], inputs[i], "cpu")
            assert out.tobytes() == alone[i][0].tobytes()
            assert lse.tobytes() == alone[i][1].tobytes()

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, worker) for worker in range(8)]:
            future.result()


def test_threads_get_their_own_error_texts() -> None:
    q, k, v = arrays()
    start = threading.Barrier(6)

    def work(worker: int) -> None:
        start.wait()
        for _ in range(50):
            with pytest.raises(ValueError, match=rf"kv_lens\[1\] is {1000 + worker};"):
                qflash.attention(q, k, v, kv_lens=np.array([0, 1000 + worker], np.int32))

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(work, worker) for worker in range(6)]:
            future.result()


@pytest.mark.process
def test_a_checkout_without_the_native_module_says_how_to_get_it(tmp_path) -> None:
    """What a user meets who ran `pip install .` and then starts Python where qflash/ is the sources."""
    (tmp_path / "qflash").mkdir()
    shutil.copy(qflash.__file__, tmp_path / "qflash")
    # -S: an editable install would find the module wherever it is.
    done = subprocess.run([sys.executable, "-S", "-c", "import qflash"], cwd=tmp_path, capture_output=True, text=True)
    told = done.stderr.splitlines()[-1]
    assert told.startswith(f"ModuleNotFoundError: qflash was imported from the folder {tmp_path / 'qflash'}, which has")
    assert "`pip install -e .` or `make build`" in told


def _in_child(name: str, results) -> None:
    case = BY_NAME[name]
    try:
        check_contract(case, *call(case, case.make_inputs()))
        results.put("ok")
    except BaseException as error:
        results.put(repr(error))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_child_processes(method: str) -> None:
    """Also a child forked after the parent's engine has started its threads, which the child does not inherit."""
    call(BY_NAME["causal"], BY_NAME["causal"].make_inputs())
    context = multiprocessing.get_context(method)
    results = context.Queue()
    children = [context.Process(target=_in_child, args=(name, results)) for name in ("causal", "decode")]
    for child in children:
        child.start()
    try:
        assert [results.get(timeout=60) for _ in children] == ["ok", "ok"]
    finally:
        for child in children:
            child.join(10)
            if child.is_alive():
                child.kill()
    check_contract(BY_NAME["causal"], *call(BY_NAME["causal"], BY_NAME["causal"].make_inputs()))
