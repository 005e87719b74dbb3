"""Mistakes that people make in the config file and on the command line, and the line that tells them the remedy."""

from __future__ import annotations

import ssl
import sys
from pathlib import Path

import pytest

from descriptors.prefix_keys import Namespace
from nixl_client.transports.http import ServerAddress, reason_of
from objectcache.adapters.memory_area import PrivateArea
from objectcache.adapters.trust import client_context
from objectcache.cli.config import ConfigError, check_tenants, load_config, load_credentials
from objectcache.cli.main import run
from objectcache.orchestrator.settings import EngineSettings, engine_settings
from objectcache.orchestrator.tokenizer import LocalTokenizer, TokenizerFiles

SECRET = 'secret_key = "0123456789abcdef"'
FILES = [
    ("[storage]\ndram_byte = 1", "storage.dram_byte: not known; did you mean dram_bytes?"),
    ("[storge]\ndram_bytes = 1", "storge: not known; did you mean storage?"),
    ("[gateway]\nzzz = 1", "gateway.zzz: not known; known are allows_sigv2, "),
    ("[upstream.remote_dram]\nendpont = 'x'", "upstream.remote_dram.endpont: not known; did you mean endpoint?"),
    ("[[buckets]]\nname = 'kv-cache'\ncapacity = 1", "buckets[1].capacity: not known; did you mean capacity_bytes?"),
    ("[storage]\ndram_bytes = 32GB", 'line 2: a value with a unit needs quotes: dram_bytes = "32GB"'),
    ("[scheduler]\nlink_bytes_per_s = 12.5 GB # fast", 'needs quotes: link_bytes_per_s = "12.5 GB"'),
    ("[storage]\ndram_bytes = '32 GBs'", "storage.dram_bytes: '32 GBs' is no size: write 65536"),
    ("[scheduler]\nlink_bytes_per_s = '100Gbps'", "'100Gbps' counts bits; rates are in bytes a second: 1.25e+10"),
    ("[storage]\ndram_bytes =\n", "at line 2"),
    (f"[[credentials]]\naccess_key = 'AAA'\n{SECRET}\nactions = ['GetObjct']", "did you mean GetObject?"),
    (f"[[credentials]]\naccess_key = 'AAA'\n{SECRET}\nactions = ['reed']", "'reed' is no action; actions are named as"),
]


