"""The vLLM connector's side in the scheduler, without vLLM: options, names, plans, books, lookups."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from descriptors.descriptor import LAYER_COMPUTE_US_MAX, Accept
from descriptors.errors import ErrorCode, ServerError
from descriptors.layout import ChunkLayout
from descriptors.prefix_keys import chunk_keys
from descriptors.recompute import DeliveryCosts, PrefillCosts
from nixl_client.connectors.compute_fit import Work
from nixl_client.connectors.counters import Counters
from nixl_client.connectors.vllm.grid import ChunkRange, Grid
from nixl_client.connectors.vllm.ledger import SchedulerLedger
from nixl_client.connectors.vllm.naming import Deployment, Feature, KeyChain, Prefix
from nixl_client.connectors.vllm.options import PROMISED, LoadPolicy, VllmOptions
from nixl_client.connectors.vllm.published import told_chunks
from nixl_client.connectors.vllm.scheduling import SchedulerSide
from nixl_client.connectors.vllm.steps import Grown, LoadJob, Report, Step, StoreJob
from nixl_client.connectors.vllm.weights import Adapters, fingerprint
from nixl_client.lossy import Lossy, accept_of
from nixl_client.transports.transport import Transport
from tests.support.vllm_played import ONE_RANK, OPTIONS, PlayedStore


class TestOptions:
    def test_types_and_unknown_names_are_refused(self) -> None:
        """A misspelt option must not be silently without effect."""
        for extra in ({"bucket": "b"}, {"bucket": "b", "endpoint": "e", "chunktokens": 1}):
            with pytest.raises(ValueError, match=r"endpoint|chunktokens"):
                VllmOptions.of(extra)
        for name, value in {"chunk_tokens": "32", "store": 1, "load_timeout_s": 0.0, "internals": 5}.items():
            with pytest.raises(ValueError, match=name):
                VllmOptions.of({"endpoint": "e", "bucket": "b", name: value})
        for name, value in {"lease_s": "1", "leases": 1, "endpoint": "e"}.items():
            with pytest.raises(ValueError, match=name):
                VllmOptions.of({"endpoint": "e", "internals": {name: value}})

    def test_values_are_taken(self) -> None:
        internals = {"lease_s": 5}
        options = VllmOptions.of({"endpoint": "e", "transport": "shm", "internals": internals, "chunk_tokens": 64})
        assert (options.transport, options.lease_s, options.chunk_tokens) == (Transport.SHM, 5, 64)

    def test_the_error_that_is_accepted_may_stand_for_the_loss(self) -> None:
        options = VllmOptions.of({"endpoint": "e", "lossy": 0.05})
        assert (options.lossy, options.max_error) == (Lossy.BOUNDED, 0.05)
        for wrong in (-0.1, 11, True):
            with pytest.raises(ValueError, match=r"max_error|lossy"):
                VllmOptions.of({"endpoint": "e", "lossy": wrong})

    def test_the_loss_is_bounded_with_or_without_the_error(self) -> None:
        options = VllmOptions.of({"endpoint": "e", "lossy": {"max_loss": 0.006}})
        accept = accept_of(options.lossy, "bfloat16", options.max_error, options.loss_bound)
        assert accept is not None
        assert (accept.max_error, accept.max_loss) == (None, 0.006)
        both = VllmOptions.of({"endpoint": "e", "lossy": {"max_loss": 1, "max_error": 0.05}})
        assert (both.lossy, both.loss_bound, both.max_error) == (Lossy.BOUNDED, 1, 0.05)
        assert VllmOptions.of({"endpoint": "e", "lossy": "adaptive"}).loss_bound is None
        for wrong in ({}, {"most": 1}, {"max_loss": -1}, {"max_loss": math.nan}, {"max_loss": "1"}):
            with pytest.raises(ValueError, match=r"max_loss must|max_loss, not of"):
                VllmOptions.of({"endpoint": "e", "lossy": wrong})
        with pytest.raises(ValueError, match="max_loss stands in lossy"):
            VllmOptions.of({"endpoint": "e", "lossy": 0.1, "max_loss": 0.006})

    def test_former_places_hold_and_are_told(self, caplog: pytest.LogCaptureFixture) -> None:
        assert VllmOptions.of({"endpoint": "e", "lease_s": 5.0}).lease_s == 5.0
        assert "the option lease_s is internals.lease_s now" in caplog.text

    @pytest.mark.parametrize("other", [{"chunk_tokens": 64}, {"lossy": "adaptive"}, {"lossy": 0.1}])
    def test_objects_of_the_tier_are_of_one_block_and_exact(self, other: dict[str, object]) -> None:
        assert VllmOptions.of({"endpoint": "e", "native": True}).native
        with pytest.raises(ValueError, match="native: objects of the tier"):
            VllmOptions.of({"endpoint": "e", "native": True, **other})

    def test_there_are_few_options(self) -> None:
        assert len(PROMISED) <= 13
        assert {field.name for field in fields(VllmOptions)} >= PROMISED


class TestNaming:
    def test_chain_gives_the_protocols_keys_whatever_the_steps(self) -> None:
        tokens = list(range(100))
        wanted = chunk_keys(ONE_RANK.namespace(0, "", ""), tokens, 16)
        chain = KeyChain(ONE_RANK.namespace(0, "", ""), 16)
        assert [chain.keys(tokens, count) for count in (0, 1, 4, 2, 6)] == [
            tuple(wanted[:count]) for count in (0, 1, 4, 2, 6)
        ]
        with pytest.raises(ValueError, match="chunks"):
            chain.keys(tokens, 7)

    def test_everything_that_decides_bytes_is_in_the_namespace(self) -> None:
        texts = {
            ONE_RANK.namespace(0, "", ""),
            ONE_RANK.namespace(0, "adapter", ""),
            ONE_RANK.namespace(0, "", "tenant"),
            Deployment("m2", "bf16", 32).namespace(0, "", ""),
            Deployment("m", "fp16", 32).namespace(0, "", ""),
            Deployment("m", "bf16", 64).namespace(0, "", ""),
            *(Deployment("m", "bf16", 32, 2, 3).namespace(rank, "", "") for rank in range(6)),
        }
        assert len(texts) == 12


class TestPlan:
    def test_sizes_must_divide(self) -> None:
        with pytest.raises(ValueError, match="multiple"):
            Grid(48, 32)

    @pytest.mark.parametrize(
        ("grid", "prompt", "computed", "matched", "room", "wanted"),
        [
            (Grid(32, 32), 64, 0, 2, 9, 32),  # one token is left to compute
            (Grid(32, 32), 65, 0, 2, 9, 64),
            (Grid(32, 32), 100, 64, 3, 9, 32),
            (Grid(32, 32), 100, 96, 3, 9, 0),
            (Grid(128, 32), 300, 64, 2, 9, 192),
            (Grid(128, 32), 200, 0, 1, 9, 128),
            (Grid(128, 32), 128, 0, 1, 9, 96),  # a part of a chunk, in whole blocks
            (Grid(16, 32), 100, 0, 5, 9, 64),  # five half blocks fill two blocks
            (Grid(32, 32), 1000, 0, 30, 4, 128),  # what fits the staging buffer
            (Grid(32, 32), 100, 7, 3, 9, 0),
        ],
    )
    def test_loadable_tokens(
        self, grid: Grid, prompt: int, computed: int, matched: int, room: int, wanted: int
    ) -> None:
        assert grid.loadable_tokens(prompt, computed, matched, room) == wanted

    def test_load_that_starts_within_a_chunk(self) -> None:
        """Blocks that HBM holds are not written again, though their chunk is fetched."""
        span = Grid(128, 32).load_range(64, 128, [10, 11, 12, 13, 14, 15, 16])
        assert (span.first_chunk, span.end_chunk, span.chunk_skip, span.blocks) == (0, 2, 64, (12, 13, 14, 15))
        lost = [Grid(128, 32).first_lost_block(span, count) for count in (0, 1, 2)]
        assert lost == [0, 2, 4]

    def test_store_that_starts_within_a_block(self) -> None:
        span = Grid(16, 32).store_range(3, 6, [10, 11, 12, 13])
        assert (span.block_skip, span.token_count, span.blocks) == (16, 48, (11, 12))

    def test_tokens_outside_the_blocks_are_refused(self) -> None:
        with pytest.raises(ValueError, match="blocks"):
            Grid(32, 32).load_range(0, 96, [1, 2])


class TestLedger:
    def ledger(self, deployment: Deployment = ONE_RANK, room: int = 100) -> SchedulerLedger:
        return SchedulerLedger(deployment, Grid(32, 32), room, is_storing=True)

    def test_a_load_takes_room_from_the_step_and_the_next_step_has_it_again(self) -> None:
        ledger = self.ledger(room=3)
        tokens = list(range(129))
        for request_id, wanted in (("a", 96), ("b", 0)):
            tracked = ledger.track(request_id, Prefix())
            ledger.matched(tracked, 4, 0.0)
            assert ledger.loadable(tracked, len(tokens), 0) == wanted
            if wanted:
                ledger.load(request_id, tokens, wanted, [1, 2, 3, 4, 5])
        step = ledger.take_step()
        assert [job.request_id for job in step.loads] == ["a"]
        assert step.loads[0].keys[0] == tuple(chunk_keys(ONE_RANK.namespace(0, "", ""), tokens, 32)[:3])
        assert ledger.loadable(ledger.track("b", Prefix()), len(tokens), 0) == 96

    def test_a_step_says_which_requests_have_new_blocks_if_it_is_asked_to(self) -> None:
        for tells in (True, False):
            ledger = SchedulerLedger(ONE_RANK, Grid(32, 32), 100, is_storing=True, tells_growth=tells)
            ledger.given_out((3, 4, 7, 9))
            for table in ((1, 2, 3, 4), (7,), (5, 6), (8, 9)):
                ledger.scheduled(table)
            grown = (Grown(2, (3, 4)), Grown(None, (7,)), Grown(8, (9,)))
            assert ledger.take_step().grown == (grown if tells else ())
            assert ledger.take_step().grown == ()

    def test_a_step_is_all_that_workers_have_to_do(self) -> None:
        """A load for one request, a store for another, whose end the engine waits for."""
        ledger = self.ledger()
        tokens = list(range(96))
        keys = tuple(chunk_keys(ONE_RANK.namespace(0, "", ""), tokens, 32))
        ledger.matched(ledger.track("a", Prefix()), 2, 0.0)
        assert ledger.loadable(ledger.track("a", Prefix()), 96, 0) == 64
        ledger.allocated("a", [1, 2, 3])
        ledger.load("a", tokens, 64, [1, 2, 3])
        ledger.matched(ledger.track("b", Prefix()), 2, 0.0)
        assert ledger.admit("b", 0)
        ledger.computed("b", tokens, 96, [4, 5, 6])
        assert ledger.finish("b")
        assert ledger.take_step(Work(33, 1.0), 250) == Step(
            loads=(LoadJob(1, "a", ChunkRange(0, 2, 0, 0, 64, (1, 2)), (keys[:2],)),),
            stores=(StoreJob(2, "b", ChunkRange(2, 3, 0, 0, 32, (6,)), (keys[2:],)),),
            rewritten=frozenset({1, 2, 3}),
            awaited=frozenset({"b"}),
            work=Work(33, 1.0),
            layer_compute_us=250,
        )
        assert ledger.take_step() == Step()

    def test_each_missing_chunk_is_given_to_be_written_once(self) -> None:
        ledger = self.ledger()
        tokens = list(range(200))
        ledger.matched(ledger.track("a", Prefix()), 2, 0.0)
        ledger.admit("a", 0)
        for count in (64, 100, 100, 170, 200):
            ledger.computed("a", tokens, count, list(range(7)))
        spans = [(job.chunk_range.first_chunk, job.chunk_range.end_chunk) for job in ledger.take_step().stores]
        assert spans == [(2, 3), (3, 5), (5, 6)]

    def test_a_chunk_that_could_not_be_read_is_written_again(self) -> None:
        """Or every later request would lose time on it."""
        ledger = self.ledger()
        tokens = list(range(200))
        ledger.matched(ledger.track("a", Prefix()), 5, 0.0)
        ledger.load("a", tokens, 160, list(range(7)))
        (job,) = ledger.take_step().loads
        ledger.report(Report(bad_chunks={job.job_id: 2}), 0.0)
        ledger.admit("a", 0)
        ledger.computed("a", tokens, 64, list(range(7)))
        assert not ledger.take_step().stores
        ledger.computed("a", tokens, 200, list(range(7)))
        spans = [
            (job.chunk_range.first_chunk, job.chunk_range.end_chunk, job.is_repair) for job in ledger.take_step().stores
        ]
        assert spans == [(2, 3, True), (3, 6, False)]

    def test_what_a_request_was_let_in_with_is_not_written_before_its_first_step_is_over(self) -> None:
        """Blocks found in HBM may be those another request is loading in this very step, in vain."""
        ledger = self.ledger()
        tokens = list(range(200))
        tracked = ledger.track("a", Prefix())
        ledger.matched(tracked, 0, 0.0)
        ledger.loadable(tracked, 200, 128)
        ledger.load("a", tokens, 0, list(range(7)))
        assert ledger.admit("a", 128)
        ledger.computed("a", tokens, 128, list(range(7)))
        assert not ledger.take_step().stores
        ledger.computed("a", tokens, 192, list(range(7)))
        (job,) = ledger.take_step().stores
        assert (job.chunk_range.first_chunk, job.chunk_range.end_chunk) == (0, 6)

    def test_blocks_are_loading_until_every_rank_has_said_that_they_are_not(self) -> None:
        ledger = self.ledger(Deployment("m", "bf16", 32, tp_size=2))
        tokens = list(range(129))
        ledger.matched(ledger.track("a", Prefix()), 4, 0.0)
        ledger.load("a", tokens, 64, [1, 2, 3, 4, 5], [b"x", b"y"])
        (job,) = ledger.take_step().loads
        for _ in range(2):
            assert ledger.is_loading([b"q", b"y"])
            assert not ledger.is_loading([b"q"])
            ledger.report(Report(ended_loads={job.job_id: 1}), 0.0)
        assert not ledger.is_loading([b"x"])

    def test_a_report_that_never_comes_is_not_waited_for_for_ever(self) -> None:
        ledger = self.ledger()
        ledger.matched(ledger.track("a", Prefix()), 4, 0.0)
        ledger.load("a", list(range(129)), 64, [1, 2, 3, 4, 5], [b"x", b"y"])
        steps = 0
        while ledger.is_loading([b"x"]):
            ledger.take_step()
            steps += 1
        assert steps > 64

    def test_after_a_reset_nothing_is_known_and_names_are_new(self) -> None:
        """The weights may have been replaced: what is stored belongs to the old ones."""
        ledger = self.ledger()
        tokens = list(range(64))
        before = ledger.lookup_keys(ledger.track("a", Prefix()), tokens)
        ledger.matched(ledger.track("a", Prefix()), 0, 0.0)
        ledger.admit("a", 0)
        ledger.reset("epoch")
        ledger.computed("a", tokens, 64, [1, 2])
        assert not ledger.take_step().stores
        after = ledger.lookup_keys(ledger.track("a", Prefix()), tokens)
        ledger.reset("another")
        assert len({before, after, ledger.lookup_keys(ledger.track("a", Prefix()), tokens)}) == 3

    def test_a_step_names_the_blocks_that_get_other_bytes_and_only_those(self) -> None:
        """What was found in the engine's own blocks stays as it is."""
        ledger = self.ledger()
        ledger.loadable(ledger.track("a", Prefix()), 200, 64)
        ledger.allocated("a", [1, 2, 3, 4])
        ledger.allocated("another connector's", [7, 8])
        ledger.given_out([4, 5])
        assert ledger.take_step().rewritten == frozenset({3, 4, 5, 7, 8})
        assert ledger.take_step().rewritten == frozenset()

    def test_blocks_computed_on_top_of_lost_ones_are_stale_while_their_steps_are_under_way(self) -> None:
        ledger = SchedulerLedger(ONE_RANK, Grid(32, 32), 100, is_storing=True, steps_max=1)
        ledger.scheduled([1, 2, 3])
        ledger.scheduled([1, 4])
        ledger.take_step()
        ledger.scheduled([5, 2, 6])
        assert ledger.stale_blocks({2}) == {2, 3}
        ledger.take_step()
        assert ledger.stale_blocks({2}) == {2, 3, 6}
        ledger.take_step()
        assert ledger.stale_blocks({2}) == {2, 6}
        assert ledger.stale_blocks({9}) == set()

    def test_no_lookup_no_store(self) -> None:
        """Without an answer it is not known what is missing; a store that is down must not be written to."""
        ledger = self.ledger()
        ledger.track("a", Prefix())
        ledger.computed("a", list(range(64)), 64, [1, 2])
        assert not ledger.take_step().stores
        assert not ledger.finish("a")

    def test_blocks_are_kept_until_every_rank_has_read_them(self) -> None:
        ledger = self.ledger(Deployment("m", "bf16", 32, tp_size=2))
        for request_id, reports, is_kept in (("a", 1, True), ("b", 2, False)):
            ledger.matched(ledger.track(request_id, Prefix()), 0, 0.0)
            ledger.admit(request_id, 0)
            ledger.computed(request_id, list(range(64)), 64, [1, 2])
            (job,) = ledger.take_step().stores
            ledger.report(Report({job.job_id: 1}).add(Report({job.job_id: reports - 1})), 0.0)
            assert ledger.finish(request_id) is is_kept
            assert ledger.take_step().awaited == ({request_id} if is_kept else set())


