"""The connector under vLLM's own Scheduler, with no model: which tokens the engine takes as computed, what is loaded,
looked up and written. A scenario runs in the engines' environment and answers with what happened.

Prefixes are of 8 chunks of 32 tokens, which are also blocks; prompts go on for 3 tokens.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.environment import engine_python, engine_variables
from tests.engines.messages import Json
from tests.support.tree import repository

pytestmark = pytest.mark.timeout(300)
PREFIX_TOKENS = 256
PROMPT_TOKENS = 259
WHOLE = [0, 8]


class Player:
    """The process in which scenarios are played."""

    def __init__(self, folder: Path) -> None:
        self._log_file = folder / "log"
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [str(engine_python()), "-m", "tests.engines.scheduling_child", str(folder / "model")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=repository(),
                env=engine_variables(),
            )

    def play(self, scenario: str, **arguments: Json) -> Any:
        """What happened; the process ends itself when a scenario hangs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"scenario": scenario, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._log_file.read_text(errors="replace")[-6000:]}
        assert "error" not in answer, answer["error"]
        return answer["facts"]

    def close(self) -> None:
        """End."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    """vLLM's scheduler, imported."""
    player = Player(tmp_path_factory.mktemp("scheduling"))
    try:
        yield player
    finally:
        player.close()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ending", ["aborted during the step", "aborted after the step"])
def test_blocks_that_were_not_loaded_are_not_given_to_a_later_request(player: Player, policy: str, ending: str) -> None:
    """vLLM names blocks when it gives them out. Where their request is gone before they are computed again, the name
    would stay.
    """
    facts = player.play("lost_load", policy=policy, ending=ending)
    assert (facts["loads"], facts["next"]) == ([WHOLE], {"B": 0})


def test_blocks_that_were_not_loaded_are_not_given_to_the_request_again_after_a_preemption(player: Player) -> None:
    """It would resume with what it never had."""
    assert player.play("lost_load", policy="recompute", ending="preempted")["next"] == {"A": 0}


def test_a_request_whose_load_fails_under_policy_fail_leaves_nothing(player: Player) -> None:
    """vLLM ends it and takes out the blocks it knows of."""
    facts = player.play("lost_load", policy="fail", ending="by the policy")
    assert (facts["ended"], facts["next"]) == ({"A": "error"}, {"B": 0})


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_step_made_before_the_loss_is_known_gives_out_nothing_lost(player: Player, is_aborted: bool) -> None:
    """Asynchronous scheduling with policy fail, vLLM's defaults: a request that comes in between waits, too."""
    facts = player.play("lost_load_with_a_step_ahead", is_aborted=is_aborted)
    assert (facts["ahead"], facts["next"]) == ({"A": PROMPT_TOKENS}, {"B": 0})
    assert facts["ended"] == ({} if is_aborted else {"A": "error"})


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_blocks_before_the_first_that_was_lost_stay_shared(player: Player, policy: str) -> None:
    """Three of eight were loaded well."""
    assert player.play("partly_lost_load", policy=policy) == {"B": 3 * 32}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_request_that_needs_what_another_loads_waits_for_a_step_and_is_given_it(
    player: Player, policy: str, is_aborted: bool
) -> None:
    """The blocks are there even where the request that loaded them is gone, and the wait has an end."""
    facts = player.play("sharer", policy=policy, is_lost=False, is_aborted=is_aborted)
    assert (facts["first"], facts["next"]["B"]) == ({"A": 0}, PREFIX_TOKENS)
    assert facts["loads"] == [WHOLE]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_request_that_needs_what_another_failed_to_load_computes_it_itself(
    player: Player, policy: str, is_aborted: bool
) -> None:
    """vLLM would let the second take them as computed, and leave it to the first to compute them; under policy fail
    both would fail.
    """
    facts = player.play("sharer", policy=policy, is_lost=True, is_aborted=is_aborted)
    assert (facts["first"], facts["ended"]) == ({"A": 0}, {} if is_aborted or policy == "recompute" else {"A": "error"})
    is_again = policy == "recompute" and not is_aborted
    assert facts["next"] == ({"A": 0, "B": 0} if is_again else {"B": 0})