@pytest.mark.parametrize(("text", "told"), FILES)
def test_a_file_that_is_wrong_is_told_with_its_place_and_the_remedy(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert str(raised.value).startswith(f"{file}: ")
    assert told in str(raised.value)
    assert "pydantic" not in str(raised.value)
    assert "Value error" not in str(raised.value)


def test_patterns_of_actions_are_known(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[[credentials]]\naccess_key = 'AAA'\n{SECRET}\nactions = ['Get*', 'ListAllMyBuckets', '*']")
    assert load_config(file).credentials[0].actions == ("Get*", "ListAllMyBuckets", "*")


def test_an_access_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[[credentials]]\naccess_key = 'AAA'\n{SECRET}\n" * 2)
    with pytest.raises(ConfigError, match="access_key AAA appears twice"):
        load_credentials(load_config(file), {}, tmp_path / "credentials.json")


def test_a_start_without_the_key_of_before_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever adds a tenant, and does not name the first one, locks the first one out."""
    kept, file = tmp_path / "credentials.json", tmp_path / "config.toml"
    (first,) = load_credentials(load_config(None), {}, kept)
    file.write_text(f"[[credentials]]\naccess_key = 'AAA'\n{SECRET}\n")
    load_credentials(load_config(file), {}, kept)
    assert f"the access key {first.access_key} of {kept} is not known any more" in caplog.text
    caplog.clear()
    file.write_text(
        f"[[credentials]]\naccess_key = 'AAA'\n{SECRET}\n[[credentials]]\naccess_key = '{first.access_key}'\n{SECRET}\n"
    )
    load_credentials(load_config(file), {}, kept)
    assert not caplog.text


def test_a_tenant_that_nobody_is_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[[credentials]]\naccess_key = 'TEAM'\n{SECRET}\n[[tenants]]\naccess_key = 'TEAMS'\n")
    config = load_config(file)
    with pytest.raises(ConfigError, match=r"TEAMS is no access key of this server; did you mean TEAM\?"):
        check_tenants(config, load_credentials(config, {}, tmp_path / "credentials.json"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve", "--data", "{tmp}/d", "--port", "70000"], "'70000' is no port"),
        (["serve", "--data", "{tmp}/d", "--upstream", "/kv"], "for a directory that servers share: file:///kv"),
        (
            ["serve", "--data", "{tmp}/d", "--upstream", "file://{tmp}/no"],
            "is no directory: is the file system mounted?",
        ),
        (["orchestrator", "--engine", "http://127.0.0.1:8000/v1"], "must be http://HOST:PORT, without /v1"),
        (
            ["orchestrator", "--engine", "http://me:secret@127.0.0.1:8000"],
            "--engine: url must be http://HOST:PORT, and",
        ),
        (["orchestrator", "--engine", "http://127.0.0.1:8000?a=b"], "--engine: url must be http://HOST:PORT, and"),
        (["demo", "--quick", "--model", "x"], "--quick takes no --model"),
        (["calibrate", "theta", "--data", "{tmp}/no/folder", "--smoke"], "{tmp}/no: no such folder"),
    ],
)
def test_a_command_that_is_wrong_is_told_in_a_line(
    words: list[str], told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    try:
        status = run([word.format(tmp=tmp_path) for word in words])
    except SystemExit as ended:
        status = int(ended.code or 0)
    said = capfd.readouterr().err
    assert status in (1, 2)
    assert told.format(tmp=tmp_path) in said
    assert "Traceback" not in said


def test_memory_that_cannot_be_had_is_told_with_its_size() -> None:
    with pytest.raises(OSError, match=r"8192 TiB of memory cannot be had"):
        PrivateArea(2**53)


@pytest.mark.parametrize("wrong", [{"model": ""}, {"dtype": ""}, {"block_tokens": 0}])
def test_a_namespace_that_models_would_share_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a namespace needs a model"):
        Namespace(**{"model": "m", "dtype": "bfloat16", "block_tokens": 16, **wrong})  # type: ignore[arg-type]


def test_an_engine_is_registered_without_a_path() -> None:
    assert engine_settings({"url": "http://127.0.0.1:8000/"}).url == "http://127.0.0.1:8000"
    with pytest.raises(ValueError, match="ranks of an engine"):
        engine_settings({"url": "http://127.0.0.1:8000", "name": "a#1"})
    with pytest.raises(ValueError, match="ranks of an engine"):
        engine_settings({"url": "http://127.0.0.1:8000#"})
    with pytest.raises(ValueError, match="without /v1"):
        engine_settings({"url": "http://127.0.0.1:8000/v1"})


@pytest.mark.parametrize(
    "url", ["http://me:secret@a:1", "http://me@a:1", "http://:secret@a:1", "http://a:1?b", "http://a:0"]
)
def test_an_engine_is_given_without_a_password(url: str, tmp_path: Path) -> None:
    """An engine's name is its URL, which every answer and the metrics tell to everybody."""
    with pytest.raises(ValueError, match="and nothing else"):
        EngineSettings(url)
    with pytest.raises(ValueError, match="and nothing else"):
        engine_settings({"url": url, "name": "a"})
    file = tmp_path / "config.toml"
    file.write_text(f'[[engines]]\nurl = "{url}"\nname = "a"\n')
    with pytest.raises(ConfigError, match="and nothing else"):
        load_config(file)


def test_a_tokenizer_without_its_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"install the extra objectcache\[orchestrator\]"):
        LocalTokenizer(TokenizerFiles("tokenizer.json", b"{}"))


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9000/kv", "https://host/?a=b", "http://host/#x"])
def test_an_endpoint_with_a_path_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="a server has no path: write http"):
        ServerAddress.parse(endpoint)
    assert ServerAddress.parse("http://127.0.0.1:9000/").url == "http://127.0.0.1:9000"


def test_why_nobody_answers_is_told_with_the_remedy() -> None:
    plain, secured = ServerAddress.parse("http://host:9000"), ServerAddress.parse("https://host:9000")
    untrusted = ssl.SSLCertVerificationError(1, "failed")
    untrusted.verify_message = "self-signed certificate"
    assert "AWS_CA_BUNDLE names its CA's PEM file" in reason_of(untrusted, secured)
    assert reason_of(ConnectionRefusedError(111, "Connection refused"), plain) == "Connection refused"


def test_a_bundle_of_authorities_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with pytest.raises(OSError, match="AWS_CA_BUNDLE") as raised:
        client_context()
    assert raised.value.filename == str(tmp_path / "none.pem")
    (tmp_path / "none.pem").write_text("garbage")
    with pytest.raises(OSError, match="AWS_CA_BUNDLE"):
        client_context()
