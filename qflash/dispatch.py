"""Pure functions that choose among KERNELS: which kernels serve a call, which do not, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from qflash.call.spec import ACTIVATIONS, MOST_DECODE_ROWS, PRECISIONS, Spec
from qflash.errors import NoKernelError
from qflash.kernels import KERNELS as KERNELS  # the table and its rows, imported from here by callers
from qflash.kernels import Kernel as Kernel

BY_NAME = {kernel.name: kernel for kernel in KERNELS}


def kernels_of(op: str = "attention", device: str | None = None) -> tuple[Kernel, ...]:
    """The rows of one operation, on one device if it is given."""
    return tuple(kernel for kernel in KERNELS if kernel.op == op and device in (None, kernel.device))


def arch_reasons(kernel: Kernel, arch: int, whose: str = "this GPU has") -> list[str]:
    """Why `kernel` has no code for compute capability `arch`/10; empty if it has. `whose`: text before the number."""
    if arch < kernel.min_arch:
        return [f"needs compute capability {kernel.min_arch / 10}, {whose} {arch / 10}"]
    if arch > kernel.min_arch and not kernel.later_arches:
        return [f"runs on compute capability {kernel.min_arch / 10} alone, {whose} {arch / 10}"]
    return []


def reasons(kernel: Kernel, spec: Spec) -> list[str]:
    """Why `kernel` cannot serve `spec`; empty if it can."""
    if kernel.op != spec.op:
        return [f"computes {kernel.op}, not {spec.op}"]
    if kernel.device != spec.device:
        elsewhere = f"runs on {kernel.device}, the arrays are on {spec.device}"
        return [elsewhere, *_reasons_there(kernel, replace(spec, device=kernel.device, arch=_NEWEST_ARCH))]
    return arch_reasons(kernel, spec.arch) + _reasons_there(kernel, spec)


# Stands for an unknown GPU: what is rejected there is rejected on every GPU.
_NEWEST_ARCH = 1000


def _reasons_there(kernel: Kernel, spec: Spec) -> list[str]:
    """Why `kernel` cannot serve `spec` on a device that it has code for."""
    found = []
    if spec.dtype not in kernel.dtypes:
        found.append(f"takes {', '.join(kernel.dtypes)}, not {spec.dtype}")
    if spec.precision not in kernel.precisions_of(spec.kv):
        taken = " or ".join(map(_precision_word, kernel.precisions_of(spec.kv)))
        of_kv = "qflash.QuantizedKV of " if spec.kv == "kept" and kernel.kept_precisions else ""
        found.append(f"takes {of_kv}precision {taken}, not {_precision_word(spec.precision)}")
    if spec.kv not in kernel.kvs:
        taken = " or ".join(_KV_WORDS[kv] for kv in kernel.kvs)
        found.append(f"takes {taken} for k and v, not {_KV_WORDS[spec.kv]}")
    if kernel.few_rows and not spec.few_rows:
        found.append(f"takes up to {MOST_DECODE_ROWS} rows of queries a KV head (Tq times the heads that share it)")
    if spec.sinks and not kernel.sinks:
        found.append("takes no sinks")
    if spec.batch_invariant and not kernel.batch_invariant:
        found.append("does not promise the same bits in every batch (batch_invariant)")
    if kernel.also is not None:
        found += kernel.also(spec)
    return found


def _precision_word(precision: str) -> str:
    """The precision of a Spec as an argument of `attention`."""
    return "None" if precision == "native" else f'"{precision}"'


_KV_WORDS = {
    "arrays": "arrays", "quantized": "qflash.Quantized", "kept": "qflash.QuantizedKV",
    "pages": "qflash.PagedKV", "pages_int8": "qflash.PagedKV of int8",
}  # fmt: skip


@lru_cache(maxsize=4096)
def choose(spec: Spec, name: str | None = None) -> Kernel:
    """The kernel that serves `spec`: the one called `name`, or the first usable row of its operation."""
    if name is not None:
        kernel = BY_NAME.get(name)
        if kernel is None or kernel.op != spec.op:
            allowed = "".join(f", {other.name!r}" for other in kernels_of(spec.op))
            raise ValueError(f"kernel is {name!r}; allowed: None{allowed}")
        why_not = reasons(kernel, spec)
        if why_not:
            raise NoKernelError(
                f"kernel {name!r} cannot serve this problem: {'; '.join(why_not)}\n{table(verdicts(spec))}"
            )
        return kernel
    for kernel in kernels_of(spec.op):
        if kernel.automatic and not reasons(kernel, spec):
            return kernel
    problem = "problem" if spec.op == "attention" else spec.op
    raise NoKernelError(f"no kernel serves this {problem}\n{table(verdicts(spec))}")


def backward_of(spec: Spec) -> Kernel | None:
    """The kernel that computes the gradients of a call with this `spec`; None if there is none."""
    try:
        return choose(replace(spec, op="attention_backward"))
    except NoKernelError:
        return None


def verdicts(spec: Spec, asked: str | None = None) -> list[tuple[str, str, str]]:
    """(kernel, verdict, reason) for every kernel of the operation, as shown by `explain`. `asked`: that requested."""
    chosen = asked
    why_first = "comes first" if asked is None else "was asked for"
    result = []
    for kernel in kernels_of(spec.op):
        why_not = reasons(kernel, spec)
        if why_not:
            result.append((kernel.name, "no", "; ".join(why_not)))
        elif kernel.name == asked:
            result.append((kernel.name, "runs", kernel.summary))
        elif not kernel.automatic:
            result.append((kernel.name, "on request", kernel.summary))
        elif chosen is None:
            chosen = kernel.name
            result.append((kernel.name, "runs", kernel.summary))
        else:
            result.append((kernel.name, "could", f"{chosen} {why_first}; {kernel.summary}"))
    return result


def notes(spec: Spec, name: str | None, tokens: int) -> list[str]:
    """Caveats of kernel `name` for `spec`: where NaN may spread, where its precision does not pay off.

    tokens: the number of queries or keys, whichever is lower. With few of either, quantization is not amortized.
    """
    if name is None:
        return []
    if spec.window and not BY_NAME[name].hides_masked_nonfinite_v:
        return [f"NaN or infinity in v may reach rows that {name} masks it from (docs/numerics.md)"]
    for head_dim, least in dict(BY_NAME[name].pays_from).get((spec.precision, spec.kv), ()):
        if spec.head_dim <= head_dim:
            if least is not None and tokens >= least:
                return []
            where = "at this head_dim" if least is None else f"below {least} queries and keys"
            plain = choose(replace(spec, precision=PRECISIONS[0], kv="arrays")).name
            if spec.kv == "kept":  # k and v are already quantized
                return [f"{where} {plain} on k and v of {spec.dtype} is usually faster"]
            return [f"{where} {plain} is usually faster (quantizing is not paid back); precision=None selects it"]
    return []


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with one precision and one kind of k and v: tested, measured and profiled separately."""

    name: str  # the kernel's, with suffixes for anything but its first precision and kind: sm90_int8_fp8_kv
    kernel: Kernel
    precision: str
    kv: str

    def spec(self, arch: int, dtype: str, head_dim: int = 0) -> Spec:
        """The simplest Spec that it serves."""
        kernel = self.kernel
        plain = Spec(
            *(kernel.device, arch, dtype, head_dim, self.precision),
            op=kernel.op,
            kv=self.kv,
            few_rows=kernel.few_rows,
        )
        if not kernel.per_activation:
            return plain
        specs = (replace(plain, activation=activation) for activation in ACTIVATIONS)
        return next((spec for spec in specs if not reasons(kernel, spec)), plain)

    @property
    def device(self) -> str:
        return self.kernel.device

    @property
    def dtypes(self) -> tuple[str, ...]:
        return self.kernel.dtypes

    @property
    def contract(self) -> str:
        """The error bounds that apply to its results (docs/numerics.md): a precision, or "int8_pages"."""
        return "int8_pages" if self.kv == "pages_int8" else self.precision


