"""SGLang's hierarchical cache over ObjectCache, by its own back-end for S3 and by ours: real host pools, controllers
with their threads, and a store to which anything may happen. Every page that is said to be there is compared byte by
byte.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.beds.processes import free_port
from tests.engines.hostile_store import Malice, hostile_store
from tests.engines.messages import Json
from tests.engines.sglang_run import SGLang, seaweedfs_options, sglang
from tests.engines.store import Store, running_store
from tests.support.cut_proxy import cut_proxy
from tests.support.requests import s3_client
from tests.support.tree import repository
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
FULL = pytest.mark.engines_full
TRANSPORTS = ["auto", *(pytest.param(each, marks=FULL) for each in ("http", "ucx"))]
QUICK = [("layer_first", "auto"), ("page_first", "http"), ("page_first_direct", "auto")]
PATIENCE_S = 60.0
"""More than every deadline below; a hang would last for ever."""
PAGE_BYTES = 32768
"""A page of the usual pool: 2 x 4 layers x 16 tokens x 2 heads x 64 elements of 2 bytes."""
_seeds = itertools.count(1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLang]:
    """SGLang, imported."""
    with sglang(tmp_path_factory.mktemp("sglang") / "log") as made:
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store for tests that do it no harm: they have seeds of their own."""
    with running_store(tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture(scope="module")
def with_ucx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store that offers ucx, whose process takes time to start."""
    with running_store(tmp_path_factory.mktemp("ucx-store"), options=("--ucx", "lo")) as store:
        yield store


@pytest.fixture
def offered(request: pytest.FixtureRequest, transport: str) -> Store:
    """A store that offers this transport."""
    store: Store = request.getfixturevalue("with_ucx" if transport == "ucx" else "shared")
    return store


@pytest.fixture
def seed() -> int:
    """The seed of pages that no other test has."""
    return next(_seeds)


class TestSeaweedFS:
    """SGLang's own back-end for SeaweedFS takes ObjectCache for its S3 service."""

    @pytest.mark.parametrize(
        "layout", ["layer_first", "page_first", *(pytest.param(each, marks=FULL) for each in LAYOUTS[2:])]
    )
    def test_pages_come_back_in_each_layout(self, engine: SGLang, shared: Store, seed: int, layout: str) -> None:
        with engine.seaweedfs(shared.endpoint, layout=layout, model=layout) as node:
            assert node.set(seed, 16) == 16
            assert node.exists(seed, 20) == 16
            assert node.get(seed, 16) == 16

    def test_states_come_back_beside_pages(self, engine: SGLang, shared: Store, seed: int) -> None:
        with engine.seaweedfs(shared.endpoint, kind="hybrid", model="hybrid") as node:
            assert node.set_all(seed, 8, [3, 7]) == {"kv": [True] * 8, "mamba": [True] * 2}
            assert node.exists_all(seed, 8)[0] == 8
            assert node.exists_all(seed, 7)[0] == 4
            assert node.get_all(seed, 8, 7) == {"kv": [True] * 8, "mamba": [True]}

    def test_the_controllers_threads_store_and_load(self, engine: SGLang, shared: Store, seed: int) -> None:
        with engine.seaweedfs(shared.endpoint) as node:
            assert node.backup(seed, 12) == 12
            assert node.prefetch(seed, 14) == (12, 12)

    def test_a_wrong_key_is_told_at_the_start(self, engine: SGLang, shared: Store) -> None:
        options = seaweedfs_options(shared.endpoint, secret_key="not the secret")
        with pytest.raises(AssertionError, match="403"), engine.node("seaweedfs", options):
            pass

    def test_a_missing_bucket_is_made_and_one_that_goes_is_a_miss(
        self, engine: SGLang, shared: Store, seed: int
    ) -> None:
        options = seaweedfs_options(shared.endpoint, bucket="made-by-seaweedfs")
        with engine.node("seaweedfs", options) as node:
            s3_client(shared.endpoint).delete_bucket(Bucket="made-by-seaweedfs")
            assert node.set(seed, 2) == 0
            assert node.exists(seed, 2) == 0
            assert node.get(seed, 2) == 0

    @FULL
    def test_a_server_that_has_ended_is_a_miss(self, engine: SGLang, store: Store, seed: int) -> None:
        with engine.seaweedfs(store.endpoint) as node:
            assert node.set(seed, 4) == 4
            store.server.kill()
            assert node.exists(seed, 4) == 0
            assert node.get(seed, 4) == 0
            assert node.set(seed + 10_000, 4) == 0


@pytest.mark.parametrize(
    ("layout", "transport"),
    [
        *QUICK,
        *(
            pytest.param(layout, transport, marks=FULL)
            for layout in LAYOUTS
            for transport in ("auto", "http", "ucx")
            if (layout, transport) not in QUICK
        ),
    ],
)
def test_a_batch_is_looked_up_by_one_request_and_loaded_by_one(
    engine: SGLang, offered: Store, seed: int, layout: str, transport: str
) -> None:
    with engine.ours(offered.endpoint, options={"transport": transport}, layout=layout) as node:
        assert node.set(seed, 16) == 16
        assert node.exists(seed, 20) == 16
        assert node.get(seed, 16) == 16
        assert node.get(seed, 20) == 16
        counters = node.counters()
        assert (counters["lookups"], counters["loads"], counters["fetches"]) == (1, 2, 2)
        assert counters["stored_bytes"] == 16 * PAGE_BYTES


def test_what_is_stored_is_not_stored_again(engine: SGLang, shared: Store, seed: int) -> None:
    with engine.ours(shared.endpoint) as node:
        assert node.set(seed, 6) == 6
        assert node.set(seed, 8) == 8
        assert node.counters()["stored_bytes"] == 8 * PAGE_BYTES


@pytest.mark.parametrize("transport", ["auto", "http"])
def test_a_load_larger_than_a_buffer_goes_in_several_requests(
    engine: SGLang, shared: Store, seed: int, transport: str
) -> None:
    """Through buffers of three pages; straight into the pool it is one request whatever its size."""
    options: dict[str, Json] = {"transport": transport, "internals": {"staging_bytes": 3 * PAGE_BYTES}}
    with engine.ours(shared.endpoint, options=options) as node:
        assert node.set(seed, 16) == 16
        assert node.get(seed, 16) == 16
        assert node.counters()["fetches"] == (6 if transport == "auto" else 1)


def test_ranks_share_the_pages_of_mla_and_no_others(engine: SGLang, shared: Store, seed: int) -> None:
    for kind, count in (("mla", 5), ("mha", 0)):
        with engine.ours(shared.endpoint, kind=kind, tp_rank=0, tp_size=2) as node:
            assert node.set(seed, 5) == 5
        with engine.ours(shared.endpoint, kind=kind, tp_rank=1, tp_size=2) as node:
            assert node.exists(seed, 5) == count
            assert node.get(seed, 5) == count


@pytest.mark.parametrize(
    "other",
    [
        {"model": "tiny/other"},
        {"layout": "page_first_direct"},
        {"layers": 3},
        {"heads": 1, "head_dim": 128},
        {"options": {"epoch": "2"}},
    ],
)
def test_engines_whose_pages_mean_something_else_share_nothing(
    engine: SGLang, shared: Store, seed: int, other: dict[str, Json]
) -> None:
    """One with another page size hashes other pages, too. The pages of a pool with fewer heads, and twice as wide ones,
    are of the same size.
    """
    with engine.ours(shared.endpoint) as node:
        assert node.set(seed, 3) == 3
    with engine.ours(shared.endpoint, **other) as node:  # type: ignore[arg-type]
        assert node.exists(seed, 3) == 0
        assert node.get(seed, 3) == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_states_decide_which_prefixes_are_restored(engine: SGLang, offered: Store, seed: int, transport: str) -> None:
    """One request asks about the pages of both pools."""
    with engine.ours(offered.endpoint, options={"transport": transport}, kind="hybrid") as node:
        assert node.set_all(seed, 8, [3, 6]) == {"kv": [True] * 8, "mamba": [True] * 2}
        assert node.exists_all(seed, 10) == (7, {"kv": 8, "mamba": 7}, [4, 7])
        assert node.exists_all(seed, 8, "all_pages") == (0, {"kv": 8}, [])
        assert node.counters()["lookups"] == 2
        assert node.get_all(seed, 7, 6) == {"kv": [True] * 7, "mamba": [True]}
        assert node.get_all(seed, 7, 5) == {"kv": [True] * 7, "mamba": [False]}


@pytest.mark.parametrize("kind", ["mha", "mla", "hybrid"])
def test_the_controllers_threads_store_and_load(engine: SGLang, shared: Store, seed: int, kind: str) -> None:
    with engine.ours(shared.endpoint, kind=kind) as node:
        assert node.backup(seed, 20) == 20
    with engine.ours(shared.endpoint, kind=kind) as restarted:
        assert restarted.prefetch(seed, 20) == (20, 20)


@pytest.mark.parametrize("kind", ["mha", "hybrid"])
def test_with_sglangs_own_random_failures_a_page_is_right_or_a_miss(engine: SGLang, shared: Store, kind: str) -> None:
    """SGLang fails calls before they reach the back-end; afterwards all is there that was said to be."""
    seeds = [next(_seeds) for _ in range(8)]
    with engine.ours(shared.endpoint, kind=kind, failures=0.3) as node:
        stored = {each: node.backup(each, 6) for each in seeds}
        loaded = [node.prefetch(each, 6) for each in seeds]
    assert all(came <= found for found, came in loaded)
    with engine.ours(shared.endpoint, kind=kind) as node:
        assert all(node.exists(each, 6) >= count for each, count in stored.items())


def test_two_engines_share_and_go_on_when_one_ends(engine: SGLang, shared: Store, seed: int) -> None:
    with engine.ours(shared.endpoint) as first:
        with engine.ours(shared.endpoint) as second:
            assert second.set(seed, 4) == 4
            assert first.get(seed, 4) == 4
        assert first.set(seed, 6) == 6
        assert first.prefetch(seed, 6) == (6, 6)


@pytest.mark.parametrize(
    ("layout", "transport"), [("layer_first", "auto"), ("page_first", "auto"), ("page_first", "http")]
)
def test_a_page_deleted_between_lookup_and_load_ends_the_prefix(
    engine: SGLang, shared: Store, seed: int, layout: str, transport: str
) -> None:
    with engine.ours(shared.endpoint, options={"transport": transport}, layout=layout) as node:
        assert node.set(seed, 6) == 6
        assert node.exists(seed, 6) == 6
        parts = len(node.names(seed, 1))
        shared.delete(node.names(seed, 6)[4 * parts - 1])
        assert node.get(seed, 6) == 3
        assert node.set(seed, 6) == 6
        assert node.get(seed, 6) == 6


@pytest.mark.parametrize("transport", ["auto", "http"])
def test_a_damaged_page_is_a_miss_and_is_stored_again(engine: SGLang, shared: Store, seed: int, transport: str) -> None:
    """Over http the answer breaks off, and the load brings nothing; the next lookup ends before the page."""
    with engine.ours(shared.endpoint, options={"transport": transport}) as node:
        assert node.set(seed, 6) == 6
        assert node.exists(seed, 6) == 6
        shared.damage(node.names(seed, 6)[2 * 2 + 1], 1000)
        assert node.get(seed, 6) in (0, 2)
        assert eventually(lambda: node.exists(seed, 6) == 2)
        assert node.set(seed, 6) == 6
        assert eventually(lambda: node.get(seed, 6) == 6)


def test_a_page_of_another_size_is_a_miss_and_nothing_beside_it_is_written(
    engine: SGLang, shared: Store, seed: int
) -> None:
    with engine.ours(shared.endpoint) as node:
        assert node.set(seed, 4) == 4
        name = node.names(seed, 4)[2 * 2]
        shared.put(name, shared.get(name) + b"more")
        assert node.get(seed, 4) == 2


SLOW_LINK = "[scheduler]\nlink_bytes_per_s = 100e3\n"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_killed_once_it_has_begun_a_load_is_a_miss_and_a_new_one_is_used(
    engine: SGLang, tmp_path: Path, seed: int, transport: str
) -> None:
    """Where it was faster than the kill, all pages have come, and are right."""
    port, ucx = free_port(), ("--ucx", "lo") if transport == "ucx" else ()
    with contextlib.ExitStack() as ends:
        store = ends.enter_context(running_store(tmp_path / "store", port=port, config=SLOW_LINK, options=ucx))
        node = ends.enter_context(engine.ours(store.endpoint, options={"transport": transport}))
        assert node.set(seed, 16) == 16
        with node.held_get(seed, 16) as came:
            store.server.kill()
        assert came in ([0], [16])
        assert node.set(next(_seeds), 4) == 0
        ends.enter_context(running_store(tmp_path / "store", port=port, options=ucx))
        assert eventually(lambda: node.get(seed, 16) == 16)
        assert eventually(lambda: node.set(seed, 17) == 17)


def test_an_answer_that_breaks_off_is_a_miss(engine: SGLang, shared: Store, seed: int) -> None:
    """The pages that had come are no hit either: nobody has said that they are whole."""
    with cut_proxy(shared.endpoint) as proxy, engine.ours(proxy.url, options={"transport": "http"}) as node:
        assert node.set(seed, 16) == 16
        proxy.break_at(*[lambda head, length: len(head) + length * 3 // 4] * 2)
        assert node.get(seed, 16) == 0
        assert proxy.breaks_left == 0
        assert eventually(lambda: node.get(seed, 16) == 16)


@pytest.mark.parametrize("transport", ["http", pytest.param("auto", marks=FULL)])
def test_a_server_that_hangs_is_a_miss_within_the_deadlines(
    engine: SGLang, store: Store, seed: int, transport: str
) -> None:
    """And it costs the calls after the first nothing."""
    internals: dict[str, Json] = {"lookup_timeout_s": 0.5, "store_timeout_s": 0.5, "retry_s": 60.0}
    options: dict[str, Json] = {"transport": transport, "load_timeout_s": 0.5, "internals": internals}
    with engine.ours(store.endpoint, options=options) as node:
        store.stop()
        try:
            began_s = time.monotonic()
            assert node.set(seed, 4) == 0
            assert node.get(seed, 4) == 0
            assert node.exists(seed, 4) == 0
            assert node.prefetch(seed, 4) == (0, 0)
            assert node.backup(seed, 4) == 0
            assert time.monotonic() - began_s < PATIENCE_S
            assert node.counters()["fetches" if transport == "http" else "load_failures"] == 1
        finally:
            store.go_on()


def test_an_engine_starts_without_a_store_and_uses_one_that_comes(engine: SGLang, tmp_path: Path, seed: int) -> None:
    port = free_port()
    with engine.ours(f"http://127.0.0.1:{port}") as node:
        assert node.exists(seed, 4) == 0
        assert node.backup(seed, 4) == 0
        assert eventually(lambda: "ObjectCache IS NOT USED until this is mended" in engine.process.log())
        with running_store(tmp_path / "store", port=port):
            assert eventually(lambda: node.set(seed, 4) == 4)
            assert eventually(lambda: node.get(seed, 4) == 4)


def test_a_start_says_where_pages_are_and_with_whom_they_are_shared(engine: SGLang, shared: Store, seed: int) -> None:
    with engine.ours(shared.endpoint, model="org/Named-Model") as node:
        prefix = node.names(seed, 1)[0].rsplit("/", 2)[0]
        assert prefix.startswith("sglang/Named-Model/")
        assert eventually(lambda: f"shared with all engines of {prefix}/" in engine.process.log())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"endpoint": ""}, "needs endpoint"),
        ({"interface_v1": 0}, "interface_v1"),
        ({"endpont": "http://127.0.0.1:1"}, "unknown options: endpont"),
    ],
)
def test_a_wrong_option_is_told_at_the_start(
    engine: SGLang, shared: Store, options: dict[str, Json], text: str
) -> None:
    with pytest.raises(AssertionError, match=text), engine.ours(shared.endpoint, options=options):
        pass


