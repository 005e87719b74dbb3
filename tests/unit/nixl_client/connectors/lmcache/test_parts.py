"""The LMCache connector without LMCache: names, options, plans, the queue of stores."""

from __future__ import annotations

import math
import threading
from dataclasses import fields

import pytest

from descriptors.descriptor import CHUNK_COUNT_MAX, PER_LAYER_CHUNK_BYTES_MAX
from descriptors.layout import ChunkLayout
from descriptors.recompute import PrefillCosts
from nixl_client.connectors.lmcache.chunks import (
    ChunkSize,
    ChunkSpace,
    batches,
    joint_size,
    object_name,
    opaque_layout,
    partial_tokens,
    row_layout,
    worth_loading,
)
from nixl_client.connectors.lmcache.jobs import Jobs
from nixl_client.connectors.lmcache.options import PROMISED, LMCacheOptions
from nixl_client.transports.transport import Transport
from objectcache.kv_codecs.layer import group_of

SPACE = ChunkSpace("in-process", "org/model", "0 of 1", "bfloat16", "(2, 2, 16, 8, 64)")


class TestOptions:
    def test_types_and_unknown_names_are_refused(self) -> None:
        """A misspelt option must not be silently without effect."""
        for extra in ({"bucket": "b"}, {"bucket": "b", "endpoint": "e", "lease": 1}):
            with pytest.raises(ValueError, match=r"endpoint|lease"):
                LMCacheOptions.of(extra)
        for name, value in {"store": 1, "load_timeout_s": 0, "transport": "pigeon"}.items():
            with pytest.raises(ValueError, match=name):
                LMCacheOptions.of({"endpoint": "e", "bucket": "b", name: value})
        for name, value in {"lease_s": "1", "loads_max": 0, "retry_s": True, "unknown": 1, "store": True}.items():
            with pytest.raises(ValueError, match=name):
                LMCacheOptions.of({"endpoint": "e", "bucket": "b", "internals": {name: value}})

    def test_costs_of_computing_are_taken_where_any_is_given(self) -> None:
        given = {"endpoint": "e", "bucket": "b"}
        assert LMCacheOptions.of(given).prefill is None
        assert LMCacheOptions.of(given | {"prefill": {"token_us": 12}}).prefill == PrefillCosts(12)
        for wrong in ({"token_us": -1}, {"tokens": 1}, 5):
            with pytest.raises(ValueError, match="prefill"):
                LMCacheOptions.of(given | {"prefill": wrong})

    def test_former_names_hold_and_are_told(self, caplog: pytest.LogCaptureFixture) -> None:
        former = {"endpoint": "e", "prefill_token_us": 3.0, "lease_s": 5.0, "lossy": "bounded", "max_error": 0.05}
        options = LMCacheOptions.of(former)
        assert (options.prefill_token_us, options.lease_s, options.max_error) == (3.0, 5.0, 0.05)
        assert [record.getMessage() for record in caplog.records] == [
            "the option prefill_token_us is prefill.token_us now",
            "the option max_error is the value of lossy now: 0.05",
            "the option lease_s is internals.lease_s now: no promise holds for it",
        ]

    def test_there_are_few_options(self) -> None:
        assert len(PROMISED) <= 12
        assert {field.name for field in fields(LMCacheOptions)} >= PROMISED - {"prefill"}

    def test_tokens_of_a_chunk_are_bounded(self) -> None:
        given = {"endpoint": "e", "bucket": "b"}
        assert LMCacheOptions.of(given | {"chunk_tokens": 64}).chunk_tokens == 64
        for wrong in (-1, 1 << 40, "64"):
            with pytest.raises(ValueError, match="chunk_tokens"):
                LMCacheOptions.of(given | {"chunk_tokens": wrong})

    def test_values_are_taken(self) -> None:
        given = {"endpoint": "e", "bucket": "b", "transport": "shm", "internals": {"lease_s": 5}, "store": False}
        options = LMCacheOptions.of(given)
        assert (options.transport, options.lease_s, options.store) == (Transport.SHM, 5, False)


class TestNaming:
    def test_everything_that_decides_bytes_is_in_the_name(self) -> None:
        """A mismatch is a miss, and tenants share nothing."""
        spaces = [
            SPACE,
            ChunkSpace("multiprocess", "org/model", "0 of 1", "bfloat16", "(2, 2, 16, 8, 64)"),
            ChunkSpace("in-process", "org/model2", "0 of 1", "bfloat16", "(2, 2, 16, 8, 64)"),
            ChunkSpace("in-process", "org/model", "0 of 2", "bfloat16", "(2, 2, 16, 8, 64)"),
            ChunkSpace("in-process", "org/model", "0 of 1", "half", "(2, 2, 16, 8, 64)"),
            ChunkSpace("in-process", "org/model", "0 of 1", "bfloat16", "(2, 2, 16, 4, 128)"),
            ChunkSpace("in-process", "org/model", "0 of 1", "bfloat16", "(2, 2, 16, 8, 64)", (("a", "bc"),)),
            ChunkSpace("in-process", "org/model", "0 of 1", "bfloat16", "(2, 2, 16, 8, 64)", (("ab", "c"),)),
        ]
        assert len({object_name(space, 7) for space in spaces}) == len(spaces)

    def test_names_are_readable_and_stay_as_they_are(self) -> None:
        """Objects outlive releases."""
        assert object_name(SPACE, 0xC0FFEE) == f"{SPACE.prefix()}c0ffee"
        assert object_name(SPACE, b"\x00\xff") == f"{SPACE.prefix()}00ff"
        assert SPACE.prefix() == "lmcache/org-model/8554850011e5e48674a5fe0399ccc34f/"

    def test_labels_are_safe_whatever_the_model_is_called(self) -> None:
        for model in ("", "/", "..", "a b\n", "ü", "x" * 500):
            label = ChunkSpace("m", model, "", "", "").prefix().split("/")[1]
            assert 1 <= len(label) <= 64
            assert label not in (".", "..")


