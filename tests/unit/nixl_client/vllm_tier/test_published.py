"""The names that a tier publishes are those that vLLM gives its objects."""

from __future__ import annotations

import pytest

from nixl_client.connectors.vllm_tier.rules.naming import BlockChain
from nixl_client.connectors.vllm_tier.rules.published import (
    SPACE_MAX,
    TIER_LABELS,
    CacheGroup,
    TierNames,
    parse_names,
    tier_labels,
)
from nixl_client.connectors.vllm_tier.rules.rows import RowForm, UsedPages

SPACE = "vllm/Llama/0123/"
NONE_HASH = bytes.fromhex("066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198")
TOKENS = [*range(1, 9), 70_000, 200_000, 5, 5, 128, 255, 256, 65_535]
HASHES = {
    "": (
        "52a7f141c60918f65779927090482b5a24adbe68c8613a211a1eb4e3edd9361a",
        "bee96bce54f5fcaba04c4a3fc2491b30b48e29dbbd38a327d41bc1f76b956dde",
        "24fe4ea9e0272dd7b3988811a501684f67bfb1395e763bb6ee943c1503da7319",
        "0b68882bb8889420173807faf90d782fb50b3ded07517d8223bf0a42d15ce501",
    ),
    "tenant-7": (
        "87f58b0341a610cdc92f8d6cec2e55649065ed8147e3de0b453f6f3a0887f1ec",
        "6bd84b6f2c6d66b96d1ab14b4c77e3e55b2d47ff41d3efbf78eb8567e87c7ea3",
        "701831afac5f28de813c3342343fd80873a3d52ffee8b1a9660abd2c60ec7d89",
        "63aa2a0a49a5ee92d1212c11b919713abde9b46fbc681cf0fe746287c0e9e8bf",
    ),
}
"""vLLM 0.32's own, four tokens at a time: `hash_block_tokens` with sha256, PYTHONHASHSEED unset."""


def group(number: int, chunk_tokens: int, nbytes: int, *, is_whole: bool = True) -> CacheGroup:
    return CacheGroup(number, chunk_tokens, RowForm.of([UsedPages(0, nbytes, nbytes, 1)], 1 << 20), is_whole)


@pytest.mark.parametrize("salt", list(HASHES))
@pytest.mark.parametrize("chunk_tokens", [4, 8, 16])
def test_names_are_vllms(salt: str, chunk_tokens: int) -> None:
    names = TierNames(SPACE, NONE_HASH, 2, 4)
    count, step = len(TOKENS) // chunk_tokens, chunk_tokens // 4
    wanted = [f"{SPACE}2/{each}" for each in HASHES[salt][step - 1 :: step]]
    assert list(names.prompt_keys(0, TOKENS, chunk_tokens, count, salt)) == wanted
    assert names.hash_count(chunk_tokens) == step


@pytest.mark.parametrize("chunk_tokens", [4, 8, 16])
def test_a_request_that_is_hashed_already_has_the_same_names(chunk_tokens: int) -> None:
    hashes = [bytes.fromhex(each) for each in HASHES[""]]
    known: list[bytes] = []
    chain = BlockChain(SPACE, 2, chunk_tokens // 4, lambda: known)
    with pytest.raises(ValueError, match="0 blocks have no 1 chunks"):
        chain.keys((), 1)
    known += hashes
    count = len(TOKENS) // chunk_tokens
    wanted = TierNames(SPACE, NONE_HASH, 2, 4).prompt_keys(0, TOKENS, chunk_tokens, count, "")
    assert [chain.keys((), number) for number in (0, count, 1)] == [(), wanted, wanted[:1]]


def test_chunks_that_have_no_hash_have_no_names() -> None:
    for chunk_tokens, count in ((6, 1), (2, 1), (4, 5)):
        with pytest.raises(ValueError, match="have no"):
            TierNames(SPACE, NONE_HASH, 0, 4).prompt_keys(0, TOKENS, chunk_tokens, count, "")


def test_labels_come_back_and_count_the_bytes_that_a_chunk_adds_to_a_load() -> None:
    """A group with windows is loaded whole only at the end of a prefix."""
    groups = [group(0, 16, 5000, is_whole=False), group(1, 32, 4096), group(2, 16, 1000)]
    values = tier_labels(SPACE, NONE_HASH, 16, groups, "http://store:9000", "kv")
    assert values is not None
    labels = dict(zip(TIER_LABELS, values, strict=True))
    assert parse_names(labels) == TierNames(SPACE, NONE_HASH, 1, 16)
    assert (labels["chunk_tokens"], labels["chunk_bytes"]) == ("32", str(4096 + 2 * 1000))
    assert (labels["endpoint"], labels["bucket"]) == ("http://store:9000", "kv")


def test_nothing_is_published_where_no_group_keeps_a_prefix() -> None:
    assert tier_labels(SPACE, NONE_HASH, 16, [group(0, 16, 5000, is_whole=False)], "http://s", "kv") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("space", "kv/Llama/"),
        ("space", "vllm/" + "a" * SPACE_MAX),
        ("none_hash", "00"),
        ("none_hash", "no hex"),
        ("group", "-1"),
        ("group", str(1 << 40)),
        ("hash_tokens", "0"),
        ("hash_tokens", "many"),
    ],
)
def test_labels_of_no_tier_are_refused(name: str, value: str) -> None:
    values = tier_labels(SPACE, NONE_HASH, 16, [group(0, 16, 5000)], "http://s", "kv")
    assert values is not None
    with pytest.raises(ValueError, match=r"\w"):
        parse_names({**dict(zip(TIER_LABELS, values, strict=True)), name: value})