def test_a_request_is_never_ahead_of_the_one_that_computes_lost_blocks_in_pieces(player: Player) -> None:
    """The first is held to 64 tokens a step; what the second takes as computed was computed."""
    assert player.play("sharer_of_long_prefill") == [{"A": 0}, *({"A": n, "B": n} for n in (0, 64, 128, 192))]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_chunk_that_cannot_be_read_is_offered_once_and_written_again(player: Player, policy: str) -> None:
    """The store goes on counting it as stored; a policy to fail must not cost every later request."""
    first, second, third = player.play("bad_chunk", policy=policy)
    repaired = [[3, 4]]
    if policy == "fail":
        assert first == {"loads": [WHOLE], "repairs": [], "ended": "error"}
        assert second == {"loads": [[0, 3]], "repairs": repaired, "ended": "length"}
    else:
        assert first == {"loads": [WHOLE], "repairs": repaired, "ended": "length"}
        assert second == {"loads": [WHOLE], "repairs": [], "ended": "length"}
    assert third == {"loads": [WHOLE], "repairs": [], "ended": "length"}


def test_a_load_that_failed_silences_lookups(player: Player) -> None:
    """Lookups may work where the data path hangs: each load would hold the whole batch up."""
    assert player.play("failed_load", retry_s=600.0) == {"lookups": 1, "loads": [], "ran": ["A", "B"]}
    assert player.play("failed_load", retry_s=0.0) == {"lookups": 2, "loads": [WHOLE], "ran": ["A", "B"]}


def test_a_lookup_that_is_not_answered_holds_up_its_own_request_only(player: Player) -> None:
    """Two steps are made while it waits; answered, it is not asked again, and all is loaded."""
    facts = player.play("slow_lookup")
    assert facts == {"is asked": True, "meanwhile": [["B"], ["B"]], "loads": [WHOLE], "lookups": 1}


def test_a_lookup_that_is_not_answered_in_time_is_a_miss(player: Player) -> None:
    """The request runs, and the next is not looked up."""
    facts = player.play("late_lookup")
    assert facts == {"first": [], "then": {"A": 0}, "loads": [], "next": ["A", "C"], "lookups": 1}


@pytest.mark.parametrize("kind", ["KeyError", "TypeError", "ValueError", "OSError"])
def test_a_lookup_that_fails_in_any_way_is_a_miss(player: Player, kind: str) -> None:
    """Something else may listen at the endpoint; what is raised in the scheduler ends the engine."""
    facts = player.play("failing_lookup", kind=kind)
    assert facts == {"ran": ["A"], "next": ["A", "C"], "lookups": 1, "failures": 1}


def test_tokens_that_no_key_can_hold_are_computed(player: Player) -> None:
    """vLLM's front end lets negative ones through where it has no tokenizer."""
    assert player.play("unnameable_tokens") == {"ran": ["A"], "lookups": 0}


def test_what_another_connector_was_loading_for_an_aborted_request_is_not_written(player: Player) -> None:
    """vLLM counts it as computed before it has come. Its blocks are announced as changing: an earlier request's store
    may be waiting for them.
    """
    assert player.play("peer_loads_between_steps") == {
        "A": ["WAITING_FOR_REMOTE_KVS", PREFIX_TOKENS],
        "ran": ["Z"],
        "announced": [8, True],
        "stored of A": [],
    }


@pytest.mark.parametrize("is_lost", [True, False])
def test_what_another_connector_loads_is_written_once_the_engine_has_computed_on_it(
    player: Player, is_lost: bool
) -> None:
    """In the step that loads it the bytes are not there yet, and may never be."""
    before = [[PREFIX_TOKENS, []], [0, []]] if is_lost else [[PREFIX_TOKENS, []]]
    assert player.play("peer_loads_in_a_step", is_lost=is_lost)[: len(before) + 1] == [
        *before,
        [PROMPT_TOKENS, [WHOLE]],
    ]


def test_a_producer_writes_what_is_missing_and_loads_nothing(player: Player) -> None:
    """Disaggregated prefill: it computes, others load."""
    assert player.play("producer") == {"stored": {"A": [WHOLE], "B": [[4, 8]]}, "loads": []}


