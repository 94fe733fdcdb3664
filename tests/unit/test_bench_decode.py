"""The presets of serving (decode_pages, decode_mixed, kv_write) on the CPU, with stand-ins for peers of the GPU."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import numpy as np
import pytest

from qflash import reference
from qflash.cli.bench import load
from qflash.testing import Case, errors
from qflash.testing.timing import WallClock

torch = pytest.importorskip("torch")
attention, kv_write, mixed, paged, paged_peers, peers, presets, report, rows, run, style = (
    load(name)
    for name in (
        "attention", "kv_write", "mixed", "paged", "paged_peers", "peers", "presets", "report", "rows", "run",
        "drawing.style",
    )
)  # fmt: skip
PRESETS = presets.PRESETS
UNIFORM = Case(q_len=1, k_len=512, q_heads=4, kv_heads=2, head_dim=32, batch=2)
RAGGED = replace(UNIFORM, batch=3, k_len=222, kv_lens=(300, 17, 350))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(run.Suite, "clock", lambda self: (WallClock(settle=0), 1e-5))


def here(name: str, *kernels: str, **changes):
    """A preset of the GPU on the CPU, with kernels of the CPU."""
    return replace(PRESETS[name], device="cpu", kernels=kernels, peers=(), **changes)


def rows_of(preset, case, on_skip=lambda text: None):
    (found,) = run.measure(attention.suite_of(preset), cases=(case,), budget=0, min_rounds=2, on_skip=on_skip)
    return {row["candidate"]: row for row in found}


def attend(q, k, v):
    """`[B, 1, Hq, D]` against `[T, Hkv, D]` of each sequence."""
    parts = [
        reference.attention(x[None].double().numpy(), a[None].double().numpy(), b[None].double().numpy())[0]
        for x, a, b in zip(q, k, v, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts)).to(q.dtype)


# Pages ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["phtd", "pthd"])
@pytest.mark.parametrize("page_size", [256, 16])
@pytest.mark.parametrize("case", [UNIFORM, RAGGED])
def test_pages_hold_the_tokens(case, page_size, layout):
    x = paged.PagedArrays(case, "cpu")
    table, first = x.page_table(page_size), 0
    used = []
    for b, length in enumerate(x.lens):
        needed = x.pages_of(page_size)[b]
        used += table[b, :needed].tolist()
        for pool, tokens in zip(x.pools(page_size, layout), x.tokens, strict=True):
            found = pool[table[b, :needed].long()]
            found = (found.transpose(1, 2) if layout == "phtd" else found).flatten(0, 1)[:length]
            assert torch.equal(found, tokens.flatten(0, 1)[first : first + length])
        first += -(-length // 256) * 256
    assert len(set(used)) == len(used) and used != sorted(used)
    assert x.torch_lens.tolist() == list(x.lens)


def test_arrays_are_the_same_tokens():
    x = paged.PagedArrays(UNIFORM, "cpu")
    q, k, v = x.torch
    assert q.shape == (2, 1, 4, 32) and k.shape == v.shape == (2, 512, 2, 32)
    assert torch.equal(k.flatten(), x.tokens[0].flatten()) and not torch.equal(k, v)
    assert errors(attend(q, k, v)[:1, :, :1].numpy(), x.truth).relative_l2 < 1e-6
    with pytest.raises(run.Unavailable, match="these sequences have different lengths"):
        paged.PagedArrays(RAGGED, "cpu").torch  # noqa: B018


def test_rows_on_pages_have_the_columns_of_decode():
    found = rows_of(here("decode_pages", "cpu", "cpu_pages", "cpu_pages_int8"), UNIFORM)
    names = ["qflash cpu", "qflash cpu, pages of 256", "qflash cpu, pages of 16", "qflash cpu, INT8 pages of 256"]
    assert list(found) == names
    (columns,) = {tuple(row) for row in found.values()}
    (committed,) = {tuple(row) for row in rows.committed("decode")["nvidia-h200"]}
    assert columns == tuple(name for name in committed if name != "peak_bytes")  # which the CPU does not count
    assert [row["rel_l2"] < 1e-5 for row in found.values()] == [True, True, True, False]
    assert [row["precision"] for row in found.values()] == ["native"] * 3 + ["int8"]
    assert found[names[3]]["rel_l2"] < 0.015
    for name, row in found.items():
        channel = 32 + 4 if "INT8" in name else 4 * 32
        # p50 is stored rounded, so agreement is to its last digit
        assert row["gbs"] == pytest.approx(2 * 2 * 512 * 2 * channel / row["us"]["p50"] / 1e3, rel=0.02, abs=0.01)


def test_who_takes_part_on_the_gpu():
    names = [one.name for one in peers.candidates(PRESETS["decode_pages"])]
    ours = [name for name in names if name.startswith("qflash")]
    assert ours == [
        "qflash sm90_decode", "qflash sm90_decode, pages of 256", "qflash sm90_decode, pages of 16",
        "qflash sm90_decode, INT8 pages of 256", "qflash decode", "qflash decode, pages of 256",
        "qflash decode, pages of 16",
    ]  # fmt: skip
    others = set(names) - set(ours)
    on_pages = {f"{peer}, pages of {size}" for peer in ("FlashAttention 3", "FlashInfer") for size in (256, 16)}
    assert others == {"torch SDPA cudnn", "FlashAttention 3", "FlashInfer", *on_pages}
    assert others <= set(attention.OVER)  # or the best peer would not be known
    assert "FlashInfer" in [one.name for one in peers.candidates(PRESETS["decode"])]
    shapes = {(case.batch, case.k_len) for case in PRESETS["decode_pages"].cases}
    assert shapes == {
        (1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 1024), (8, 8192), (32, 8192), (128, 1024), (128, 8192),
    }  # fmt: skip
    looks = style.looks(names)
    assert all(style.known(name) for name in names) and len(set(looks.values())) == len(looks)
    filled = [look.colour for look in looks.values() if look.filled]
    assert len(set(filled)) == len(filled)


def test_a_table_has_a_line_per_candidate(monkeypatch):
    found = list(rows_of(here("decode_pages", "cpu", "cpu_pages", "cpu_pages_int8"), UNIFORM).values())
    for row in found:
        row["speedup"] = {"FlashInfer": 1.25, "qflash sm90_decode, pages of 256": 0.5}
    monkeypatch.setattr(report.store, "committed", lambda name, machine=None: {"m": found})
    table = report.paged_table("decode_pages")
    assert table.count("B=2 Tq=1 Tk=512 Hq=4 Hkv=2 D=32") == 1 and table.count("**1.25×** FlashInfer | 0.50×") == 4
    assert "- qflash cpu, float32: 1.25× the best of FlashInfer" in table


def test_pages_on_a_cpu_are_held_against_arrays(monkeypatch):
    preset = PRESETS["cpu-decode-pages"]
    found = rows_of(preset, UNIFORM)
    ours = [name for name in found if name.startswith("qflash")]
    assert ours == [
        "qflash cpu", "qflash cpu, pages of 256", "qflash cpu, pages of 16", "qflash cpu, INT8 pages of 256",
    ]  # fmt: skip
    assert list(found) == [*ours, "torch SDPA"]
    for name in ours[1:]:
        assert "qflash cpu" in found[name]["speedup"]
        found[name]["speedup"]["qflash cpu"] = 0.375
    monkeypatch.setattr(report.store, "committed", lambda name, machine=None: {"m": list(found.values())})
    table = report.paged_table("cpu-decode-pages")
    assert "× arrays" in table and table.count("0.38×") == 3
    looks = style.looks(found)
    assert all(style.known(name) for name in found) and len(set(looks.values())) == len(looks)


# Peers ----------------------------------------------------------------------------------------------------------------


def test_flash_attention_3_on_a_cache(monkeypatch):
    """With a page table the pages' tokens, without one arrays; `flash_attn_func` would not split keys."""

    def with_cache(q, k, v, causal, page_table=None, cache_seqlens=None):
        if page_table is None:
            return attend(q, k, v), None
        tokens = [
            [pool[row.long()].flatten(0, 1)[:length] for row, length in zip(page_table, cache_seqlens, strict=True)]
            for pool in (k, v)
        ]
        return attend(q, *tokens), None

    module = types.SimpleNamespace(__name__="flash_attn_interface", flash_attn_with_kvcache=with_cache)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    case = replace(UNIFORM, dtype="bfloat16")
    x = paged.PagedArrays(case, "cpu")
    for one in (peers_named("FlashAttention 3"), *map(paged_peers.flash_attn_3_pages, (256, 16))):
        assert errors(one.read(one.make(x)())[:1, :, :1], x.truth).relative_l2 < 0.01
    with pytest.raises(run.Unavailable, match="takes no float32"):
        paged_peers.flash_attn_3_cache().make(paged.PagedArrays(UNIFORM, "cpu"))
    del module.flash_attn_with_kvcache
    with pytest.raises(run.Unavailable, match="flash_attn_interface has no flash_attn_with_kvcache"):
        paged_peers.flash_attn_3_cache().make(x)


