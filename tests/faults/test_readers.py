"""Bodies that take long to parse: the event loop goes on, others are served, and memory stays bounded."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from objectcache.orchestrator.readers import INLINE_BYTES, Readers, ReadingError
from objectcache.orchestrator.rules.openai_requests import RequestKind, WrongRequestError
from objectcache.orchestrator.rules.reading import Order
from objectcache.orchestrator.tokenizer import NoTokensError
from tests.support.waiting import until

ORDER = Order(RequestKind.COMPLETIONS, {}, "tenant")
MIB = 1 << 20


@asynccontextmanager
async def readers(**options: Any) -> AsyncIterator[Readers]:
    made = Readers(**options)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


def reading_processes() -> list[psutil.Process]:
    """Those of this process, which may have other children, too."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            found += [child] if "objectcache.orchestrator.reading_process" in child.cmdline() else []
    return found


def body(prompt: bytes) -> bytes:
    return b'{"model": "m", "prompt": ' + prompt + b"}"


WORST = {
    "empty lists": body(b"[" + b"[]," * (4 * MIB) + b"[]]"),
    "numbers": body(b"[" + b"1," * (6 * MIB) + b"1]"),
    "names": b"{" + b",".join(b'"%d":1' % at for at in range(MIB)) + b', "prompt": "a", "model": "m"}',
    "escapes": body(b'"' + b"\\n" * (6 * MIB) + b'"'),
    "depth": body(b"[" * (8 * MIB)),
}


@pytest.mark.slow
async def test_a_large_prompt_of_token_ids_comes_back_as_an_array() -> None:
    tokens = np.arange(200_000, dtype=np.uint32)
    async with readers() as made:
        raw = json.dumps({"model": "m", "prompt": tokens.tolist(), "max_tokens": 3, "kv_transfer_params": {}}).encode()
        read = await made.read(raw, ORDER)
        assert read.asked.tokens is not None
        assert np.array_equal(read.asked.tokens, tokens)
        assert read.asked.output_tokens == 3
        assert "kv_transfer_params" not in json.loads(read.raw)
        changed = await made.edited("tenant", read.raw, ("max_tokens",), {"stream": False})
        assert json.loads(changed) == {"model": "m", "prompt": tokens.tolist(), "stream": False}
        answer = json.dumps({"tokens": tokens.tolist()}).encode()
        assert np.array_equal(await made.answered_tokens("tenant", answer), tokens)
        with pytest.raises(NoTokensError):
            await made.answered_tokens("tenant", b"[" * (2 * INLINE_BYTES))
        with pytest.raises(WrongRequestError, match="prompt"):
            await made.read(body(b'{"a": "' + b"x" * INLINE_BYTES + b'"}'), ORDER)
        assert made.failure_count == 0