def test_after_a_reset_nothing_is_taken_from_before_and_nothing_is_written_under_old_keys(player: Player) -> None:
    """vLLM resets connectors after weights were changed in place. What runs has KV of both."""
    assert player.play("reset") == {
        "is reset": True,
        "same keys": 0,
        "workers told": [True, False],
        "A goes on": PROMPT_TOKENS,
        "loads": [],
        "stored": [["B", 0, 5]],
        "under old keys": 0,
    }


def test_a_tier_stores_no_chunk_past_the_bound_of_its_request(player: Player) -> None:
    """vLLM 0.32 gives it parts of blocks of states where the bound is 0."""
    assert player.play("stores_of_bounded_requests", bounds=[None, 0, 64, 95, 96]) == [
        [0, 1, 2],
        [],
        [0, 1],
        [0, 1],
        [0, 1, 2],
    ]


def test_after_a_reset_a_tier_has_nothing_and_requests_that_ran_before_store_nothing(player: Player) -> None:
    """Their KV may be of the weights before. The store is not there: what is to be stored fails."""
    are_names_new, before, after, is_skipped, is_stored = player.play("reset_of_a_tier")
    assert (are_names_new, before, after) == (True, "RETRY", "MISS")
    assert (is_skipped, is_stored) == (True, False)


@pytest.mark.parametrize(
    ("told", "is_named", "wanted"),
    [
        (None, False, ["MISS", 0]),
        (True, False, ["MISS", 0]),
        (True, True, ["RETRY", 1]),
        (False, False, ["RETRY", 1]),
    ],
)
def test_without_cards_nothing_is_cached_that_could_be_of_an_adapter(
    player: Player, told: bool | None, is_named: bool, wanted: list[str | int]
) -> None:
    """As beside vLLM's own spec, or where there is no room for a card."""
    assert player.play("uses_of_an_engine_without_cards", told=told, is_named=is_named) == wanted


def test_nothing_of_an_adapter_that_has_changed_is_stored_or_loaded(player: Player) -> None:
    assert player.play("jobs_of_an_adapter_that_changes") == [2, 2, "MISS"]


@pytest.mark.parametrize("has_image", [True, False])
def test_a_request_that_got_an_image_later_is_not_written(player: Player, has_image: bool) -> None:
    """Token ids say nothing of the image in their place."""
    stored = player.play("image_in_a_later_turn", has_image=has_image)
    assert stored == [*([] if has_image else [["A", *WHOLE]]), ["Z", 0, 1]]


@pytest.mark.parametrize("is_below_multi", [True, False])
@pytest.mark.parametrize(
    ("policy", "is_async", "pipeline_size", "is_ahead"),
    [
        ("recompute", True, 1, True),
        ("recompute", False, 2, True),
        ("recompute", False, 1, False),
        ("fail", True, 1, False),
        ("fail", False, 2, False),
    ],
)
def test_with_several_steps_under_way_what_may_be_recomputed_is_loaded_ahead(
    player: Player, policy: str, is_async: bool, pipeline_size: int, is_ahead: bool, is_below_multi: bool
) -> None:
    """vLLM takes tokens of the steps that were made on top of the failed one. Under MultiConnector its own policy
    counts.
    """
    arguments: dict[str, Json] = {"is_async": is_async, "pipeline_size": pipeline_size}
    assert player.play("started", policy=policy, is_below_multi=is_below_multi, **arguments) is is_ahead


def test_ahead_of_a_request_no_step_of_others_waits_for_its_load(player: Player) -> None:
    """Others run in the meantime; then it runs with all that was loaded."""
    facts = player.play("load_ahead")
    assert facts == {"loads": [WHOLE], "meanwhile": [["B"], ["B"]], "next": {"A": PREFIX_TOKENS}, "is again": False}


def test_ahead_of_requests_what_two_need_is_loaded_once(player: Player) -> None:
    """The second finds it in the engine's blocks, loaded or, where the load was lost, computed by the first."""
    assert player.play("sharer_ahead", is_lost=False) == {"loads": [WHOLE], "next": {"A": 256, "B": 256}}
    assert player.play("sharer_ahead", is_lost=True) == {"loads": [WHOLE], "next": {"A": 0, "B": 256}}