_KV_ENDINGS = {"arrays": "", "quantized": "_quantized", "kept": "_kv", "pages": "_pages", "pages_int8": "_pages_int8"}


def _variants() -> dict[str, Variant]:
    found = {}
    for kernel in KERNELS:
        for kv in kernel.kvs:
            for precision in kernel.precisions_of(kv):
                ending = precision.removeprefix(kernel.precisions_of(kv)[0]).removeprefix("_")
                name = kernel.name + (f"_{ending}" if ending else "") + _KV_ENDINGS[kv]
                found[name] = Variant(name, kernel, precision, kv)
    return found


VARIANTS = _variants()


def variants_of(op: str = "attention", device: str | None = None, kv: str = "arrays") -> tuple[Variant, ...]:
    """The variants of the kernels of one operation, on one device if it is given, for this kind of k and v."""
    kernels = kernels_of(op, device)
    return tuple(variant for variant in VARIANTS.values() if variant.kernel in kernels and variant.kv == kv)


def table(lines: list[tuple[str, str, str]]) -> str:
    """`verdicts` as aligned text."""
    if not lines:
        return "  (it has no kernel in this version)"
    widths = [max(len(line[i]) for line in lines) for i in range(2)]
    return "\n".join(f"  {name:<{widths[0]}}  {verdict:<{widths[1]}}  {why}" for name, verdict, why in lines)