def test_clearing_deletes_the_pages_of_engines_of_this_kind_alone(engine: SGLang, shared: Store, seed: int) -> None:
    with engine.ours(shared.endpoint, model="cleared", kind="hybrid") as node:
        assert node.set_all(seed, 4, [3])["kv"] == [True] * 4
        with engine.ours(shared.endpoint, model="kept") as other:
            assert other.set(seed, 4) == 4
            node.clear()
            assert node.exists_all(seed, 4) == (0, {}, [])
            assert other.exists(seed, 4) == 4
    assert not [key for key in shared.keys() if key.startswith("sglang/cleared/")]  # noqa: SIM118 - not a mapping


def test_sglangs_metrics_have_pages_and_rates(engine: SGLang, shared: Store, seed: int) -> None:
    with engine.ours(shared.endpoint, metrics=True) as node:
        node.backup(seed, 5)
        node.prefetch(seed, 5)
        stats = node.stats()
        assert (stats["backup_pgs"], stats["prefetch_pgs"]) == ([5], [5])
        assert min(stats["backup_bandwidth"] + stats["prefetch_bandwidth"]) > 0
        assert node.stats()["backup_pgs"] == []


def test_an_engine_that_may_not_store_only_loads(engine: SGLang, shared: Store, seed: int) -> None:
    with engine.ours(shared.endpoint) as writer:
        assert writer.set(seed, 3) == 3
    with engine.ours(shared.endpoint, options={"store": False}) as node:
        assert node.set(seed, 5) == 0
        assert node.get(seed, 5) == 3


