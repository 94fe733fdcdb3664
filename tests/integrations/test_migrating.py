"""docs/migrating.md: its Python blocks run as they stand, and its links lead somewhere."""

import re
from pathlib import Path

import numpy as np
import pytest

import qflash

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "migrating.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_page_is_short_and_linked():
    assert len(TEXT.splitlines()) <= 150
    assert "(docs/migrating.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block):
    for name in re.findall(r"^import (torch|jax)", block, re.MULTILINE):
        pytest.importorskip(name)
    exec(compile(block, PAGE.name, "exec"), {})


def test_links_lead_to_files():
    links = re.findall(r"\]\((?!https?://)([^)#]+)", TEXT)
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


def test_what_the_page_says_of_jax():
    """is_causal and windows are aligned to the top left; with both lengths, causal alone does for the real rows."""
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]
    q, k, v = jax.device_put(jax.random.normal(jax.random.key(0), (3, 2, 40, 4, 16)), cpu)
    theirs = jax.nn.dot_product_attention
    short, tall = (q[:, :9], k, v), (q, k[:, :9], v[:, :9])
    np.testing.assert_allclose(
        qflash.attention(q[:, :9], k[:, :9], v[:, :9], causal=True), theirs(*short, is_causal=True), atol=1e-5
    )
    np.testing.assert_allclose(qflash.attention(*tall, window=(-1, 31)), theirs(*tall, is_causal=True), atol=1e-5)
    lens = np.array([40, 25], np.int32)
    want = theirs(q, k, v, is_causal=True, query_seq_lengths=lens, key_value_seq_lengths=lens)
    got = qflash.attention(q, k, v, causal=True)
    for b, length in enumerate(lens):
        np.testing.assert_allclose(got[b, :length], want[b, :length], atol=1e-5)