@pytest.mark.parametrize("first_lost", [0, 3])
def test_ahead_of_a_request_what_is_lost_is_computed_and_not_loaded_again(player: Player, first_lost: int) -> None:
    """Nothing was wrong with the store: the load was late."""
    facts = player.play("late_ahead", first_lost=first_lost)
    assert facts == {"loads": [WHOLE], "next": {"A": first_lost * 32}}


def test_a_request_that_is_aborted_while_it_is_loaded_gives_its_blocks_back_when_the_load_is_over(
    player: Player,
) -> None:
    """Until then the server may write into them."""
    assert player.play("aborted_ahead") == {"held": 8, "held after": 0}


def test_an_engine_with_the_connector_does_not_sleep(player: Player) -> None:
    """Its memory would go from under a load."""
    assert player.play("may_sleep") is False


def test_staging_that_does_not_hold_a_chunk_is_refused(player: Player) -> None:
    """Nothing would ever be loaded, and nobody told."""
    chunk_bytes = 32 * 4 * 2 * 2 * 64 * 4
    assert "staging_bytes" in player.play("with_small_staging", staging_bytes=chunk_bytes - 1)
    assert player.play("with_small_staging", staging_bytes=chunk_bytes) == [[0, 1]]


@pytest.mark.parametrize("name", ["", "llama"])
def test_keys_tell_lengths_of_a_model_with_long_rope_apart(player: Player, name: str) -> None:
    """By max_model_len it rotates keys with long or with short factors."""
    short, long, short_again = player.play("long_rope", lengths=[1024, 4096, 1024], name=name)
    assert short == short_again != long


@pytest.mark.parametrize("name", ["", "llama"])
def test_keys_tell_overridden_configurations_apart_whatever_the_weights_are_called(player: Player, name: str) -> None:
    """A name given by option must not hide hf_overrides."""
    one, other, one_again = player.play("changed_rope", thetas=[10000.0, 500000.0, 10000.0], name=name)
    assert one == one_again != other


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("non_causal", True, "attention to later tokens"),
        ("kv_quant_mode", "INT8_PER_TOKEN_HEAD", "scales of each token"),
        ("kv_quant_mode", "NVFP4", "scales of each token"),
        ("head_size_v", 32, "keys and values of different sizes"),
        ("non_causal", False, None),
        ("kv_quant_mode", "FP8_PER_TENSOR", None),
    ],
)
def test_a_cache_whose_bytes_are_not_those_of_its_prefix_is_refused(
    player: Player, name: str, value: Json, reason: str | None
) -> None:
    """They depend on later tokens, or do not hold all there is."""
    said = player.play("unsupported_spec", name=name, value=value)
    assert (said is not None and reason in said) if reason else said is None


def test_a_group_of_layers_of_two_sizes_is_seen_by_workers_and_scheduler_alike(player: Player) -> None:
    """Else one of them would load layer by layer, and the other by rows. The scheduler is shown one size only."""
    worker, scheduler = player.play("latents_with_an_indexer")
    assert worker == ["groups of layers: UniformTypeKVCacheSpecs", True]
    assert scheduler == ["layers of several sizes", True]


def test_a_model_that_pools_over_all_tokens_is_refused(player: Player) -> None:
    """Loaded tokens have no hidden states to pool; vLLM turns its own prefix cache off but goes on asking."""
    said, has_part = player.play("unsupported_model", pooling="MEAN")
    assert (said is not None, has_part) == (True, False)


@pytest.mark.parametrize(
    ("policy", "is_async"), [("recompute", False), ("recompute", True), ("fail", False), ("fail", True)]
)
@pytest.mark.parametrize("chunk_tokens", [16, 32, 64])
def test_whatever_fails_no_token_and_no_chunk_comes_of_wrong_blocks(
    player: Player, policy: str, is_async: bool, chunk_tokens: int
) -> None:
    """Requests come, are aborted and preempted, loads fail, stores are read late, at random."""
    counts = player.play(
        "simulation", seed=chunk_tokens, policy=policy, is_async=is_async, chunk_tokens=chunk_tokens, step_count=200
    )
    assert min(counts[name] for name in ("tokens", "aborted", "loads", "lost", "stores", "repairs")) > 0