@pytest.fixture
def _own_heap() -> Iterator[None]:
    """A process of tests has what all tests before have left. To collect that takes seconds, and no server has it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("_own_heap")
@pytest.mark.parametrize("name", WORST)
async def test_the_loop_goes_on_while_the_worst_bodies_are_read(name: str) -> None:
    """This process does no more than copy the bytes: its own time on the processor shows that."""
    async with readers() as made:
        await made.read(body(b'"' + b"a" * INLINE_BYTES + b'"'), ORDER)  # a process is there
        before_s, longest_s = time.thread_time(), 0.0
        reading = asyncio.create_task(made.read(WORST[name], ORDER))
        while not reading.done():
            began_s = time.thread_time()
            await asyncio.sleep(0.001)  # the turn of others, whose length is measured
            longest_s = max(longest_s, time.thread_time() - began_s)
        with suppress(WrongRequestError, ReadingError):
            assert (await reading).asked.model == "m"
        assert longest_s < 0.05
        assert time.thread_time() - before_s < 1.0


async def test_a_body_that_takes_too_long_costs_its_sender_an_error_and_others_nothing() -> None:
    async with readers(read_s=0.02, count=2) as made:
        for _ in range(2):
            with pytest.raises(ReadingError, match=r"more than 0\.02 s"):
                await made.read(WORST["names"], ORDER)
        assert made.failure_count == 2
    async with readers(count=2) as made:
        assert (await made.read(body(b'"' + b"a" * INLINE_BYTES + b'"'), ORDER)).asked.model == "m"


async def test_one_tenant_has_at_most_half_of_the_processes() -> None:
    small = body(b'"' + b"a" * INLINE_BYTES + b'"')
    async with readers(count=2) as made:
        async with made.turn("tenant"):  # as while a large body is read
            waiting = asyncio.create_task(made.read(small, ORDER))
            other = await made.read(small, Order(RequestKind.COMPLETIONS, {}, "other"))
            assert other.asked.model == "m"
            assert not waiting.done()
        assert (await waiting).asked.model == "m"


@pytest.mark.parametrize("is_seen", [False, True])
async def test_a_process_that_is_killed_while_it_is_idle_costs_nobody_an_error(is_seen: bool) -> None:
    async with readers(count=1) as made:
        small = body(b'"' + b"a" * INLINE_BYTES + b'"')
        await made.read(small, ORDER)
        (child,) = reading_processes()
        child.kill()
        if is_seen:
            await until(lambda: child.pid not in {each.pid for each in reading_processes()})
        assert (await made.read(small, ORDER)).asked.model == "m"
        assert len(reading_processes()) == 1
    assert not reading_processes()


async def test_a_body_that_ends_two_processes_is_told_so() -> None:
    async with readers(count=1) as made:
        small = body(b'"' + b"a" * INLINE_BYTES + b'"')
        await made.read(small, ORDER)
        reading = asyncio.create_task(made.read(small, ORDER))
        killed: set[int] = set()

        def is_read_or_killed() -> bool:
            for child in reading_processes():
                child.kill()
                killed.add(child.pid)
            return reading.done()

        await until(is_read_or_killed)
        with pytest.raises(ReadingError) as found:
            await reading
        assert len(killed) == 2
        assert found.value.is_busy or "memory" in str(found.value)
        assert (await made.read(small, ORDER)).asked.model == "m"


async def test_files_that_are_no_tokenizer_are_told_at_the_start(tmp_path: Path) -> None:
    made = Readers(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        await made.start()
    await made.stop()


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A tokenizer of two words. Its library panics at many x behind each other."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex("(x+x+)+y"), "z")
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


async def test_a_small_tokenizer_gives_tokens_from_a_process(tokenizer_folder: Path) -> None:
    async with readers(tokenizer=tokenizer_folder) as reading:
        tokens = await reading.tokens("", json.dumps({"prompt": "hello world"}).encode())
        assert tokens.tolist() == [1, 2]
        with pytest.raises(NoTokensError, match="characters"):
            await reading.tokens("", json.dumps({"prompt": "hello " * (2 * MIB)}).encode())
        with pytest.raises(NoTokensError, match="chat template"):
            await reading.tokens("", json.dumps({"messages": []}).encode())


@pytest.mark.parametrize("becomes", ["gone", "half written", "a FIFO"])
async def test_the_files_of_a_tokenizer_count_as_they_were_at_the_start(becomes: str, tokenizer_folder: Path) -> None:
    """Whoever replaced a model had all large bodies refused, also those that need no tokenizer; with a FIFO they waited
    for minutes.
    """
    async with readers(tokenizer=tokenizer_folder, count=1) as made:
        file = tokenizer_folder / "tokenizer.json"
        file.unlink()
        if becomes == "half written":
            file.write_text('{"version":')
        elif becomes == "a FIFO":
            os.mkfifo(file)
        (child,) = reading_processes()
        child.kill()
        assert (await made.read(body(b'"' + b"a" * INLINE_BYTES + b'"'), ORDER)).asked.model == "m"
        assert (await made.tokens("", json.dumps({"prompt": "hello"}).encode())).tolist() == [1]
        assert made.started_count == 2


async def test_a_fifo_is_no_tokenizer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    made = Readers(tmp_path)
    with pytest.raises(ValueError, match="it is no file"):
        await made.start()
    await made.stop()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
async def test_damaged_files_beside_a_tokenizer_are_told_at_the_start(name: str, tokenizer_folder: Path) -> None:
    (tokenizer_folder / name).write_text("[" * 20_000 if name.endswith("json") else "{% for")
    made = Readers(tokenizer_folder)
    with pytest.raises(ValueError, match=r"Recursion|Template"):
        await made.start()
    await made.stop()


async def test_a_panic_of_a_tokenizers_library_ends_no_process(tokenizer_folder: Path) -> None:
    """Each such prompt ended two, which had to be started anew."""
    async with readers(tokenizer=tokenizer_folder) as made:
        with pytest.raises(NoTokensError, match="Panic"):
            await made.tokens("", json.dumps({"prompt": "x" * 100}).encode())
        assert made.started_count == 1
        assert made.failure_count == 0
