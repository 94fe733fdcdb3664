"""Peers for decoding: FlashAttention 3 with a cache and FlashInfer, on arrays and on pages."""

from __future__ import annotations

from typing import Any

from bench.arrays import Arrays, Candidate, load
from bench.paged import PagedArrays
from bench.run import Unavailable, tried
from qflash.testing.timing import Call

FA3_MODULES = ("flash_attn_interface", "fa3_fwd_interface")
FLASHINFER_WORKSPACE = 256 << 20  # bytes; twice what its documentation recommends
FLASHINFER_PAGE = 16  # tokens: arrays are passed as contiguous pages of this size
TENSOR_CORES_FROM = 4  # query heads per KV head from which FlashInfer is faster with them


def _with_cache() -> Any:
    """FlashAttention 3's call for decoding, which splits keys over blocks by its own heuristic."""
    module = load(*FA3_MODULES)
    function = getattr(module, "flash_attn_with_kvcache", None)
    if function is None:
        raise Unavailable(f"{module.__name__} has no flash_attn_with_kvcache")
    return function


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def flash_attn_3_cache() -> Candidate:
    def make(arrays: Arrays) -> Call:
        function, (q, k, v), causal = _with_cache(), arrays.torch, arrays.case.causal
        if q.dtype == load("torch").float32:
            raise Unavailable("takes no float32")
        return tried(lambda: _first(function(q, k, v, causal=causal)))

    return Candidate("FlashAttention 3", make)


def flash_attn_3_pages(page_size: int) -> Candidate:
    def make(arrays: PagedArrays) -> Call:
        function, q = _with_cache(), arrays.q
        words = {"page_table": arrays.page_table(page_size), "cache_seqlens": arrays.torch_lens}
        k, v = arrays.pools(page_size, "pthd")
        return tried(lambda: _first(function(q, k, v, causal=arrays.case.causal, **words)))

    return Candidate(f"FlashAttention 3, pages of {page_size}", make)


def _planned(q: Any, k: Any, v: Any, indices: Any, lens: tuple[int, ...], page_size: int, layout: str) -> Call:
    """FlashInfer's call on pools k and v, planned once: its plan runs on the host and is not timed.

    indices: the pages of all sequences, concatenated.
    """
    flashinfer, torch = load("flashinfer"), load("torch")
    int32 = {"dtype": torch.int32, "device": q.device}
    ends = torch.tensor([0, *(-(-length // page_size) for length in lens)], **int32).cumsum(0).int()
    last = torch.tensor([(length - 1) % page_size + 1 for length in lens], **int32)
    kv_heads, (_, _, q_heads, head_dim) = k.shape[1 if layout == "HND" else 2], q.shape
    try:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=q.device),
            layout,
            use_cuda_graph=True,
            use_tensor_cores=q_heads // kv_heads >= TENSOR_CORES_FROM,
            paged_kv_indptr_buffer=ends.clone(),
            paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )
        sizes = (q_heads, kv_heads, head_dim, page_size)
        wrapper.plan(ends, indices, last, *sizes, q_data_type=q.dtype, kv_data_type=k.dtype)
    except (RuntimeError, ValueError) as error:  # it may compile here
        raise Unavailable(str(error).partition("\n")[0]) from None
    one = q[:, 0]
    return tried(lambda: wrapper.run(one, (k, v))[:, None])


def flashinfer() -> Candidate:
    def make(arrays: Arrays) -> Call:
        torch, case, (q, *kv) = load("torch"), arrays.case, arrays.torch
        load("flashinfer")
        if case.q_len != 1 or case.k_len % FLASHINFER_PAGE:
            raise Unavailable(f"takes one query, and whole pages of {FLASHINFER_PAGE} tokens of an array")
        k, v = (x.reshape(-1, FLASHINFER_PAGE, *x.shape[2:]) for x in kv)
        indices = torch.arange(len(k), dtype=torch.int32, device=q.device)
        return _planned(q, k, v, indices, (case.k_len,) * case.batch, FLASHINFER_PAGE, "NHD")

    return Candidate("FlashInfer", make)


def flashinfer_pages(page_size: int) -> Candidate:
    def make(arrays: PagedArrays) -> Call:
        torch = load("torch")
        load("flashinfer")
        needed, table = arrays.pages_of(page_size), arrays.page_table(page_size)
        indices = torch.cat([row[:count] for row, count in zip(table, needed, strict=True)])
        return _planned(arrays.q, *arrays.pools(page_size, "phtd"), indices, arrays.lens, page_size, "HND")

    return Candidate(f"FlashInfer, pages of {page_size}", make)


def decoding_peers(page_sizes: tuple[int, ...]) -> list[Candidate]:
    """On arrays, then on pages."""
    on_pages = [peer(size) for peer in (flash_attn_3_pages, flashinfer_pages) for size in page_sizes]
    return [flash_attn_3_cache(), flashinfer(), *on_pages]
