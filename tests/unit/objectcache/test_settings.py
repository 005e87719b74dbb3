"""The settings of the config file: how many there are, what memory they come to, and those of former versions."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import pytest
from pydantic import BaseModel

from descriptors.units import GIB, MIB
from gateway.app import GatewaySettings
from objectcache.cli import config_former
from objectcache.cli.config import Config, ConfigError, load_config
from objectcache.cli.config_memory import MEMORY_BYTES, MEMORY_BYTES_MIN
from objectcache.cli.config_reference import NOT_PROMISED, table_in
from objectcache.cli.main import make_parser
from storage_server.settings import StorageSettings, UpstreamSettings

KEYS_MAX = 93
"""Bounds of the loss raised it from 90: the losses, the models of buckets, and `max_loss` beside each `max_error`."""
OPTIONS_MAX = 40


def keys_of(model: type[BaseModel], path: str = "") -> list[str]:
    """The keys that a file may have, those of tables in tables among them."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        inner = table_in(field.annotation)
        found += [f"{path}{name}"] if inner is None else keys_of(inner, f"{path}{name}.")
    return found


def promised_keys() -> list[str]:
    return [key for key in keys_of(Config) if not key.startswith(f"{NOT_PROMISED}.")]


def test_there_are_few_settings() -> None:
    """Each is one more thing that somebody has to know. A new one must earn its place, or take another one's."""
    assert len(promised_keys()) <= KEYS_MAX, promised_keys()


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """The options that help shows, of all commands together: one name for one option."""
    found: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            listed = {choice.dest for choice in action._choices_actions}  # the worker is not
            found |= set().union(*(options_of(each) for name, each in action.choices.items() if name in listed))
        elif action.help != argparse.SUPPRESS:
            found |= {option for option in action.option_strings if option.startswith("--") and option != "--help"}
    return found


def test_there_are_few_options() -> None:
    found = options_of(make_parser())
    assert len(found) <= OPTIONS_MAX, sorted(found)


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "objectcache.toml"
    file.write_text(text)
    return file


def test_by_default_the_pools_are_those_of_the_settings_themselves(tmp_path: Path) -> None:
    """So `memory_bytes` says what the defaults come to."""
    config = load_config(written(tmp_path, f"[storage]\nmemory_bytes = {MEMORY_BYTES}\n"))
    assert config.storage_settings(tmp_path) == Config().storage_settings(tmp_path) == StorageSettings(tmp_path)
    assert config.gateway_settings() == Config().gateway_settings() == GatewaySettings()
    upstream = load_config(written(tmp_path, '[upstream]\nendpoint = "file:///shared"\n')).upstream_settings()
    assert upstream == UpstreamSettings("file:///shared")


def test_all_pools_together_are_within_memory_bytes(tmp_path: Path) -> None:
    text = '[storage]\nmemory_bytes = "1GiB"\n[upstream]\nendpoint = "file:///shared"\n'
    config = load_config(written(tmp_path, text))
    storage, gateway, upstream = (
        config.storage_settings(tmp_path),
        config.gateway_settings(),
        config.upstream_settings(),
    )
    assert upstream is not None
    pools = [
        storage.staging_bytes, storage.staging_bytes, storage.buffer_bytes, storage.rdma_buffer_bytes,
        storage.resolved_bytes_max, gateway.document_bytes, upstream.landing_bytes,
    ]  # fmt: skip
    assert 3 * GIB // 4 < sum(pools) <= GIB
    assert min(pools) >= 32 * MIB


def test_too_little_memory_is_refused_by_name(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, f"[storage]\nmemory_bytes = {MEMORY_BYTES_MIN - 1}\n"))
    with pytest.raises(ConfigError, match=r"\[storage\]: memory_bytes must be at least 512"):
        config.storage_settings(tmp_path)
    assert load_config(written(tmp_path, "[storage]\nmemory_bytes = '512MiB'\n")).storage_settings(tmp_path)


FORMER = {
    f"{table}.{name}"
    for keys in (config_former.FIXED_KEYS, config_former.MEMORY_KEYS, config_former.INTERNAL_KEYS)
    for table, names in keys.items()
    for name in names
}


def test_no_key_is_both_of_now_and_of_before() -> None:
    """A key that is taken out of a file would never be read."""
    assert not FORMER & set(promised_keys())
    internals = {key.partition(".")[2] for key in keys_of(Config) if key.startswith(f"{NOT_PROMISED}.")}
    assert {f"{table}.{name}" for table, names in config_former.INTERNAL_KEYS.items() for name in names} == internals


