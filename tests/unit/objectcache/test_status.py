"""What `objectcache status` and `top` make of a server's answer, and what a server says when it starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from objectcache.cli.banner import Started, banner
from objectcache.cli.status import cluster_lines, rates_between, status_lines, top_line

SCHEDULER = {
    "policy": "slack", "rates": "held", "link_bytes_per_s": 1.25e9, "layerwise_active": 2, "chunkwise_active": 1,
    "layerwise_waiting": 3, "chunkwise_waiting": 0,
}  # fmt: skip
CACHE = {
    "bucket": "kv", "capacity_bytes": 2**30, "used_bytes": 2**20, "object_count": 1234, "evicted_count": 7,
    "evicted_bytes": 9, "eviction_age_s": 7200.0,
}  # fmt: skip


def server(**changed: Any) -> dict[str, Any]:
    return {
        "name": "", "version": "1.2.3", "uptime_s": 90.0, "upstream": "", "used_bytes": 2**30, "bound_bytes": 2**31,
        "free_bytes": 2**33, "dram_bytes": 2**30, "dram_used_bytes": 2**29, "dram_hit_count": 3, "dram_missed_count": 1,
        "lookup_count": 10, "asked_chunk_count": 100, "matched_chunk_count": 50, "has_shm": True, "has_ucx": False,
        "scheduler": SCHEDULER, "sent_bytes": {"shm": 2**20}, "caches": [CACHE], **changed,
    }  # fmt: skip


def status(*servers: dict[str, Any], failures: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    gateway = {"version": "1.2.3", "uptime_s": 3.0, "region": "us-east-1", "failures": list(failures)}
    return {"gateway": gateway, "storage_servers": list(servers)}


def test_a_status_says_what_is_there_in_words_and_units() -> None:
    text = "\n".join(status_lines("http://h:1", status(server())))
    assert "ObjectCache 1.2.3 at http://h:1, up 3 s" in text
    assert "1 GiB of 2 GiB; 8 GiB free on its file system" in text
    assert "512 MiB of 1 GiB, 75% of the chunks read came from it" in text
    assert "10: 50 of 100 chunks were there" in text
    assert "1.25 GB/s, 3 deliveries, 3 wait" in text
    assert [line.split() for line in text.splitlines()][-1] == ["kv", "1,234", "1", "MiB", "1", "GiB", "7", "2.0", "h"]


def test_a_cluster_has_a_part_for_each_server_and_a_failure_its_request_id() -> None:
    failure = {
        "at": 0.0, "request_id": "ABC", "operation": "get_object", "bucket": "kv", "status": 503, "code": "SlowDown"
    }  # fmt: skip
    lines = status_lines("u", status(server(name="a", caches=[]), server(name="b"), failures=(failure,)))
    assert sum(line.startswith("storage server ") for line in lines) == 2
    assert "none: nothing is ever evicted" in "\n".join(lines)
    assert lines[-1].split() == ["01-01", "00:00:00", "503", "SlowDown", "get_object", "kv", "ABC"]


def test_members_are_told_with_their_share_of_the_keys_also_those_that_do_not_answer() -> None:
    members = [
        {"name": "a", "endpoint": "http://a:1", "key_share": 0.75, "is_draining": False},
        {"name": "b", "endpoint": "http://b:1", "key_share": 0.25, "is_draining": False},
        {"name": "c", "endpoint": "http://c:1", "key_share": 0.0, "is_draining": True},
    ]
    cluster = {"cluster_id": "kv", "view": 7, "members": members}
    told = {**status(server(name="a"), server(name="c")), "cluster": cluster}
    lines = cluster_lines(told)
    assert lines[0] == "cluster kv, view 7: 2 of 3 members answer"
    assert [line.split() for line in lines[2:]] == [
        ["a", "http://a:1", "75%", "up", "1.5", "min", "1", "GiB", "1.2.3"],
        ["b", "http://b:1", "25%", "does", "not", "answer"],
        ["c", "http://c:1", "0%", "up", "1.5", "min,", "draining", "1", "GiB", "1.2.3"],
    ]
    assert lines[0] in status_lines("u", told)
    assert "cluster" not in "\n".join(status_lines("u", {**told, "cluster": None}))


def test_no_server_is_said() -> None:
    assert "  no storage server answers" in status_lines("u", status())


def test_rates_are_differences_and_a_server_that_started_anew_has_none_below_zero() -> None:
    later = server(lookup_count=30, asked_chunk_count=300, matched_chunk_count=150, sent_bytes={"shm": 2**21})
    rates = rates_between(status(server()), status(later), 2.0)
    assert rates["lookups_per_s"] == 10
    assert rates["matched_share"] == pytest.approx(0.5)
    assert rates["sent_bytes_per_s"] == 2**19
    assert (rates["active"], rates["waiting"]) == (3, 3)
    anew = rates_between(status(later), status(server(lookup_count=0, sent_bytes={})), 2.0)
    assert (anew["lookups_per_s"], anew["sent_bytes_per_s"]) == (0, 0)
    assert len(top_line(rates)) == len(top_line(anew))


def test_a_start_says_whose_key_it_uses_what_it_keeps_and_what_to_type() -> None:
    started = Started(
        url="http://h:9000", data="/d", used_bytes=0, bound_bytes=None, free_bytes=2**40, upstream=None, caches=(),
        dram_bytes=2**30, transports=("shm", "http"), access_keys=("A", "B", "C", "D"), keys_from="from /d/c.json",
    )  # fmt: skip
    text = banner(started)
    assert "none: nothing is ever evicted (--cache BUCKET makes one)" in text
    assert "A, B, C … (from /d/c.json)" in text
    assert text.splitlines()[-2].split(maxsplit=1)[1] == "http://h:9000/_objectcache/"
    assert text.splitlines()[-1].split(maxsplit=1)[1] == "objectcache status http://h:9000"
    large = banner(replace(started, caches=(("kv", 2**50),)))
    assert "kv (1024 TiB, of which the file system has 1 TiB)" in large
    typed = banner(replace(started, credentials="my data")).splitlines()[-1]
    assert typed.endswith("objectcache status http://h:9000 --credentials 'my data'")
