"""The table and its pure functions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qflash import NoKernelError, dispatch
from qflash.backends import cuda
from qflash.call.spec import DTYPES, KV_KINDS, OP_DTYPES, PRECISIONS, Spec

CPU = Spec(device="cpu", arch=0, dtype="float32", head_dim=64)
CUDA = Spec(device="cuda", arch=90, dtype="float32", head_dim=64)


def test_names_are_unique_and_rows_are_complete() -> None:
    names = [kernel.name for kernel in dispatch.KERNELS]
    assert len(set(names)) == len(names)
    for kernel in dispatch.KERNELS:
        assert kernel.summary
        assert kernel.device in ("cpu", "cuda")
        assert kernel.precisions and set(kernel.precisions) <= set(PRECISIONS)
        assert kernel.kvs and set(kernel.kvs) <= set(KV_KINDS)
        assert set(kernel.dtypes) <= set(DTYPES if kernel.op == "attention" else OP_DTYPES)
        assert dispatch.BY_NAME[kernel.name] is kernel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 3, 64, 100, 256])
def test_the_cpu_serves_everything(dtype: str, head_dim: int) -> None:
    spec = replace(
        CPU, dtype=dtype, head_dim=head_dim, window=True, softcap=True, rope="half", packed=True, kv_lens=True
    )
    assert dispatch.choose(spec).name == "cpu"
    assert dispatch.choose(replace(spec, precision="int8")).name == "cpu_int8"


def test_plan_takes_the_first_usable_automatic_row() -> None:
    for spec in (CPU, CUDA, replace(CPU, precision="int8"), replace(CPU, op="attention_backward")):
        usable = [k for k in dispatch.KERNELS if k.automatic and not dispatch.reasons(k, spec)]
        assert dispatch.choose(spec) is usable[0]


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "kernel", "why"),
    [
        (80, "bfloat16", 128, "fa_mma", "needs compute capability 9.0, this GPU has 8.0"),
        (89, "float16", 64, "fa_mma", "needs compute capability 9.0, this GPU has 8.9"),
        (90, "float16", 64, "sm90_fwd", ""),
        (90, "bfloat16", 128, "sm90_fwd", ""),
        (90, "bfloat16", 8, "sm90_fwd", ""),
        (90, "bfloat16", 256, "sm90_fwd", ""),
        (90, "float16", 100, "fa_mma", "head_dim is 100; the copy engine takes multiples of 8"),
        (90, "bfloat16", 1, "fa_mma", "head_dim is 1; the copy engine takes multiples of 8"),
        (90, "float32", 128, "fa", "takes float16, bfloat16, not float32"),
        (100, "bfloat16", 128, "fa_mma", "runs on compute capability 9.0 alone, this GPU has 10.0"),
        (120, "float16", 64, "fa_mma", "runs on compute capability 9.0 alone, this GPU has 12.0"),
    ],
)
def test_hopper_has_a_kernel_of_its_own(arch: int, dtype: str, head_dim: int, kernel: str, why: str) -> None:
    """What `explain` shows: the kernel that runs, and why the one for Hopper does not."""
    spec = Spec("cuda", arch, dtype, head_dim, window=True, softcap=True, rope="half", packed=True, kv_lens=True)
    assert dispatch.choose(spec).name == kernel
    rows = {name: (verdict, reason) for name, verdict, reason in dispatch.verdicts(spec)}
    assert rows[kernel] == ("runs", dispatch.BY_NAME[kernel].summary)
    if why:
        assert rows["sm90_fwd"][0] == "no" and rows["sm90_fwd"][1].startswith(why)
        with pytest.raises(NoKernelError, match="kernel 'sm90_fwd' cannot serve this problem"):
            dispatch.choose(spec, "sm90_fwd")
    else:
        assert rows["fa_mma"][0] == "could" and rows["fa_mma"][1].startswith("sm90_fwd comes first; ")
        assert dispatch.choose(spec, "fa_mma").name == "fa_mma"


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "precision", "kernel"),
    [
        (90, "bfloat16", 128, "int8", "sm90_int8"),
        (90, "float16", 72, "int8", "sm90_int8"),
        (90, "float16", 256, "int8_fp8", "sm90_int8"),
        (90, "bfloat16", 8, "int8_fp8", "sm90_int8"),
        (90, "float16", 100, "int8", "fa_int8"),
        (80, "bfloat16", 128, "int8", "fa_int8"),
        (100, "bfloat16", 128, "int8", "fa_int8"),
    ],
)
def test_hopper_has_quantized_kernels_of_its_own(arch, dtype, head_dim, precision, kernel) -> None:
    spec = Spec("cuda", arch, dtype, head_dim, precision, window=True, softcap=True, rope="half", packed=True)
    assert dispatch.choose(spec).name == kernel


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (Spec("cpu", 0, "float16", 64, "int8_fp8"), r"sm90_int8 +no +runs on cuda, the arrays are on cpu"),
        (
            Spec("cuda", 80, "float16", 64, "int8_fp8"),
            r"sm90_int8 +no +needs compute capability 9.0, this GPU has 8",
        ),
        (Spec("cuda", 100, "float16", 64, "int8_fp8"), r"sm90_int8 +no +runs on compute capability 9.0 alone"),
        (Spec("cuda", 90, "float16", 60, "int8_fp8"), r"sm90_int8 +no +head_dim is 60; the copy engine takes mult"),
        (Spec("cuda", 90, "float32", 64, "int8_fp8"), r"sm90_int8 +no +takes float16, bfloat16, not float32"),
    ],
)
def test_what_int8_fp8_is_not_for_says_why(spec: Spec, why: str) -> None:
    with pytest.raises(NoKernelError, match=why):
        dispatch.choose(spec)


@pytest.mark.parametrize(("op", "kv"), [("quantize_kv", "arrays"), ("attention", "kept")])
def test_kv_is_quantized_on_hopper_alone(op: str, kv: str) -> None:
    for precision in ("int8", "int8_fp8"):
        spec = Spec("cuda", 90, "bfloat16", 128, precision, op=op, kv=kv)
        assert dispatch.choose(spec).name == ("sm90_int8" if op == "attention" else "sm90_quantize")
        for other in (replace(spec, arch=89), replace(spec, dtype="float32"), replace(spec, head_dim=20)):
            with pytest.raises(NoKernelError, match=f"no kernel serves this {'problem' if op == 'attention' else op}"):
                dispatch.choose(other)


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "precision", "kernel"),
    [
        (90, "bfloat16", 128, "int8", "sm90_decode"),
        (90, "float16", 72, "int8", "sm90_decode"),
        (80, "bfloat16", 128, "int8", "decode"),
        (75, "float16", 256, "int8", "decode"),
        (90, "bfloat16", 128, "int8_fp8", "sm90_int8"),
    ],
)
def test_few_queries_on_kept_keys_are_decoded(arch, dtype, head_dim, precision, kernel) -> None:
    """A QuantizedKV with values in 16 bits; those in E4M3 stay with the kernel that multiplies them so."""
    spec = Spec("cuda", arch, dtype, head_dim, precision, kv="kept", few_rows=True, sinks=True, batch_invariant=True)
    assert dispatch.choose(spec).name == kernel
    if precision == "int8_fp8":
        why = dict((name, reason) for name, _, reason in dispatch.verdicts(spec))["sm90_decode"]
        assert why == 'takes qflash.QuantizedKV of precision "int8", not "int8_fp8"'
        return
    rows = {name: verdict for name, verdict, _ in dispatch.verdicts(spec)}
    assert rows["sm90_int8"] == ("could" if arch == 90 else "no")
    with pytest.raises(NoKernelError, match="takes up to 64 rows of queries a KV head"):
        dispatch.choose(replace(spec, few_rows=False), kernel)
    with pytest.raises(NoKernelError, match='takes precision None, not "int8"'):  # of arrays: nobody quantized them
        dispatch.choose(replace(spec, kv="arrays"), kernel)


def test_variants_of_the_decode_kernels() -> None:
    for name in ("sm90_decode", "decode"):
        found = {row.name: (row.precision, row.kv) for row in dispatch.VARIANTS.values() if row.kernel.name == name}
        assert found == {
            name: ("native", "arrays"), f"{name}_kv": ("int8", "kept"), f"{name}_pages": ("native", "pages"),
            f"{name}_pages_int8": ("native", "pages_int8"),
        }  # fmt: skip
        assert dispatch.VARIANTS[f"{name}_kv"].contract == "int8"


def test_buckets_of_the_quantized_kernels_of_hopper() -> None:
    for name, libraries in (
        ("sm90_int8", 24),
        ("sm90_quantize", 6),
    ):
        assert dispatch.BY_NAME[name].head_dims == (64, 128, 256)
        units = cuda.specialisations([90], [name])
        assert len(units) == libraries and {unit.target for unit in units} == {"90a"}
        assert all(unit.source.exists() for unit in units)
        assert cuda.specialisations([80, 89], [name]) == []


def test_gradients_have_rows_of_their_own() -> None:
    spec = replace(CPU, op="attention_backward")
    assert dispatch.choose(spec).name == "cpu_bwd"
    with pytest.raises(NoKernelError, match=r'cpu_bwd +no +takes precision None, not "int8"'):
        dispatch.choose(replace(spec, precision="int8"))


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 64, 100, 256])
def test_what_is_served_forward_is_served_backward(arch: int, dtype: str, head_dim: int) -> None:
    words = {"window": True, "softcap": True, "rope": "half", "packed": True, "kv_lens": True, "sinks": True}
    spec = Spec("cuda", arch, dtype, head_dim, **words)
    assert dispatch.choose(spec).device == "cuda"
    by_cores = dtype == "float32" or (dtype == "bfloat16" and arch < 80)
    by_wgmma = arch == 90 and head_dim % 8 == 0
    expected = "fa_bwd" if by_cores else "sm90_bwd" if by_wgmma else "fa_mma_bwd"
    assert dispatch.choose(replace(spec, op="attention_backward")).name == expected
    assert dispatch.backward_of(spec).name == expected


def test_quantized_calls_have_no_backward_pass() -> None:
    for spec in (replace(CUDA, dtype="float16", precision="int8"), replace(CUDA, dtype="float16", kv="pages")):
        assert dispatch.backward_of(spec) is None


def test_a_kernel_can_be_asked_for() -> None:
    assert dispatch.choose(CUDA, "unfused").name == "unfused"
    assert dispatch.choose(CPU, "cpu").name == "cpu"


def test_what_runs_only_on_request_is_not_chosen() -> None:
    for kernel in dispatch.kernels_of("attention", "cuda"):
        if not kernel.automatic:
            spec = dispatch.VARIANTS[kernel.name].spec(CUDA.arch, kernel.dtypes[0], CUDA.head_dim)
            assert dispatch.choose(spec) is not kernel
            assert (kernel.name, "on request", kernel.summary) in dispatch.verdicts(spec)


def test_rows_say_that_a_kernel_asked_for_is_the_one_that_runs() -> None:
    rows = {name: (verdict, why) for name, verdict, why in dispatch.verdicts(CUDA, "unfused")}
    assert rows["unfused"] == ("runs", dispatch.BY_NAME["unfused"].summary)
    assert rows["fa"][0] == "could" and rows["fa"][1].startswith("unfused was asked for; ")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="kernel is 'nope'; allowed: None") as raised:
        dispatch.choose(CPU, "nope")
    assert not isinstance(raised.value, NoKernelError)
    for kernel in dispatch.kernels_of("attention"):
        assert repr(kernel.name) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "spec", "why"),
    [
        ("fa", CPU, "runs on cuda, the arrays are on cpu"),
        ("cpu", CUDA, "runs on cpu, the arrays are on cuda"),
        ("cpu", replace(CPU, precision="int8"), 'takes precision None, not "int8"'),
        ("cpu_int8", CPU, 'takes precision "int8", not None'),
        ("fa", replace(CUDA, arch=70), "needs compute capability 7.5, this GPU has 7.0"),
        ("fa_tc", CUDA, "takes float16, bfloat16, not float32"),
        (
            "fa_tc",
            replace(CUDA, arch=75, dtype="bfloat16"),
            "bfloat16 needs the tensor cores of compute capability 8.0, this GPU has 7.5",
        ),
    ],
)
def test_a_kernel_that_cannot_serve_says_why(name: str, spec: Spec, why: str) -> None:
    assert why in dispatch.reasons(dispatch.BY_NAME[name], spec)
    with pytest.raises(NoKernelError) as raised:
        dispatch.choose(spec, name)
    assert why in str(raised.value)
    for kernel in dispatch.kernels_of("attention"):  # the error carries the whole table
        assert kernel.name in str(raised.value)


def test_no_kernel_at_all() -> None:
    with pytest.raises(NoKernelError, match="no kernel serves this problem") as raised:
        dispatch.choose(replace(CPU, precision="int8_fp8"))
    assert 'not "int8_fp8"' in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_rows_name_every_kernel_and_at_most_one_runs() -> None:
    for spec in (CPU, CUDA, replace(CPU, precision="int8_fp8")):
        rows = dispatch.verdicts(spec)
        assert [row[0] for row in rows] == [kernel.name for kernel in dispatch.kernels_of("attention")]
        runs = [row[0] for row in rows if row[1] == "runs"]
        assert runs == ([] if spec.precision == "int8_fp8" else [dispatch.choose(spec).name])
        assert all(row[1] in ("runs", "could", "on request", "no") and row[2] for row in rows)


def test_also_adds_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    picky = dispatch.Kernel("picky", "cpu", "for tests", also=lambda spec: [f"dislikes head_dim {spec.head_dim}"])
    assert dispatch.reasons(picky, CPU) == ["dislikes head_dim 64"]


def test_dtypes_are_respected() -> None:
    only_half = dispatch.Kernel("half", "cpu", "for tests", dtypes=("float16",))
    assert dispatch.reasons(only_half, CPU) == ["takes float16, not float32"]


def test_operations_have_rows_of_their_own() -> None:
    spec = Spec("cpu", 0, "float32", op="softmax")
    assert dispatch.choose(spec).op == "softmax"
    assert {name for name, *_ in dispatch.verdicts(spec)} == {row.name for row in dispatch.kernels_of("softmax")}
    with pytest.raises(ValueError, match=f"kernel is 'cpu'; allowed: None, '{dispatch.kernels_of('softmax')[0].name}'"):
        dispatch.choose(spec, "cpu")
    assert dispatch.reasons(dispatch.BY_NAME["cpu"], spec) == ["computes attention, not softmax"]


def test_an_operation_no_kernel_serves_says_why_of_each_row() -> None:
    spec = Spec("cpu", 0, "int32", op="softmax")
    with pytest.raises(NoKernelError, match="no kernel serves this softmax") as raised:
        dispatch.choose(spec)
    for row in dispatch.kernels_of("softmax"):
        assert row.name in str(raised.value)
    assert "not int32" in str(raised.value)


@pytest.mark.parametrize(
    ("arch", "precision", "head_dim", "keys", "note"),
    [
        (80, "int8", 64, 16384, "at this head_dim fa_mma is usually faster"),
        (
            80,
            "int8",
            128,
            4095,
            "below 4096 queries and keys fa_mma is usually faster (quantizing is not paid back); precision=None",
        ),
        (80, "int8", 128, 4096, None),
        (90, "int8", 128, 8191, "below 8192 queries and keys sm90_fwd is usually faster (quantizing is not paid"),
        (90, "int8", 128, 8192, None),
        (90, "int8", 64, 16384, "at this head_dim sm90_fwd is usually faster"),
        (90, "int8", 256, 8192, None),
        (90, "int8_fp8", 64, 16384, "at this head_dim sm90_fwd is usually faster"),
        (90, "int8_fp8", 128, 16383, "below 16384 queries and keys sm90_fwd is usually faster"),
        (90, "int8_fp8", 128, 16384, None),
        (90, "int8_fp8", 256, 8191, "below 8192 queries and keys sm90_fwd is usually faster"),
        (90, "int8_fp8", 256, 8192, None),
    ],
)
def test_notes_tell_where_quantizing_is_not_paid_back(
    arch: int, precision: str, head_dim: int, keys: int, note: str | None
) -> None:
    spec = Spec("cuda", arch, "float16", head_dim, precision=precision)
    found = dispatch.notes(spec, dispatch.choose(spec).name, keys)
    assert [text.startswith(note) for text in found] == [True] if note else found == []


@pytest.mark.parametrize(
    ("precision", "head_dim", "keys", "where"),
    [
        ("int8", 64, 16384, "at this head_dim"),
        ("int8", 128, 4095, "below 4096 queries and keys"),
        ("int8", 256, 4096, None),
        ("int8_fp8", 128, 4095, "below 4096 queries and keys"),
        ("int8_fp8", 128, 4096, None),
        ("int8_fp8", 256, 4095, "below 4096 queries and keys"),
        ("int8_fp8", 256, 4096, None),
    ],
)
def test_notes_on_kept_keys_and_values(precision: str, head_dim: int, keys: int, where: str | None) -> None:
    spec = Spec("cuda", 90, "bfloat16", head_dim, precision, kv="kept")
    text = f"{where} sm90_fwd on k and v of bfloat16 is usually faster"
    assert dispatch.notes(spec, dispatch.choose(spec).name, keys) == ([text] if where else [])


def test_there_is_nothing_to_note_elsewhere() -> None:
    assert dispatch.notes(CUDA, "fa", 16) == dispatch.notes(CPU, "cpu", 16) == dispatch.notes(CPU, None, 16) == []
    for kernel in dispatch.KERNELS:  # head dims rise, and only what is quantized has something to pay back
        for (precision, kv), steps in kernel.pays_from:
            head_dims = [head_dim for head_dim, _ in steps]
            assert head_dims == sorted(head_dims) and precision in kernel.precisions[precision == "native" :]
            assert kv in kernel.kvs