def peers_named(name: str):
    (found,) = (one for one in peers.peers(PRESETS["decode"]) if one.name == name)
    return found


class FakeWrapper:
    """What FlashInfer's wrapper is told, and attention by that."""

    made = ()

    def __init__(self, workspace, layout, **words):
        assert workspace.dtype is torch.uint8 and not workspace.any() and words["use_cuda_graph"]
        self.layout, self.words = layout, words
        FakeWrapper.made += (self,)

    def plan(self, ends, indices, last, q_heads, kv_heads, head_dim, page_size, *, q_data_type, kv_data_type):
        assert (q_heads, kv_heads, head_dim) == (4, 2, 32) and q_data_type is kv_data_type is torch.float32
        buffers = [self.words[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")]
        for mine, theirs in zip((ends, indices, last), buffers, strict=True):
            assert mine.dtype is theirs.dtype is torch.int32 and torch.equal(mine, theirs) and mine is not theirs
        self.planned = (ends.tolist(), indices.long(), last.tolist(), page_size)

    def run(self, q, pools):
        ends, indices, last, page_size = self.planned
        tokens = []
        for pool in pools:
            pool = pool.transpose(1, 2) if self.layout == "HND" else pool
            assert pool.shape[1:] == (page_size, 2, 32)
            tokens.append(
                [
                    pool[indices[begin:end]].flatten(0, 1)[: (end - begin - 1) * page_size + rest]
                    for begin, end, rest in zip(ends, ends[1:], last, strict=False)
                ]
            )
        return attend(q[:, None], *tokens)[:, 0]


@pytest.mark.parametrize("case", [UNIFORM, RAGGED])
def test_flashinfer_is_planned_once(case, monkeypatch):
    module = types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(FakeWrapper, "made", ())
    x = paged.PagedArrays(case, "cpu")
    on_arrays = [paged_peers.flashinfer()] if case is UNIFORM else []
    for one in (*on_arrays, *map(paged_peers.flashinfer_pages, (256, 16))):
        call = one.make(x)
        for result in (call(), call()):
            assert errors(one.read(result)[:1, :, :1], x.truth).relative_l2 < 1e-6
    assert len(FakeWrapper.made) == 2 + len(on_arrays)  # not with every call
    assert [made.words["use_tensor_cores"] for made in FakeWrapper.made] == [False] * len(FakeWrapper.made)
    many = paged.PagedArrays(replace(case, q_heads=8), "cpu")
    with pytest.raises(AssertionError):  # its plan is of other heads
        paged_peers.flashinfer_pages(16).make(many)
    assert FakeWrapper.made[-1].words["use_tensor_cores"]


def test_a_plan_that_fails_leaves_flashinfer_out(monkeypatch):
    def plan(self, *given, **words):
        raise RuntimeError("Ninja build failed.\nmore")

    monkeypatch.setattr(FakeWrapper, "plan", plan)
    monkeypatch.setitem(
        sys.modules, "flashinfer", types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeWrapper)
    )
    with pytest.raises(run.Unavailable, match=r"^Ninja build failed\.$"):
        paged_peers.flashinfer_pages(16).make(paged.PagedArrays(UNIFORM, "cpu"))


def test_peers_that_are_not_installed_are_said(monkeypatch):
    for module in ("flash_attn_interface", "fa3_fwd_interface", "flashinfer"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(peers, "peers", lambda preset: paged_peers.decoding_peers(preset.page_sizes))
    told = []
    found = rows_of(here("decode_pages", "cpu_pages"), UNIFORM, told.append)
    assert list(found) == ["qflash cpu, pages of 256", "qflash cpu, pages of 16"]
    assert [text.partition(": ")[0] for text in told] == [
        "FlashAttention 3", "FlashInfer", "FlashAttention 3, pages of 256", "FlashAttention 3, pages of 16",
        "FlashInfer, pages of 256", "FlashInfer, pages of 16",
    ]  # fmt: skip
    assert all("cannot be imported" in text for text in told)


# Different lengths ----------------------------------------------------------------------------------------------------


def test_lengths_are_spread_by_their_logarithms():
    (case,) = PRESETS["decode_mixed"].cases
    lens = np.array(case.kv_lens)
    assert len(lens) == case.batch == 64 and 100 <= lens.min() < 200 and 10000 < lens.max() <= 20000
    assert 20 < (lens < 1414).sum() < 44  # the middle of both ends' logarithms
    assert presets._mixed() == case  # by a seed
    equal = mixed.equal_lengths(case.kv_lens)
    assert len(equal) == 64 and sum(equal) == lens.sum() and max(equal) - min(equal) <= 1


def test_rows_of_different_lengths(monkeypatch):
    found = rows_of(here("decode_mixed", "cpu_pages", "cpu_pages_int8"), RAGGED)
    names = ["qflash cpu, pages of 256", "qflash cpu, INT8 pages of 256"]
    assert list(found) == [f"{name}, {lengths}" for name in names for lengths in ("mixed", "uniform")]
    for name, row in found.items():
        assert (row["tokens"], row["shortest"], row["longest"]) == (667, 17, 350)
        assert row["rel_l2"] < (0.015 if "INT8" in name else 1e-5)
        rivals = [f"{row['of']}, uniform"] if row["lengths"] == "mixed" else []
        assert list(row["speedup"]) == rivals and all(value > 0 for value in row["speedup"].values())
        channel = 32 + 4 if "INT8" in name else 4 * 32
        assert row["gbs"] == pytest.approx(2 * 667 * 2 * channel / row["us"]["p50"] / 1e3, rel=0.02, abs=0.01)
    found[f"{names[0]}, mixed"]["speedup"] = {f"{names[0]}, uniform": 0.934}
    monkeypatch.setattr(mixed.tables.store, "committed", lambda name, machine: {"m": list(found.values())})
    table = mixed.table()
    assert "| 3 sequences of 17 to 350 tokens, 667 in all | equal lengths |" in table
    assert table.count("| **qflash cpu, ") == 2 and "| **93.4%** |" in table


# The write ------------------------------------------------------------------------------------------------------------


def test_rows_of_writes(monkeypatch):
    preset = here("kv_write", "cpu_kv_write_pages", "cpu_kv_write_pages_int8")
    assert [case.batch for case in PRESETS["kv_write"].cases] == [1, 8, 128]
    found = rows_of(preset, replace(UNIFORM, batch=3, k_len=256))
    assert list(found) == [
        "qflash cpu_kv_write, pages of 256", "qflash cpu_kv_write, INT8 pages of 256", kv_write.SCATTER,
    ]  # fmt: skip
    assert [list(row["speedup"]) for row in found.values()] == [[kv_write.SCATTER], [kv_write.SCATTER], []]
    assert {row["kind"] for row in found.values()} == {"write"}
    monkeypatch.setattr(kv_write.tables.store, "committed", lambda name, machine: {"m": list(found.values())})
    assert kv_write.table().count("B=3 T=1 Hkv=2 D=32") == 1


def test_a_scatter_stores_the_tokens_where_they_belong():
    tokens = kv_write.Tokens(replace(UNIFORM, batch=5), "cpu", 256)
    kv_write.scatter().make(tokens)()
    k_pages, v_pages, *_ = tokens.scattered
    x = tokens.written(False)
    x.rope = None  # which a scatter has not
    wanted = x.replay()
    for pool, name in ((k_pages, "k_pages"), (v_pages, "v_pages")):
        np.testing.assert_array_equal(pool.numpy(), wanted.pools[name])


def test_a_write_that_differs_from_the_replay_is_not_timed(monkeypatch):
    def replay(self):
        after = self.copied()
        after.pools["k_pages"][0, 0, 0, 0] += 1
        return after

    monkeypatch.setattr(kv_write.WriteArrays, "replay", replay)
    with pytest.raises(SystemExit, match="qflash cpu_kv_write, pages of 256 differs from the replay: k_pages: "):
        rows_of(here("kv_write", "cpu_kv_write_pages"), replace(UNIFORM, k_len=256))