class TestPlan:
    @pytest.mark.parametrize(
        ("chunk_bytes", "slices"), [(1, 1), (5000, 1), (PER_LAYER_CHUNK_BYTES_MAX, 1), (3 << 30, 3)]
    )
    def test_layout_has_the_objects_size_and_fewest_slices(self, chunk_bytes: int, slices: int) -> None:
        layout = opaque_layout(chunk_bytes)
        assert (layout.chunk_bytes, layout.num_layers) == (chunk_bytes, slices)

    def test_sizes_without_a_layout_are_refused(self) -> None:
        for chunk_bytes in (0, (1 << 31) + 11):
            with pytest.raises(ValueError, match="layout"):
                opaque_layout(chunk_bytes)

    @pytest.mark.parametrize(
        ("shape", "element_bytes", "rows"),
        [
            ((2, 3, 32, 64), 2, 96),
            ((2, 32, 256, 1024), 2, 4096),
            ((2, 80, 256, 1024), 2, 2560),
            ((2, 4, 256, 128), 4, 1024),
            ((2, 3, 16, 64), 2, None),
            ((1, 27, 256, 576), 2, None),
            ((2, 128, 256, 65_536), 2, None),
            ((2, 4, 256), 2, None),
        ],
    )
    def test_rows_are_tokens_and_no_group_has_two_layers(
        self, shape: tuple[int, ...], element_bytes: int, rows: int | None
    ) -> None:
        """128 layers of 256 tokens would be rows of eight tokens, and too wide."""
        layout = row_layout(shape, element_bytes)
        if rows is None:
            assert layout is None
            return
        assert layout == ChunkLayout(1, rows, element_bytes * math.prod(shape))
        assert (shape[2] * rows // (shape[1] * shape[2])) % group_of(rows) == 0

    def test_batches_fit_the_buffer_and_hold_at_least_one(self) -> None:
        assert list(batches(5, 10, 25)) == [(0, 2), (2, 4), (4, 5)]
        assert list(batches(2, 10, 1)) == [(0, 1), (1, 2)]
        assert list(batches(0, 10, 100)) == []
        assert next(batches(CHUNK_COUNT_MAX + 1, 1, 1 << 30)) == (0, CHUNK_COUNT_MAX)

    @pytest.mark.parametrize(("nbytes", "tokens"), [(0, 0), (10, 1), (15, 0), (150, 15), (160, 0), (170, 0)])
    def test_part_of_a_chunk_is_whole_tokens_and_no_whole_chunk(self, nbytes: int, tokens: int) -> None:
        assert partial_tokens(nbytes, 10, 16) == tokens


class TestJobs:
    def test_too_much_is_refused_and_everything_else_is_let_go_once(self) -> None:
        """LMCache's memory is held until a store is over, so what waits is bounded."""
        gate, ended = threading.Event(), []
        jobs = Jobs(4)
        first = jobs.add(3, lambda: gate.wait(10), lambda: ended.append("first"))
        assert first is not None
        assert jobs.add(2, lambda: True, lambda: ended.append("refused")) is None
        second = jobs.add(1, lambda: True, lambda: ended.append("second"))
        assert second is not None
        gate.set()
        jobs.close(10)
        assert ended == ["first", "second"]
        assert jobs.add(1, lambda: True, lambda: ended.append("late")) is None

    def test_close_drops_what_is_left_at_its_deadline(self) -> None:
        gate, ended = threading.Event(), []
        jobs = Jobs(4)
        jobs.add(1, lambda: gate.wait(10), lambda: ended.append("first"))
        jobs.add(1, lambda: True, lambda: ended.append("second"))
        jobs.close(0)
        assert ended == ["second"]
        gate.set()

    def test_failed_work_is_let_go_too(self) -> None:
        ended = []
        jobs = Jobs(4)

        def fail() -> bool:
            raise OSError

        future = jobs.add(1, fail, lambda: ended.append("it"))
        assert future is not None
        assert isinstance(future.exception(10), OSError)
        jobs.close(10)
        assert ended == ["it"]


class TestWorthLoading:
    """Chunks of 256 tokens in 1 MB; computing a token takes 100 us, a chunk 25.6 ms."""

    CHUNK = ChunkSize(256, 10**6)
    PREFILL = PrefillCosts(100.0)

    @pytest.mark.parametrize(("rate", "worth"), [(None, 8), (1e9, 8), (41e6, 8), (38e6, 0), (1e6, 0)])
    def test_chunks_are_loaded_at_a_rate_that_beats_computing(self, rate: float | None, worth: int) -> None:
        assert worth_loading(8, self.CHUNK, 10, self.PREFILL, rate) == worth

    def test_ranks_share_the_rate(self) -> None:
        two = ChunkSize(256, 10**6, rank_count=2)
        assert worth_loading(8, two, 10, self.PREFILL, 60e6) == 0
        assert worth_loading(8, two, 10, self.PREFILL, 90e6) == 8

    def test_shards_that_are_looked_up_together_are_weighed_together(self) -> None:
        """Tokens of which one shard is missing must be computed."""
        joint = joint_size(256, [10**6, 10**6])
        assert (joint.tokens, joint.nbytes) == (256, 2 * 10**6)
        assert worth_loading(8, joint, 10, self.PREFILL, 60e6) == 0
        assert worth_loading(8, joint, 10, self.PREFILL, 90e6) == 8

    def test_nothing_stored_is_nothing_worth(self) -> None:
        assert worth_loading(0, self.CHUNK, 10, self.PREFILL, None) == 0
