"""Keys of prefixes: golden vectors and properties."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from descriptors.prefix_keys import Namespace, chunk_keys, model_of_all

NAMESPACE = Namespace(model="llama-3.1-8b", dtype="bfloat16", block_tokens=16)


def test_prefix_keys_are_the_documented_ones() -> None:
    """Golden vectors of docs/reference/protocol.md."""
    assert NAMESPACE.text() == (
        "model=llama-3.1-8b\ndtype=bfloat16\nlayout=KV_L2TD\nblock_tokens=16\n"
        "tp_rank=0\ntp_size=1\npp_rank=0\npp_size=1\nlora=\nsalt=\n"
    )
    digests = [
        "4ad69dad7bb2ca5ae5127493cc173a1160451cc4a0e71f0f453cd13dbc651099",
        "08bbe4fcb7f145acd0ac8d8716e3fe9ec4dd58baeb4729d88c73a05e6e541386",
    ]
    prefix = "kv/llama-3.1-8b/KV_L2TD-bfloat16-16/tp0of1-pp0of1/"
    assert chunk_keys(NAMESPACE, list(range(40)), 16) == [prefix + digest for digest in digests]
    assert chunk_keys(NAMESPACE.text(), list(range(40)), 16) == digests


def test_keys_and_metadata_say_whose_they_are() -> None:
    """Whatever a model is called, its name is one part of a key, and a value that a header can have."""
    space = Namespace(
        "fingerprint", "torch.bfloat16 auto", 16, tp_rank=1, tp_size=2, lora="a", salt="s", name="Org/Ä b"
    )
    assert space.prefix(64) == "kv/Org-b/KV_L2TD-bfloat16-64/tp1of2-pp0of1/"
    assert space.metadata(64) == {
        "model": "Org/%C3%84%20b", "dtype": "torch.bfloat16%20auto", "layout": "KV_L2TD", "tokens": "64",
    }  # fmt: skip
    assert (
        space.text()
        == Namespace("fingerprint", "torch.bfloat16 auto", 16, tp_rank=1, tp_size=2, lora="a", salt="s").text()
    )


@given(st.text(min_size=1), st.text(min_size=1))
@example("\N{GRINNING FACE}" * 1000, "\N{GRINNING FACE}" * 1000)
@example("../..", " ")
def test_any_name_gives_keys_and_metadata_that_s3_takes(name: str, dtype: str) -> None:
    space = Namespace(name, dtype, 16)
    parts = space.prefix(16).split("/")
    assert len(parts) == 5
    assert all(part not in ("", ".", "..") for part in parts[:-1])
    assert space.prefix(16).isascii()
    values = space.metadata(16).values()
    assert all(value.isascii() and value.isprintable() and value == value.strip() for value in values)
    assert sum(map(len, values)) < 2048


@given(st.lists(st.integers(0, 2**32 - 1), max_size=80), st.integers(1, 9))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(tokens: list[int], chunk_tokens: int) -> None:
    """What makes sharing work; a partial last chunk has no key."""
    keys = chunk_keys("n", tokens, chunk_tokens)
    assert len(keys) == len(tokens) // chunk_tokens
    for cut in range(0, len(tokens), 7):
        assert chunk_keys("n", tokens[:cut], chunk_tokens) == keys[: cut // chunk_tokens]


def test_namespaces_that_differ_share_no_text() -> None:
    """A value that looks like the next field must not collide with it."""
    assert Namespace("m\nlora=x", "d", 16).text() != Namespace("m", "d", 16, lora="x").text()
    assert Namespace("m%0A", "d", 16).text() != Namespace("m\n", "d", 16).text()


@pytest.mark.parametrize("tokens", [[-1], [2**32], [0.5], [[1]]])
def test_tokens_must_be_unsigned_32_bit(tokens: list[object]) -> None:
    with pytest.raises(ValueError, match="tokens"):
        chunk_keys("n", tokens, 1)  # type: ignore[arg-type]


def test_the_model_of_keys_is_one_or_none() -> None:
    """The loss of chunks is told by their model, so keys of two models have none."""
    mine, other = f"kv/mine/x/{1:064x}", f"sglang/other/x/{1:064x}"
    assert model_of_all([mine, f"kv/mine/y/{2:064x}"]) == "mine"
    assert model_of_all(["a", f"{2:064x}", "runs/mine/x"]) == ""
    for keys in (
        [mine, other],
        [mine, "a"],
        ["a", mine],
        [mine, f"vllm/mine/x/{1:064x}"],
        [mine, f"kv/mine2/{2:064x}"],
    ):
        assert model_of_all(keys) is None