class Request:
    """A request as vLLM shows it."""

    def __init__(self, tokens: list[int], **changes: Any) -> None:
        self.request_id = "r"
        self.all_token_ids = tokens
        self.prompt_token_ids = tokens
        self.num_tokens = len(tokens)
        self.block_hashes = [bytes([index]) for index in range(len(tokens) // 32)]
        self.kv_transfer_params: dict[str, object] | None = None
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.lora_request = None
        self.cache_salt: str | None = None
        self.mm_features: list[object] = []
        self.prompt_embeds = None
        self.__dict__.update(changes)


def image(identifier: str, offset: int, length: int) -> SimpleNamespace:
    """As vLLM's MultiModalFeatureSpec has it."""
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


class TestKeyChain:
    NAMESPACE = ONE_RANK.namespace(0, "", "")
    TOKENS = tuple(range(160))

    def keys(self, *features: Feature) -> tuple[str, ...]:
        return KeyChain(self.NAMESPACE, 32, features).keys(self.TOKENS, 5)

    def test_without_images_keys_are_those_of_the_tokens(self) -> None:
        assert list(self.keys()) == chunk_keys(self.NAMESPACE, self.TOKENS, 32)

    def test_an_image_changes_the_keys_from_its_first_chunk_on(self) -> None:
        plain, first, other = self.keys(), self.keys(Feature("a", 40, 60)), self.keys(Feature("b", 40, 60))
        assert plain[:1] == first[:1] == other[:1]
        assert not set(plain[1:]) & set(first[1:])
        assert not set(first[1:]) & set(other[1:])

    @pytest.mark.parametrize(
        "other",
        [
            (Feature("a", 41, 60),),
            (Feature("a", 40, 30),),
            (Feature("a", 40, 60), Feature("a", 110, 5)),
            (Feature("aa", 40, 60),),
        ],
    )
    def test_place_size_and_number_of_images_are_in_the_keys(self, other: tuple[Feature, ...]) -> None:
        assert self.keys(Feature("a", 40, 60))[-1] != self.keys(*other)[-1]

    def test_keys_do_not_hang_on_how_far_the_engine_has_come(self) -> None:
        chain = KeyChain(self.NAMESPACE, 32, [Feature("b", 100, 40), Feature("a", 5, 70)])
        for count in range(1, 6):
            chain.keys(self.TOKENS, count)
        assert chain.keys(self.TOKENS, 5) == self.keys(Feature("a", 5, 70), Feature("b", 100, 40))


class TestWeights:
    def weights(self, path: Path, fill: int, names: Sequence[str] = ("a", "b")) -> Path:
        path.mkdir(exist_ok=True)
        starts = [index * 8192 for index in range(len(names))]
        entries = {name: {"data_offsets": [start, start + 8192]} for name, start in zip(names, starts, strict=True)}
        header = json.dumps(entries).encode()
        body = bytes(8192 * (len(names) - 1)) + bytes([fill]) * 8192
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
        return path

    def test_the_same_weights_are_the_same_wherever_they_are(self, tmp_path: Path) -> None:
        assert fingerprint(self.weights(tmp_path / "x", 1)) == fingerprint(self.weights(tmp_path / "y", 1))

    def test_other_weights_are_others(self, tmp_path: Path) -> None:
        """Their file has the same size, the same header and the same path."""
        first = fingerprint(self.weights(tmp_path / "x", 1))
        assert fingerprint(self.weights(tmp_path / "x", 2)) != first
        assert fingerprint(self.weights(tmp_path / "y", 1, ("a", "c"))) != first

    @pytest.mark.parametrize("at", [0.0, 0.02, 0.5, 0.9, 1.0])
    def test_an_edit_of_a_fifteenth_of_a_tensor_is_found_wherever_it_is(self, at: float, tmp_path: Path) -> None:
        """Such as one layer of many in a stacked tensor: its beginning alone would be the same."""
        header = json.dumps({"stacked": {"data_offsets": [0, 1_000_000]}}).encode()
        content = bytearray(len(header).to_bytes(8, "little") + header + bytes(1_000_000))
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        before = fingerprint(path)
        start = len(content) - 1_000_000 + int(at * 930_000)
        content[start : start + 70_000] = b"\1" * 70_000
        path.write_bytes(content)
        assert fingerprint(path) != before

    def test_an_adapter_that_was_replaced_is_not_cached(self, tmp_path: Path) -> None:
        """Under its number the engine may still hold the old one, and under its name and path it has blocks of both."""
        adapters = Adapters()
        path = self.weights(tmp_path / "x", 1)
        (path / "adapter_config.json").write_text('{"lora_alpha": 8}')
        first = adapters.contents(1, "x", str(path))
        assert first is not None
        assert adapters.contents(1, "x", str(path)) == first
        (path / "adapter_config.json").write_text('{"lora_alpha": 16}')
        for number, name in ((1, "x"), (1, "other"), (2, "x")):
            assert adapters.contents(number, name, str(path)) is None
        assert adapters.contents(3, "new", str(path)) not in (None, first)
        (path / "adapter_config.json").write_text('{"lora_alpha": 8}')
        assert adapters.contents(1, "x", str(path)) is None

    def test_whatever_shared_a_number_with_another_adapter_is_not_cached(self, tmp_path: Path) -> None:
        """The engine may have computed blocks of either name with the other's weights."""
        adapters = Adapters()
        one, two = (str(self.weights(tmp_path / name, seed)) for name, seed in (("a", 1), ("b", 2)))
        assert adapters.contents(1, "one", one) is not None
        assert adapters.contents(1, "two", two) is None
        assert adapters.contents(1, "one", one) is None
        assert [adapters.contents(number, name, path) for number, name, path in ((2, "two", two), (3, "one", one))] == [
            None,
            None,
        ]

    def test_an_adapter_is_its_contents_and_how_the_engine_applies_it(self, tmp_path: Path) -> None:
        one, same, other = (str(self.weights(tmp_path / name, seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
        adapters, otherwise = Adapters(), Adapters("target_modules=['q_proj']")
        found = [adapters.contents(number, f"n{number}", path) for number, path in enumerate((one, same, other), 1)]
        assert (found[0] == found[1], found[0] == found[2]) == (True, False)
        assert otherwise.contents(1, "n1", one) not in (None, found[0])

    def test_an_adapter_that_cannot_be_read_is_not_cached(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nor once it can be: the engine has loaded it before, and what that was is not known."""
        adapters, path = Adapters(), tmp_path / "hub"
        assert [adapters.contents(1, "x", str(path)) for _ in range(3)] == [None] * 3
        assert sum("no files of this host" in record.message for record in caplog.records) == 2
        self.weights(path, 1)
        assert adapters.contents(1, "x", str(path)) is None

    def test_adapters_without_end_are_not_remembered(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor is one forgotten, which could then come back replaced."""
        monkeypatch.setattr("nixl_client.connectors.vllm.weights.ADAPTERS_MAX", 4)
        adapters, path = Adapters(), str(self.weights(tmp_path / "x", 1))
        found = [adapters.contents(number, f"n{number}", path) for number in (1, 2, 3, 1)]
        assert (found[0] == found[1] == found[3], found[2]) == (True, None)

    @pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 64, (20).to_bytes(8, "little") + b"[1]" + bytes(40)])
    def test_files_that_are_no_safetensors_are_taken_as_bytes(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        before = fingerprint(path)
        path.write_bytes(content + b"x")
        assert fingerprint(path) != before

    def test_a_folder_without_weights_has_none(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no weights"):
            fingerprint(tmp_path)


class TestSchedulerSide:
    def side(self, options: VllmOptions = OPTIONS) -> tuple[SchedulerSide, PlayedStore, SchedulerLedger]:
        store = PlayedStore(ChunkLayout(1, 32, 64))
        ledger = SchedulerLedger(ONE_RANK, Grid(32, 32), 100, is_storing=True)
        client: Any = store
        side = SchedulerSide(client, options, Grid(32, 32), ledger, Counters(), ChunkLayout(1, 32, 65_536))
        return side, store, ledger

    def fill(self, store: PlayedStore, tokens: list[int], salt: str = "") -> None:
        store.chunks.update((key, b"") for key in chunk_keys(ONE_RANK.namespace(0, "", salt), tokens, 32))

    def test_offers_what_is_stored_beyond_what_the_engine_has(self) -> None:
        side, store, _ = self.side()
        tokens = list(range(200))
        self.fill(store, tokens[:128])
        assert side.match(Request(tokens), 0) == 128
        assert side.match(Request(tokens), 96) == 32
        assert side.match(Request(tokens), 128) == 0

    def known(self, side: SchedulerSide, token_us: float = 100.0, load_costs: DeliveryCosts | None = None) -> None:
        """A worker has said what steps cost."""
        side.report(Report(costs=PrefillCosts(token_us), load_costs=load_costs))

    def test_without_costs_everything_is_offered_and_nothing_is_stated(self) -> None:
        side, store, _ = self.side()
        store.rate_bytes_per_s = 1.0
        tokens = list(range(200))
        self.fill(store, tokens[:128])
        assert side.match(Request(tokens), 0) == 128
        assert store.asked_with == []
        assert side.take_step(Work.of([(200, 0)])).layer_compute_us == 0

    @pytest.mark.parametrize(("is_ahead", "offered", "layers"), [(False, 96, 4), (True, 0, 1)])
    def test_ahead_of_a_request_nothing_hides_the_load(self, is_ahead: bool, offered: int, layers: int) -> None:
        """A chunk of 3.2 ms of computing takes 3.3 ms to load, of which computing the rest may hide the most. Routers
        are told so, too.
        """
        store, tokens = PlayedStore(ChunkLayout(1, 32, 64)), list(range(200))
        ledger = SchedulerLedger(ONE_RANK, Grid(32, 32), 100, is_storing=True, is_ahead=is_ahead)
        client: Any = store
        layout = ChunkLayout(4, 32, 16_384)
        side = SchedulerSide(client, OPTIONS, Grid(32, 32), ledger, Counters(), layout, is_ahead=is_ahead)
        store.rate_bytes_per_s = 20e6
        self.known(side)
        self.fill(store, tokens)
        assert side.match(Request(tokens), 0) == offered
        told = side.published()["deployment"]
        assert (told["num_layers"], told["layer_chunk_bytes"]) == (layers, 65_536 // layers)

    def test_what_is_sooner_computed_is_not_loaded(self) -> None:
        """100 us a token and 64 KiB a chunk of 32 tokens: break-even at 20.5 MB/s."""
        tokens = list(range(200))
        for rate, offered in ((1e9, 192), (1e6, 0)):
            side, store, _ = self.side()
            store.rate_bytes_per_s = rate
            self.known(side)
            self.fill(store, tokens)
            assert side.match(Request(tokens), 0) == offered, rate
            (compute,) = store.asked_with
            assert (compute.context_tokens, compute.prefill) == (200, PrefillCosts(100.0))

    def test_of_what_the_engine_has_in_part_only_the_rest_is_weighed(self) -> None:
        side, store, _ = self.side()
        store.rate_bytes_per_s = 1e6
        self.known(side)
        tokens = list(range(200))
        self.fill(store, tokens)
        assert side.match(Request(tokens), 96) == 0
        assert side._counters.totals["advised_against_tokens"] == 96

    def test_all_is_loaded_where_nobody_asks_for_advice(self) -> None:
        side, store, _ = self.side(replace(OPTIONS, load=LoadPolicy.ALL))
        store.rate_bytes_per_s = 1.0
        self.known(side)
        tokens = list(range(200))
        self.fill(store, tokens)
        assert side.match(Request(tokens), 0) == 192
        assert store.asked_with == []

    def test_where_the_server_paces_nothing_what_loads_have_moved_counts(self) -> None:
        tokens = list(range(200))
        ways = (DeliveryCosts(bytes_per_s=1e9), DeliveryCosts(bytes_per_s=1e6), DeliveryCosts(request_s=1.0))
        for load_costs, offered in zip(ways, (192, 0, 0), strict=True):
            side, store, _ = self.side()
            self.known(side, load_costs=load_costs)
            self.fill(store, tokens)
            assert side.match(Request(tokens), 0) == offered

    def test_what_is_not_loaded_though_stored_is_not_written_again(self) -> None:
        side, store, ledger = self.side()
        store.rate_bytes_per_s = 1e6
        self.known(side)
        request = Request(list(range(200)))
        self.fill(store, list(range(192)))
        assert side.match(request, 0) == 0
        side.allocated(request, list(range(7)), 0)
        side.scheduled("r", list(range(7)))
        request.num_computed_tokens = 200
        side.scheduled("r", list(range(7)))
        assert ledger.take_step().stores == ()

    @pytest.mark.parametrize(
        ("params", "computed", "offered"),
        [
            ({"max_load_tokens": 0}, 0, 0),
            ({"max_load_tokens": 100}, 0, 96),
            ({"max_load_tokens": 64}, 96, 64),
            ({"max_load_tokens": 1000}, 0, 192),
            ({"kv_load_tiers": []}, 0, 0),
        ],
    )
    def test_a_request_may_bound_what_it_loads(self, params: object, computed: int, offered: int) -> None:
        side, store, _ = self.side()
        tokens = list(range(200))
        self.fill(store, tokens)
        assert side.match(Request(tokens, kv_transfer_params=params), computed) == offered

    @pytest.mark.parametrize("change", ["none", "files", "number"])
    def test_kv_is_not_written_for_an_adapter_that_changes_while_its_request_runs(
        self, tmp_path: Path, change: str
    ) -> None:
        """Its files are others, or another request comes with other weights under its number."""
        side, _, ledger = self.side()

        def lora(name: str, content: bytes) -> SimpleNamespace:
            path = tmp_path / name
            path.mkdir(exist_ok=True)
            (path / "adapter_model.bin").write_bytes(content)
            return SimpleNamespace(lora_int_id=1, lora_name=name, lora_path=str(path))

        request = Request(list(range(200)), lora_request=lora("one", b"1"))
        assert side.match(request, 0) == 0
        side.allocated(request, list(range(7)), 0)
        side.scheduled("r", list(range(7)))
        if change == "files":
            lora("one", b"other")
        elif change == "number":
            side.match(Request([7] * 200, request_id="s", lora_request=lora("two", b"2")), 0)
        request.num_computed_tokens = 200
        side.scheduled("r", list(range(7)))
        assert len(ledger.take_step().stores) == (change == "none")

    @pytest.mark.parametrize(("store_tokens", "chunks"), [(0, 0), (70, 2), (1000, 6)])
    def test_a_request_may_bound_what_it_stores(self, store_tokens: int, chunks: int) -> None:
        side, _, ledger = self.side()
        request = Request(list(range(200)), kv_transfer_params={"max_offload_tokens": store_tokens})
        assert side.match(request, 0) == 0
        side.allocated(request, list(range(7)), 0)
        side.scheduled("r", list(range(7)))
        request.num_computed_tokens = 200
        side.scheduled("r", list(range(7)))
        assert sum(len(job.keys[0]) for job in ledger.take_step().stores) == chunks

    def test_a_step_states_what_its_layers_take(self) -> None:
        """All of its requests together: the engine computes them in one pass."""
        side, _, _ = self.side()
        self.known(side, token_us=50.0)
        assert side.take_step(Work.of([(100, 0), (20, 500)])).layer_compute_us == 6_000
        assert side.take_step(Work.of([(10**9, 0)])).layer_compute_us == LAYER_COMPUTE_US_MAX

    def test_a_request_that_finds_blocks_being_loaded_waits(self) -> None:
        """Should the load fail, vLLM has only one of the requests compute the blocks again."""
        side, store, ledger = self.side()
        first, second = Request(list(range(200))), Request(list(range(200)))
        second.request_id = "s"
        store.chunks.update((key, b"") for key in chunk_keys(ONE_RANK.namespace(0, "", ""), range(200), 32))
        assert side.match(first, 0) == 192
        side.allocated(first, list(range(7)), 192)
        (job,) = ledger.take_step().loads
        assert side.match(second, 192) is None
        ledger.report(Report(ended_loads={job.job_id: 1}), 0.0)
        assert side.match(second, 192) == 0

    def test_another_salt_is_a_miss(self) -> None:
        side, store, _ = self.side()
        tokens = list(range(100))
        self.fill(store, tokens, salt="one")
        assert side.match(Request(tokens, cache_salt="two"), 0) == 0
        assert side.match(Request(tokens, cache_salt="one", request_id="q"), 0) == 96

    def test_requests_with_embeddings_of_their_own_are_left_alone(self) -> None:
        side, store, ledger = self.side()
        tokens = list(range(100))
        self.fill(store, tokens)
        request = Request(tokens, prompt_embeds=1)
        assert side.match(request, 0) == 0
        side.allocated(request, [1, 2, 3, 4], 0)
        assert not side.finished(request, [1, 2, 3, 4])
        assert not ledger.take_step().stores

    def test_images_are_told_apart_and_one_that_comes_later_is_not_stored(self) -> None:
        side, store, ledger = self.side()
        tokens = list(range(100))
        self.fill(store, tokens)
        request = Request(tokens, mm_features=[image("a", 40, 20)], num_computed_tokens=100)
        assert side.match(request, 0) == 32  # up to the image the prompt is the text that is stored
        side.allocated(request, [1, 2, 3, 4], 0)
        request.mm_features.append(image("b", 70, 5))
        assert side.match(request, 0) == 0
        side.finished(request, [1, 2, 3, 4])
        assert not ledger.take_step().stores

    @pytest.mark.parametrize("answer", [KeyError("matched"), ValueError("JSON"), OverflowError("token")])
    def test_whatever_a_lookup_meets_is_a_miss(self, answer: Exception) -> None:
        """Another server may answer there."""
        side, store, _ = self.side()
        store.lookup_failure = answer
        assert side.match(Request(list(range(200))), 0) == 0

    def test_a_lookup_that_fails_is_a_miss_and_is_not_repeated_at_once(self) -> None:
        """A store that is down must not slow every request by the lookup's deadline."""
        side, store, _ = self.side()
        calls: list[int] = []

        def fail(keys: Sequence[str], lease_s: float = 0.0, *, accept: Accept | None = None) -> int:
            calls.append(len(keys))
            raise ServerError(ErrorCode.INTERNAL_ERROR, "down", retryable=True)

        store.lookup = fail  # type: ignore[method-assign]
        assert [side.match(Request(list(range(100))), 0) for _ in range(3)] == [0, 0, 0]
        assert calls == [3]

    def test_only_tokens_of_steps_that_are_known_to_be_good_are_written(self) -> None:
        """Tokens of a step in flight may yet turn out to stand on blocks that were not loaded."""
        side, _, ledger = self.side()
        request = Request(list(range(200)))
        side.match(request, 0)
        side.scheduled("r", list(range(7)))
        assert ledger.take_step().stores == ()
        request.num_computed_tokens, request.num_in_flight_tokens = 128, 64
        side.scheduled("r", list(range(7)))
        (job,) = ledger.take_step().stores
        assert job.chunk_range.end_chunk == 2
        request.num_in_flight_tokens = 0
        assert side.finished(request, list(range(4)))
        (job,) = ledger.take_step().stores
        assert (job.chunk_range.first_chunk, job.chunk_range.end_chunk) == (2, 4)

    def test_what_another_connector_loads_is_written_only_once_a_token_more_is_computed(self) -> None:
        """Its bytes may be on their way in the very step in which the engine counts them as computed."""
        side, _, ledger = self.side()
        request = Request(list(range(200)))
        side.match(request, 0)
        side.allocated(request, list(range(7)), 0)
        request.num_computed_tokens = 128
        side.scheduled("r", list(range(7)))
        assert ledger.take_step().stores == ()
        request.num_computed_tokens = 160
        side.scheduled("r", list(range(7)))
        (job,) = ledger.take_step().stores
        assert (job.chunk_range.first_chunk, job.chunk_range.end_chunk) == (0, 5)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"objectcache": {"load_chunks": 7, "held_tokens": 64}}, 7),
        ({"objectcache": {"load_chunks": 0}}, 0),
        ({"objectcache": {"load_chunks": 7, "held_tokens": 65}}, None),
        ({"objectcache": {"load_chunks": -1, "held_tokens": 0}}, None),
        ({"objectcache": {"load_chunks": 7, "held_tokens": "64"}}, None),
        ({"objectcache": {"load_chunks": True}}, None),
        ({"objectcache": 7}, None),
        (None, None),
    ],
)
def test_a_router_that_took_the_engine_to_hold_more_does_not_count(params: object, expected: int | None) -> None:
    """It held 65 tokens when the request was sent, and 64 when its turn came: the engine decides itself."""
    assert told_chunks(params, 64) == expected
