"""Names: what differs in bytes differs in name."""

from __future__ import annotations

from descriptors.prefix_keys import model_of
from nixl_client.connectors.vllm_tier.rules.naming import TierSpace, group_of, object_name

FIELDS: dict[str, object] = {"identity": "a", "dtype": "bf16", "groups": [[16, ["l0", "l1"]]], "ranks": [1, 1]}
KEY = bytes(range(32)) + (3).to_bytes(4, "big")


def test_names_have_the_model_the_namespace_the_group_and_vllms_hash() -> None:
    space = TierSpace("Llama 3/8B", FIELDS)
    name = object_name(space.prefix, KEY)
    assert name == f"vllm/Llama-3-8B/{space.digest}/3/{bytes(range(32)).hex()}"
    assert (model_of(name), group_of(KEY)) == ("Llama-3-8B", 3)
    assert space.about.startswith(space.prefix)


def test_every_field_is_in_the_namespace_and_nothing_else() -> None:
    first = TierSpace("a", FIELDS).digest
    assert TierSpace("b", dict(reversed(FIELDS.items()))).digest == first
    changed = [{**FIELDS, name: "other"} for name in FIELDS] + [{**FIELDS, "epoch": "2"}]
    assert len({first, *(TierSpace("a", each).digest for each in changed)}) == 2 + len(FIELDS)


def test_a_space_that_is_renewed_shares_nothing_with_what_it_was() -> None:
    space = TierSpace("a", FIELDS)
    assert len({space.prefix, space.renewed("x").prefix, space.renewed("y").prefix}) == 3
    assert space.renewed("x").renewed("y") == space.renewed("y")
