"""llama.cpp's server behind `objectcache llama-cpp`: what a new server loads, and that answers are those of a server
without a cache.
"""

from __future__ import annotations

import random
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.beds.processes import free_port
from nixl_client.connectors.llama_cpp.slot_store import RUN_TOKENS
from tests.engines.llama_models import make_adapter, make_llama, make_windowed
from tests.engines.llama_run import LlamaAnswer, ask, asked, llama_server, sidecar
from tests.engines.store import BUCKET, Store, running_store
from tests.support.requests import s3_client
from tests.support.waiting import eventually

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class Models(NamedTuple):
    """Files of models with one name, whose weights differ, and one with windows."""

    llama: Path
    other: Path
    windowed: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    (folder / "other").mkdir()
    made = Models(folder / "tiny.gguf", folder / "other" / "tiny.gguf", folder / "windowed.gguf")
    make_llama(made.llama)
    make_llama(made.other, seed=2)
    make_windowed(made.windowed)
    return made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store for tests that do it no harm: their prompts differ."""
    with running_store(tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    folder = tmp_path / "slots"
    folder.mkdir()
    return folder


def text_of(seed: str, tokens: int) -> str:
    """A text of so many letters, each of which is a token."""
    return "".join(random.Random(seed).choices(ALPHABET, k=tokens))


def is_run(key: str) -> bool:
    return key.startswith("kv/tiny/")


def stored_runs(store: Store) -> int:
    return sum(map(is_run, store.keys()))


def wait_for_runs(store: Store, count: int) -> None:
    assert eventually(lambda: stored_runs(store) >= count, 30)


def right(model: Path, slots: Path, prompt: str, *options: str) -> LlamaAnswer:
    with llama_server(model, slots, *options) as plain:
        return ask(plain, prompt)


@pytest.mark.parametrize("options", [(), ("flash_attention=DISABLED",), ("kv_unified=1",)], ids=str)
def test_a_new_server_loads_what_another_has_computed(
    shared: Store, models: Models, slots: Path, options: tuple[str, ...]
) -> None:
    """Values are transposed without flash attention, and all slots lie in one stream where they are unified. A prompt
    that goes on otherwise loads what it shares; the server computes the rest, one token at least.
    """
    prompt = text_of(f"shared {options}", 6 * RUN_TOKENS)
    with llama_server(models.llama, slots, *options) as engine, sidecar(engine, slots, shared.endpoint) as (url, _):
        before = stored_runs(shared)
        first = ask(url, prompt)
        assert first.loaded_tokens == 0
        wait_for_runs(shared, before + 6)
        again = ask(url, prompt)
        assert (again.loaded_tokens, again.text) == (0, first.text)
        assert again.cached_tokens >= 6 * RUN_TOKENS - 1
    assert list(slots.iterdir()) == []
    turned = prompt[: 3 * RUN_TOKENS] + text_of("turned", 200)
    with llama_server(models.llama, slots, *options) as engine, sidecar(engine, slots, shared.endpoint) as (url, _):
        loaded = ask(url, prompt)
        assert (loaded.loaded_tokens, loaded.cached_tokens, loaded.text) == (6 * RUN_TOKENS, 6 * RUN_TOKENS, first.text)
        other = ask(url, turned)
        assert other.loaded_tokens in (0, 3 * RUN_TOKENS)  # 0 where it goes on in the slot that has the first prompt
        assert other.cached_tokens >= 3 * RUN_TOKENS
    plain = right(models.llama, slots, prompt, *options)
    assert (plain.text, plain.loaded_tokens) == (first.text, None)
    assert right(models.llama, slots, turned, *options).text == other.text


def test_chats_stream_and_load_what_an_earlier_turn_has_stored(shared: Store, models: Models, slots: Path) -> None:
    messages = [{"role": "user", "content": text_of("chat", 3 * RUN_TOKENS)}]
    before = stored_runs(shared)
    with llama_server(models.llama, slots) as engine, sidecar(engine, slots, shared.endpoint) as (url, _):
        with asked(url, "/v1/chat/completions", {"messages": messages, "max_tokens": 8, "stream": True}) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            assert answer.read().decode().rstrip().endswith("data: [DONE]")
        wait_for_runs(shared, before + 3)
    turns = [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    with llama_server(models.llama, slots) as engine, sidecar(engine, slots, shared.endpoint) as (url, _):
        assert ask(url, turns, "/v1/chat/completions").loaded_tokens == 3 * RUN_TOKENS
        with asked(url, "/tokenize", {"content": "abc"}) as answer:  # all else goes through
            assert len(answer.read()) > 10


def test_other_weights_under_the_same_name_load_nothing(shared: Store, models: Models, slots: Path) -> None:
    prompt = text_of("weights", 2 * RUN_TOKENS + 1)
    before = stored_runs(shared)
    with llama_server(models.llama, slots) as engine, sidecar(engine, slots, shared.endpoint) as (url, _):
        ask(url, prompt)
        wait_for_runs(shared, before + 2)
    with llama_server(models.other, slots) as engine, sidecar(engine, slots, shared.endpoint) as (url, _):
        answer = ask(url, prompt)
    assert answer.loaded_tokens == 0
    assert answer.text == right(models.other, slots, prompt).text


def test_kv_is_named_by_the_scales_of_adapters_it_was_computed_with(
    shared: Store, models: Models, slots: Path, tmp_path: Path
) -> None:
    """llama.cpp goes on with KV of other scales, in slots and in its own cache: once they change, nothing is cached."""
    adapter = tmp_path / "adapter.gguf"
    make_adapter(adapter)
    prompt, other = (text_of(f"scales {index}", 2 * RUN_TOKENS + 1) for index in range(2))
    before = stored_runs(shared)
    with (
        llama_server(models.llama, slots, f"lora={adapter}") as engine,
        sidecar(engine, slots, shared.endpoint) as (url, log),
    ):
        with_adapter = ask(url, prompt)
        wait_for_runs(shared, before + 2)
        endless = {"prompt": other, "n_predict": 3000, "stream": True, "ignore_eos": True}
        with asked(url, "/completion", endless) as answer:
            assert answer.read(10)
            for scale in (0.0, 1.0):
                asked(url, "/lora-adapters", [{"id": 0, "scale": scale}]).close()
        assert eventually(lambda: "adapters have changed" in log.read_text(), 30)
        assert ask(url, prompt).loaded_tokens is None
        assert "until llama-server starts anew" in log.read_text()
    assert stored_runs(shared) == before + 2
    assert right(models.llama, slots, prompt).text != with_adapter.text
    with (
        llama_server(models.llama, slots, f"lora={adapter}") as engine,
        sidecar(engine, slots, shared.endpoint) as (url, _),
    ):
        again = ask(url, prompt)
        assert (again.loaded_tokens, again.text) == (2 * RUN_TOKENS, with_adapter.text)


def test_a_relative_path_of_a_model_is_said_to_run_uncached(
    shared: Store, models: Models, slots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models.llama.parent)
    with (
        llama_server(Path(models.llama.name), slots) as engine,
        sidecar(engine, slots, shared.endpoint) as (url, log),
    ):
        assert ask(url, text_of("relative", 2 * RUN_TOKENS)).loaded_tokens is None
        assert "start it with absolute paths" in log.read_text()


def test_a_server_that_was_started_anew_behind_the_command_is_noticed(
    shared: Store, models: Models, slots: Path
) -> None:
    """Its slots are empty: their KV comes from the store, though the command takes them to hold the prompt."""
    prompt = text_of("restart", 2 * RUN_TOKENS + 1)
    before, port = stored_runs(shared), free_port()
    with sidecar(f"http://127.0.0.1:{port}", slots, shared.endpoint) as (url, _):
        with llama_server(models.llama, slots, f"port={port}"):
            first = ask(url, prompt)
            wait_for_runs(shared, before + 2)
        with pytest.raises(urllib.error.HTTPError, match="502"):
            ask(url, prompt)
        with llama_server(models.llama, slots, f"port={port}"):
            again = ask(url, prompt)
    assert (first.loaded_tokens, again.loaded_tokens) == (0, 2 * RUN_TOKENS)
    assert again.text == first.text


def test_a_run_that_has_left_ends_what_is_loaded(shared: Store, models: Models, slots: Path) -> None:
    prompt = text_of("left", 4 * RUN_TOKENS + 1)
    before = shared.keys()
    with llama_server(models.llama, slots) as engine, sidecar(engine, slots, shared.endpoint) as (url, _):
        first = ask(url, prompt)
        wait_for_runs(shared, sum(map(is_run, before)) + 4)
    s3 = s3_client(shared.endpoint)
    added = [
        entry
        for entry in s3.list_objects_v2(Bucket=BUCKET, Prefix="kv/tiny/")["Contents"]
        if entry["Key"] not in before
    ]
    assert len(added) == 4
    s3.delete_object(Bucket=BUCKET, Key=max(added, key=lambda entry: entry["LastModified"])["Key"])
    with llama_server(models.llama, slots) as engine, sidecar(engine, slots, shared.endpoint) as (url, _):
        answer = ask(url, prompt)
    assert answer.loaded_tokens in range(0, 4 * RUN_TOKENS, RUN_TOKENS)
    if answer.loaded_tokens:
        assert answer.cached_tokens == answer.loaded_tokens
    else:  # it was the first one that has left; the engine knows the beginning of what it was tried with at the start
        assert answer.cached_tokens < RUN_TOKENS
    assert answer.text == first.text


def test_models_with_windows_run_without_a_cache_and_that_is_said_once(
    shared: Store, models: Models, slots: Path
) -> None:
    """A slot of theirs keeps the last tokens of most layers only, so that no prefix can be cut from it."""
    prompt = text_of("windows", 5 * RUN_TOKENS)
    with llama_server(models.windowed, slots) as engine, sidecar(engine, slots, shared.endpoint) as (url, log):
        texts = {ask(url, prompt).text for _ in range(3)}
        said = log.read_text()
    assert len(texts) == 1
    assert said.count("windowed.gguf runs without a cache") == 1
    assert not any("windowed" in key for key in shared.keys())  # noqa: SIM118


def test_a_store_that_is_not_there_costs_no_answer(models: Models, slots: Path, tmp_path: Path) -> None:
    with running_store(tmp_path / "store") as store:
        endpoint = store.endpoint
    prompt = text_of("alone", 3 * RUN_TOKENS)
    with llama_server(models.llama, slots) as engine, sidecar(engine, slots, endpoint) as (url, log):
        answer = ask(url, prompt)
        assert answer.loaded_tokens == 0
        assert answer.text == ask(engine, prompt, cache_prompt=False).text
        assert "IS NOT USED" in log.read_text()
    assert list(slots.iterdir()) == []


def test_a_store_that_hangs_is_asked_no_more_for_a_while(models: Models, slots: Path, tmp_path: Path) -> None:
    prompts = [text_of(f"hangs {index}", 3 * RUN_TOKENS) for index in range(3)]
    with (
        running_store(tmp_path / "store") as store,
        llama_server(models.llama, slots) as engine,
        sidecar(engine, slots, store.endpoint) as (url, log),
    ):
        store.stop()
        texts = [ask(url, prompt).text for prompt in prompts]
        store.go_on()
        assert texts == [ask(engine, prompt, cache_prompt=False).text for prompt in prompts]
        assert log.read_text().count("WARNING nixl_client.connectors.llama_cpp.slot_cache: load:") == 1
    assert list(slots.iterdir()) == []


def test_more_requests_than_slots_wait_and_one_that_leaves_frees_its_slot(
    shared: Store, models: Models, slots: Path
) -> None:
    prompts = [text_of(f"many {index}", 2 * RUN_TOKENS) for index in range(8)]
    with llama_server(models.llama, slots) as engine, sidecar(engine, slots, shared.endpoint) as (url, _):
        endless = {"prompt": prompts[0], "n_predict": 3000, "stream": True, "ignore_eos": True}
        for _ in range(2):
            with asked(url, "/completion", endless) as answer:
                assert answer.read(10)
        with ThreadPoolExecutor(8) as threads:
            texts = [each.text for each in threads.map(lambda prompt: ask(url, prompt), prompts)]
        assert texts == [ask(engine, prompt, cache_prompt=False).text for prompt in prompts]