def test_a_file_of_a_former_version_loads_and_says_what_is_in_place_of_its_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = """
[gateway]
header_timeout_s = 5
document_bytes = "64MiB"
[storage]
staging_bytes = "64MiB"
packed_bytes_max = 4096
gather_threads = 7
[scheduler]
link_bytes_per_s = 1e9
policy = "equal"
[orchestrator]
first_byte_timeout_s = 20
stream_idle_timeout_s = 30
queue_max = 5
[cluster]
lease_s = 20
[[engines]]
url = "http://10.0.0.1:8000"
token_us = 3.5
[upstream]
endpoint = "file:///shared"
[upstream.remote_dram]
endpoint = "mooncake://10.0.0.1:50051"
namespace = "home"
[calibration]
rounds = 3
[calibration.link.shm]
bytes_per_s = 1e9
"""
    with caplog.at_level(logging.WARNING, "objectcache"):
        config = load_config(written(tmp_path, text))
    told = [record.getMessage().partition("objectcache.toml: ")[2] for record in caplog.records]
    assert sorted(told) == [
        "[calibration] was never used by servers; `objectcache calibrate theta --json` keeps what was measured",
        "[cluster] lease_s is [internals.cluster] lease_s now",
        "[engines] token_us is not set any more, and its default holds",
        "[gateway] document_bytes is [internals.gateway] document_bytes now",
        "[gateway] header_timeout_s is not set any more, and its default holds",
        "[orchestrator] first_byte_timeout_s is [orchestrator] engine_timeout_s now",
        "[orchestrator] queue_max is [internals.orchestrator] queue_max now",
        "[orchestrator] stream_idle_timeout_s is [orchestrator] engine_timeout_s now",
        "[scheduler] policy is [internals.scheduler] policy now",
        "[storage] gather_threads is not set any more, and its default holds",
        "[storage] packed_bytes_max is [internals.storage] packed_bytes_max now",
        "[storage] staging_bytes is a part of [storage] memory_bytes now, and is not set apart",
        "[upstream.remote_dram] namespace is not set any more, and its default holds",
    ]
    storage = config.storage_settings(tmp_path)
    assert (storage.packed_bytes_max, storage.staging_bytes, storage.gather_threads) == (4096, 128 * MIB, 2)
    assert storage.scheduler.pool.policy is not None
    assert storage.scheduler.pool.policy.value == "equal"
    assert config.gateway_settings().document_bytes == 64 * MIB
    assert config.orchestrator.others()["first_byte_timeout_s"] == 30
    assert config.internals.cluster.lease_s == 20


@pytest.mark.parametrize(
    "text",
    [
        "gateway = 1\n",
        "[[gateway]]\nheader_timeout_s = 1\n",
        "internals = 1\n[storage]\npacked_bytes_max = 1\n",
        "[internals]\nstorage = 1\n[storage]\npacked_bytes_max = 1\n",
        "[storage]\npacked_bytes_max = 'x'\n",
        "[orchestrator]\nfirst_byte_timeout_s = 'x'\n",
        "[internals.storage]\nunknown = 1\n",
    ],
)
def test_former_keys_in_files_that_are_none_are_refused_like_others(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_config(written(tmp_path, text))


def test_a_key_of_now_goes_before_the_one_of_before(tmp_path: Path) -> None:
    text = "[storage]\npacked_bytes_max = 4096\n[internals.storage]\npacked_bytes_max = 8192\n"
    text += "[orchestrator]\nengine_timeout_s = 5\nfirst_byte_timeout_s = 20\n"
    config = load_config(written(tmp_path, text))
    assert config.storage_settings(tmp_path).packed_bytes_max == 8192
    assert config.orchestrator.engine_timeout_s == 5


def test_an_engine_of_any_name_is_in_the_file(tmp_path: Path) -> None:
    """A host with an s in its name was refused, and one with a space was not."""
    config = load_config(written(tmp_path, '[[engines]]\nurl = "http://gpus.example:8000"\n'))
    assert [each.url for each in config.engines] == ["http://gpus.example:8000"]
    with pytest.raises(ConfigError, match="url"):
        load_config(written(tmp_path, '[[engines]]\nurl = "http://a b:8000"\n'))
