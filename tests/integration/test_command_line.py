"""The commands that ask a running server: what they print and write as JSON, and what they say where it fails."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from descriptors.prefix_keys import Namespace, chunk_keys
from nixl_client.client import Client
from objectcache.cli.main import run
from tests.support.requests import OWNER, READER
from tests.support.servers import Stack

Ask = Callable[..., str]


@pytest.fixture
def ask(servers: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command against the servers; its output. The exit status is 0, unless `status` says otherwise."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OWNER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", OWNER[1])
    monkeypatch.setenv("OBJECTCACHE_ENDPOINT", servers.url)

    def asked(*words: str, status: int = 0) -> str:
        assert run(words) == status
        said = capsys.readouterr()
        return said.out if status == 0 else said.err

    return asked


def as_json(text: str) -> Any:
    return json.loads(text)


def test_what_is_put_is_listed_counted_got_and_deleted(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "file.bin"
    file.write_bytes(bytes(range(256)) * 100)
    assert ask("mb", "by-hand").strip() == "by-hand: nothing is evicted"
    for place in ("by-hand/models/a/", "by-hand/models/b/x", "by-hand/top"):
        ask("put", str(file), place)
    assert [each["key"] for each in as_json(ask("ls", "by-hand", "--json", "-"))] == [
        "models/a/file.bin", "models/b/x", "top"
    ]  # fmt: skip
    counts = {each["group"]: (each["objects"], each["bytes"]) for each in as_json(ask("du", "by-hand", "--json", "-"))}
    assert counts == {"": (1, 25600), "models/a/": (1, 25600), "models/b/": (1, 25600)}
    (whole,) = as_json(ask("du", "s3://by-hand/models", "--by", "bucket", "--json", "-"))
    assert (whole["group"], whole["objects"]) == ("", 2)
    ask("get", "by-hand/models/a/file.bin", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == file.read_bytes()
    assert "no such bucket or object" in ask("rm", "by-hand/models", status=1)
    assert ask("rm", "by-hand/top").strip() == "deleted by-hand/top"
    assert ask("rm", "by-hand/models/", "--recursive").strip() == "deleted 2 objects"
    assert ask("ls", "by-hand").strip() == "no objects"
    assert "whole bucket" in ask("rm", "by-hand", status=2)


def test_a_key_that_no_document_can_have_keeps_no_other_from_being_deleted(ask: Ask, servers: Stack) -> None:
    ask("mb", "odd-keys")
    for key in ("a", "b\x01", "c\rd", "c\nd", "e"):
        servers.s3().put_object(Bucket="odd-keys", Key=key, Body=b"")
    assert ask("rm", "odd-keys", "--recursive").strip() == "deleted 5 objects"
    assert ask("ls", "odd-keys").strip() == "no objects"


def test_the_kv_of_a_model_is_counted_and_deleted(ask: Ask) -> None:
    ask("mb", "by-model")
    spaces = [
        Namespace("Org/one", "bfloat16", 16),
        Namespace("Org/one", "bfloat16", 16, salt="s"),
        Namespace("two", "fp8", 16),
    ]
    with Client(os.environ["OBJECTCACHE_ENDPOINT"], "by-model", access_key=OWNER[0], secret_key=OWNER[1]) as client:
        for space in spaces:
            client.put_chunks(chunk_keys(space, range(32), 16), [b"a", b"b"], metadata=space.metadata(16))
        client.put_chunks([f"lmcache/Org-one/{'0' * 32}/{'0' * 64}"], [b"c"])
        key = chunk_keys(spaces[0], range(16), 16)[0]
        headers = client.http.request("HEAD", f"/by-model/{key}").headers
    assert {name: headers[f"x-amz-meta-{name}"] for name in ("model", "dtype", "layout", "tokens")} == {
        "model": "Org/one", "dtype": "bfloat16", "layout": "KV_L2TD", "tokens": "16"
    }  # fmt: skip
    counts = {each["group"]: each["objects"] for each in as_json(ask("du", "by-model", "--json", "-"))}
    assert counts == {"kv/Org-one/": 4, "kv/two/": 2, "lmcache/Org-one/": 1}
    assert "write by-model" in ask("rm", "by-model/kv", "--model", "two", status=2)
    assert ask("rm", "by-model", "--model", "Org-one").strip() == "deleted 5 objects"
    assert {each["group"] for each in as_json(ask("du", "by-model", "--json", "-"))} == {"kv/two/"}
    for wrong in ("", "Org/one", "数据-two"):
        assert "write the name as" in ask("rm", "by-model", "--model", wrong, status=2)
    assert run(["rm", "by-model", "--model", "Org-one"]) == 1


def test_a_cache_is_made_and_its_state_is_told(ask: Ask) -> None:
    assert ask("mb", "by-hand-cache", "--cache", "64MiB").strip() == "by-hand-cache: a cache of 64 MiB"
    ask("mb", "by-hand-plain")
    assert "is no cache" in ask("mb", "by-hand-plain", "--cache", status=1)
    caches = {each["name"]: each["cache"] for each in as_json(ask("ls", "--json", "-"))}
    assert caches["by-hand-cache"] == str(64 << 20)
    assert caches["by-hand-plain"] is None
    (server,) = as_json(ask("status", "--json", "-"))["storage_servers"]
    assert "by-hand-cache" in [each["bucket"] for each in server["caches"]]
    assert "by-hand-cache" in ask("status")
    assert "size" in ask("mb", "by-hand-wrong", "--cache", "much", status=2)


def test_the_status_has_the_failures_and_the_rates(ask: Ask) -> None:
    ask("ls", "no-such-bucket", status=1)
    failures = as_json(ask("status", "--json", "-"))["gateway"]["failures"]
    assert (failures[0]["code"], failures[0]["bucket"]) == ("NoSuchBucket", "no-such-bucket")
    assert failures[0]["request_id"] in ask("status")
    assert "sent/s" in ask("top", "--count", "1", "--interval", "0.01")


def test_names_that_others_choose_do_nothing_to_a_terminal(ask: Ask, servers: Stack, tmp_path: Path) -> None:
    """A stranger's bucket is in the failures that the status shows, and a tenant's key in a list."""
    file = tmp_path / "f"
    file.write_bytes(b"x")
    ask("mb", "by-hand-odd")
    servers.s3().put_object(Bucket="by-hand-odd", Key="a\x1b[2Jb", Body=b"x")
    servers.request("GET", "/odd%1b%5b2Jbucket/key")
    for said in (ask("ls", "by-hand-odd"), ask("status"), ask("du", "by-hand-odd")):
        assert "\x1b" not in said
    assert "a\N{REPLACEMENT CHARACTER}[2Jb" in ask("ls", "by-hand-odd")
    assert as_json(ask("ls", "by-hand-odd", "--json", "-"))[0]["key"] == "a\x1b[2Jb"


def test_a_key_of_some_buckets_may_not_see_the_state_of_all(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER[1])
    assert "AccessDenied" in ask("status", status=1)


def test_credentials_come_from_the_file_that_the_server_keeps(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps({"access_key": OWNER[0], "secret_key": OWNER[1]}))
    with pytest.MonkeyPatch.context() as bare:
        bare.delenv("AWS_ACCESS_KEY_ID")
        assert "an access key is needed" in ask("ls", status=2)
        ask("ls", "--credentials", str(file))
        ask("status", "--credentials", str(tmp_path))
        assert "no such file" in ask("ls", "--credentials", str(tmp_path / "x"), status=2).lower()
        file.write_text("{}")
        assert "access_key" in ask("ls", "--credentials", str(file), status=2)


@pytest.mark.parametrize(
    ("endpoint", "said", "status"),
    [
        ("http://127.0.0.1:{free}", "no ObjectCache at http://127.0.0.1:{free}: Connection refused", 1),
        ("https://{netloc}", "it speaks http: write http://{netloc}", 1),
        ("http://{netloc}/kv-cache", "a server has no path; write http://{netloc}", 2),
        ("ftp://{netloc}", "write http://HOST:PORT", 2),
        ("http://host:99999999", "the port is no number", 2),
        ("host", "the port is missing; write http://host:9000", 2),
    ],
)
def test_an_address_that_is_wrong_is_told_with_what_to_write(
    ask: Ask, servers: Stack, endpoint: str, said: str, status: int
) -> None:
    with socket.socket() as taken:  # bound and not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        words = {"free": taken.getsockname()[1], "netloc": servers.url.partition("//")[2]}
        assert said.format(**words) in ask("status", endpoint.format(**words), status=status)


def test_a_wrong_key_is_told_apart_from_a_wrong_secret(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x" * 20)
    assert "the secret key is not that of the access key" in ask("status", status=1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NOBODY")
    assert "the server does not know this access key" in ask("status", status=1)
