"""The names of pages: what decides their bytes is in them, and nothing else is."""

from __future__ import annotations

import re

import pytest

from descriptors.prefix_keys import model_of
from nixl_client.connectors.sglang.rules.naming import PageSpace, Ranks, is_replicated

HASH = "ab" * 32


def space(**fields: object) -> PageSpace:
    return PageSpace("org/Some Model", "kv", {"identity": "weights", "dtype": "bf16", **fields})


def test_a_name_says_root_model_namespace_pool_and_ends_with_the_hash() -> None:
    (name,) = space().object_names([HASH])
    assert re.fullmatch(rf"sglang/org-Some-Model/[0-9a-f]{{32}}/kv/{HASH}", name)
    assert model_of(name) == "org-Some-Model"


def test_each_part_of_a_page_is_an_object_page_by_page() -> None:
    parts = PageSpace("model", "kv", {}, 2)
    ends = [name.rpartition(parts.prefix)[2] for name in parts.object_names([HASH, "cd" * 32])]
    assert ends == [f"kv.0/{HASH}", f"kv.1/{HASH}", f"kv.0/{'cd' * 32}", f"kv.1/{'cd' * 32}"]
    assert parts.object_names([HASH], [1]) == [f"{parts.prefix}kv.1/{HASH}"]


@pytest.mark.parametrize(
    "other",
    [
        space(identity="others"),
        space(dtype="fp8"),
        space(layout="page_first"),
        PageSpace("org/Some Model", "indexer", {"identity": "weights", "dtype": "bf16"}),
        PageSpace("org/Some Model", "kv", {"identity": "weights", "dtype": "bf16"}, 2),
    ],
)
def test_pages_of_other_bytes_have_other_names(other: PageSpace) -> None:
    assert other.prefix != space().prefix


def test_a_prefix_of_one_namespace_begins_no_name_of_another() -> None:
    """Clearing a cache deletes by prefix."""
    assert space().prefix.endswith("/")


def test_keys_that_are_no_hashes_become_such() -> None:
    (name,) = space().object_names(["page/../1"])
    assert re.fullmatch(r"[0-9a-f]{64}", name.rpartition("/")[2])
    assert space().object_names(["page/../1"]) != space().object_names(["page/../2"])


@pytest.mark.parametrize(
    ("pool", "is_mla_model", "has_heads", "expected"),
    [
        ("kv", True, False, True),
        ("kv", False, True, False),
        ("mamba", True, False, False),
        ("draft", True, True, False),
    ],
)
def test_only_pages_without_heads_of_a_model_with_mla_are_the_same_in_all_ranks(
    pool: str, is_mla_model: bool, has_heads: bool, expected: bool
) -> None:
    assert is_replicated(pool, is_mla_model=is_mla_model, has_heads=has_heads) is expected


def test_ranks_share_replicated_pages_and_no_others() -> None:
    first, second = Ranks(tp_rank=0, tp_size=2), Ranks(tp_rank=1, tp_size=2)
    assert first.fields(is_replicated=True) == second.fields(is_replicated=True) == Ranks().fields(is_replicated=True)
    assert first.fields(is_replicated=False) != second.fields(is_replicated=False)
    assert Ranks(pp_rank=1, pp_size=2).fields(is_replicated=True) != Ranks().fields(is_replicated=True)