@pytest.mark.parametrize("transport", ["http", pytest.param("auto", marks=FULL)])
@pytest.mark.parametrize("malice", list(Malice))
def test_whatever_a_hostile_server_answers_is_a_miss(engine: SGLang, seed: int, malice: Malice, transport: str) -> None:
    """No page is said to be there, and no byte beside the pages that were asked for is written."""
    internals: dict[str, Json] = {"lookup_timeout_s": 1.0, "store_timeout_s": 1.0, "retry_s": 0.0}
    options: dict[str, Json] = {"transport": transport, "load_timeout_s": 1.0, "internals": internals}
    with hostile_store(malice, 4 * PAGE_BYTES) as endpoint, engine.ours(endpoint, options=options) as node:
        assert node.exists(seed, 4) == 0
        assert node.get(seed, 4) == 0
        assert node.set(seed, 4) == 0


def test_the_guides_file_and_flags_are_taken(engine: SGLang, shared: Store, seed: int) -> None:
    """The flags by SGLang's own parser, and the file as it stands but for the address of the server."""
    guide = (repository() / "docs/guides/sglang.md").read_text()
    (table,) = re.findall(r"```json\n(.*?)```", guide, re.DOTALL)
    (command,) = re.findall(r"```bash\n(.*?)```", guide, re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    flags = engine.process.ask("flags", arguments=words[3:])
    assert flags["hicache_storage_backend_extra_config"] == "@hicache.json"
    options = {**json.loads(table), "endpoint": shared.endpoint}
    layout, page_tokens = flags["hicache_mem_layout"], flags["page_size"]
    with engine.node(flags["hicache_storage_backend"], options, layout=layout, page_tokens=page_tokens) as node:
        assert node.backup(seed, 4) == 4
        assert node.prefetch(seed, 4) == (4, 4)


def test_engines_that_end_leave_no_thread_behind(engine: SGLang, shared: Store, seed: int) -> None:
    before = engine.process.ask("threads")
    for _ in range(3):
        with engine.ours(shared.endpoint) as node:
            node.set(seed, 2)
            node.get(seed, 2)
    assert eventually(lambda: engine.process.ask("threads") <= before)


def test_the_bucket_that_is_named_is_used(engine: SGLang, shared: Store, seed: int) -> None:
    with engine.ours(shared.endpoint, options={"bucket": "another-bucket"}) as node:
        assert eventually(lambda: node.set(seed, 2) == 2)
        name = node.names(seed, 1)[0]
    listed = s3_client(shared.endpoint).list_objects_v2(Bucket="another-bucket", Prefix=name)
    assert [entry["Key"] for entry in listed["Contents"]] == [name]
    assert name not in shared.keys()  # noqa: SIM118 - not a mapping
