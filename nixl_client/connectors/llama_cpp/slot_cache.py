"""The KV that a request's slot begins with, and the KV that is kept of it: llama.cpp's server and a bucket together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import numpy as np

from descriptors.errors import ObjectCacheError
from descriptors.prefix_keys import Namespace, chunk_keys
from nixl_client.client import Client
from nixl_client.connectors.llama_cpp.llama_server import LlamaFacts, LlamaServer, LlamaServerError
from nixl_client.connectors.llama_cpp.model_files import ModelFiles
from nixl_client.connectors.llama_cpp.rules.prompts import AskedPrompt
from nixl_client.connectors.llama_cpp.rules.slot_file import (
    OtherSlotError,
    ParsedSlot,
    SlotFileError,
    SlotForm,
    Tokens,
    parse,
)
from nixl_client.connectors.llama_cpp.rules.slot_ledger import NO_TOKENS, ChosenSlot, SlotLedger
from nixl_client.connectors.llama_cpp.slot_folder import SlotFile, SlotFolder
from nixl_client.connectors.llama_cpp.slot_store import LOADS_MAX, RUN_TOKENS, SlotStore
from nixl_client.transports.http import UnansweredError
from objectcache.adapters.breaker import Breaker
from objectcache.adapters.caller import CALLER
from objectcache.adapters.loop_share import LoopShare

STAGING_BYTES = 64 << 20
LOOKUPS_MAX = 4
SAVES_MAX = 4
"""So many files of slots wait to be stored, at most; further ones are not written."""
FREED_S = 10.0
"""Clients that read slowly hold slots: a request that sees none freed for so long leaves the choice to the server."""
LLAMA_CPP_LAYOUT = "llama.cpp"
FAILURES = (ObjectCacheError, LlamaServerError, SlotFileError, aiohttp.ClientError, OSError, TimeoutError, ValueError)
LOOK_S = 3.0
"""Requests wait so long for the look at a server that is new. While it goes on they run without a cache."""
CLOSE_S = 25.0
GOES_ON = "a request goes on without a cache"
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class UncachedServerError(LlamaServerError):
    """The server's model is not cached, as was said when that was seen."""


@dataclass(slots=True)
class KnownServer:
    """A server whose slots' form is known; `namespace` is of the names of its KV. `adapter_changes`
    were counted when it was asked for its adapters.
    """

    facts: LlamaFacts
    form: SlotForm
    namespace: Namespace
    ledger: SlotLedger
    adapter_changes: int


@dataclass(slots=True)
class SlotTurn:
    """One request's use of a slot. `keys` name the runs of its prompt, of which `stored` are stored."""

    server: KnownServer
    slot: ChosenSlot
    tokens: Tokens
    keys: list[str]
    stored: int
    loaded_tokens: int = 0
    is_computed: bool = False

    @property
    def index(self) -> int:
        """The slot's number."""
        return self.slot.index


class SlotCache:
    """`folder` is the server's `--slot-save-path`. No method raises for what server or store do, but `begin`: then the
    request goes on without a cache.
    """

    def __init__(self, server: LlamaServer, client: Client, folder: Path, share: LoopShare | None = None) -> None:
        self._share = share or LoopShare()
        self._server = server
        self._store = SlotStore(client, STAGING_BYTES)
        self._folder = SlotFolder(folder)
        self._lookers = ThreadPoolExecutor(LOOKUPS_MAX, "objectcache-slot-lookup")
        self._loaders = ThreadPoolExecutor(LOADS_MAX, "objectcache-slot-load")
        self._saving = ThreadPoolExecutor(1, "objectcache-slot-save")
        self._known: KnownServer | None = None
        self._learned_first: KnownServer | None = None
        self._adapter_changes = 0
        self._uncached: LlamaFacts | None = None
        """A server whose slots cannot be cut by tokens: it answers without a cache, and is looked at anew rarely."""
        self._uncached_breaker = Breaker(1, 60.0, 3600.0)
        self._look: asyncio.Future[KnownServer] | None = None
        self._look_began_s = 0.0
        self._freed = asyncio.Event()
        self._saves: set[asyncio.Task[None]] = set()
        self._files = ModelFiles()
        self._breaker = Breaker(1, 5.0, 60.0)
        """A store that does not answer is left alone for a while, and so is a server that cannot be learned."""
        self._learning_breaker = Breaker(1, 1.0, 60.0)
        self._told: set[str] = set()
        self._folder.clean()

    async def close(self) -> None:
        """Return when what waits to be stored is, within CLOSE_S: a server may write a slot's file for as long as it
        likes.
        """
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)
        if self._saves:
            _, late = await asyncio.wait(self._saves, timeout=CLOSE_S)
            for saving in late:
                saving.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for pool in (self._lookers, self._loaders, self._saving):
            pool.shutdown()
        await asyncio.to_thread(self._store.close)

    def forget(self) -> None:
        """A request went to a slot of the server's choice: nobody knows which slot holds what."""
        if self._known is not None:
            self._known.ledger.forget()

    def adapters_change(self) -> None:
        """A request that may run with other scales of adapters, or change them, begins or ends: what runs meanwhile is
        not stored.
        """
        if self._known is None or self._known.facts.adapters:
            self._adapter_changes += 1

    async def begin(self, asked: AskedPrompt, body: bytes, headers: Mapping[str, str]) -> SlotTurn:
        """Take a slot, and have it hold as much of the prompt as is stored. `end` must follow. Raises FAILURES."""
        server = await self._learned(headers)
        tokens = await self._server.tokens(asked, body, headers)
        fitting = tokens[: min(len(tokens), server.facts.slot_tokens) - 1]  # at least one token is computed
        async with self._share.turn(CALLER.get()):
            keys = chunk_keys(server.namespace, fitting, RUN_TOKENS)
        slot = await self._free_slot(server.ledger, tokens)
        turn = SlotTurn(server, slot, tokens, keys, stored=0)
        loading = asyncio.ensure_future(self._load(turn, headers))
        try:
            await asyncio.shield(loading)
        except BaseException:  # cancelled: the slot is free when the server reads its file no more
            loading.add_done_callback(lambda _: self._ended(turn, NO_TOKENS))
            raise
        return turn

    async def _free_slot(self, ledger: SlotLedger, tokens: Tokens) -> ChosenSlot:
        """A slot, as soon as one is free. Raises LlamaServerError where none is freed for FREED_S."""
        while (slot := ledger.choose(tokens)) is None:
            self._freed.clear()
            try:
                async with asyncio.timeout(FREED_S):
                    await self._freed.wait()
            except TimeoutError:
                raise LlamaServerError(f"no slot was freed for {FREED_S:.0f} s") from None
        return slot

    def end(self, turn: SlotTurn, headers: Mapping[str, str]) -> None:
        """The request is over. Where its prompt was computed, that is kept, before the slot has other use."""
        if (
            turn.is_computed
            and len(turn.keys) > turn.stored
            and len(self._saves) < SAVES_MAX
            and not self._is_resting()
        ):
            saving = asyncio.ensure_future(self._save(turn, headers))
            self._saves.add(saving)
            saving.add_done_callback(self._saves.discard)
        else:
            self._ended(turn, turn.tokens)

    def _ended(self, turn: SlotTurn, holds: Tokens) -> None:
        turn.server.ledger.release(turn.index, holds)
        self._freed.set()

    async def _load(self, turn: SlotTurn, headers: Mapping[str, str]) -> None:
        """Restore the slot from the store where that has more of the prompt than the slot. A failure is a miss."""
        name = self._folder.new_name()
        began_s = time.monotonic()
        try:
            if self._is_resting():
                return
            turn.stored = await self._in_thread(lambda: self._store.matched(turn.keys))
            self._breaker.succeeded()
            if turn.stored * RUN_TOKENS <= turn.slot.held_tokens:
                return
            keys, tokens = turn.keys[: turn.stored], turn.tokens[: turn.stored * RUN_TOKENS]

            def load() -> int:
                if self._is_resting():  # the loads ahead of this one have failed
                    return 0
                return self._store.load(keys, turn.server.form, tokens, self._folder, name)

            turn.stored = came = await asyncio.get_running_loop().run_in_executor(self._loaders, load)
            if came * RUN_TOKENS > turn.slot.held_tokens:
                await self._restore(turn, name, headers)
                turn.loaded_tokens = came * RUN_TOKENS
                took_s = time.monotonic() - began_s
                _log.info("slot %d: %d tokens loaded in %.3f s", turn.index, turn.loaded_tokens, took_s)
        except FAILURES as error:
            self.failed("load", error)
        finally:
            self._folder.remove(name)

    async def _restore(self, turn: SlotTurn, name: str, headers: Mapping[str, str]) -> None:
        try:
            await self._server.restore_slot(turn.index, name, headers)
        except LlamaServerError:
            if await self._server.facts(headers) != turn.server.facts:  # it has been started anew
                self._known = None
            raise

    async def _save(self, turn: SlotTurn, headers: Mapping[str, str]) -> None:
        file = self._folder.new_name()
        try:
            try:
                nbytes = await self._server.save_slot(turn.index, file, headers)
            finally:
                self._ended(turn, turn.tokens)
            facts = await self._server.facts(headers)
            if not self._is_known(turn.server, facts):
                if facts.start == turn.server.facts.start:
                    self.adapters_change()
                _log.info("slot %d is not stored: the server or its adapters have changed", turn.index)
                return
            stored = await asyncio.get_running_loop().run_in_executor(self._saving, self._put, turn, file, nbytes)
            self._uncached_breaker.succeeded()
            _log.info("slot %d: %d tokens stored", turn.index, stored * RUN_TOKENS)
        except OtherSlotError as error:  # another request was in the slot meanwhile
            _log.info("slot %d: %s", turn.index, error)
        except SlotFileError as error:
            self._cannot_cache(turn.server.facts, error)
        except FAILURES as error:
            self.failed("save", error)
        finally:
            self._folder.remove(file)

    def _cannot_cache(self, facts: LlamaFacts, error: SlotFileError) -> None:
        self._known, self._uncached = None, facts
        self._uncached_breaker.failed(time.monotonic())
        self._say(f"{Path(facts.model_path).name} runs without a cache: {error}")

    def _form_of(self, name: str, nbytes: int) -> SlotForm:
        with self._written(name, nbytes) as file:
            return parse(file).form

    def _put(self, turn: SlotTurn, name: str, nbytes: int) -> int:
        with self._written(name, nbytes) as file:
            return self._put_runs(turn, parse(file), file)

    def _put_runs(self, turn: SlotTurn, slot: ParsedSlot, file: SlotFile) -> int:
        if slot.form.digest != turn.server.form.digest:
            self._known = None
            raise LlamaServerError("the server has been started with caches of another type")
        if not np.array_equal(slot.tokens[: len(turn.tokens)], turn.tokens):
            _log.info(
                "slot %d holds another prompt now: %d of %d tokens", turn.index, len(slot.tokens), len(turn.tokens)
            )
            return 0  # another request was in the slot meanwhile, or the server has shifted the context
        return self._store.save(turn.keys, slot, file, turn.server.namespace.metadata(RUN_TOKENS))

    @contextmanager
    def _written(self, name: str, nbytes: int) -> Iterator[SlotFile]:
        """A file that the server says has so many bytes. Raises LlamaServerError, OSError."""
        with self._folder.read(name) as file:
            if not 0 < len(file) == nbytes:
                raise LlamaServerError(
                    f"llama-server wrote {len(file)} of a slot's {nbytes} bytes: is {self._folder} full?"
                )
            yield file

    async def _learned(self, headers: Mapping[str, str]) -> KnownServer:
        """The server as it is now, looked at anew where it is another one. Raises FAILURES; UncachedServerError
        where that takes long."""
        changes = self._adapter_changes
        facts = await self._server.facts(headers)
        if self._known is not None and self._is_known(self._known, facts):
            return self._known
        self._refuse_changed_adapters(facts)
        now_s = time.monotonic()
        if self._look is None or self._look.done():
            is_uncached = facts == self._uncached and self._uncached_breaker.is_open(now_s)
            if is_uncached or self._learning_breaker.is_open(now_s):
                raise UncachedServerError
            self._look, self._look_began_s = asyncio.ensure_future(self._looked(facts, changes, headers)), now_s
            self._look.add_done_callback(self._look_is_over)
        if not (await asyncio.wait((self._look,), timeout=max(0.0, self._look_began_s + LOOK_S - now_s)))[0]:
            raise UncachedServerError
        known = self._look.result()
        if not self._is_known(known, facts):
            raise UncachedServerError
        return known

    async def _looked(self, facts: LlamaFacts, changes: int, headers: Mapping[str, str]) -> KnownServer:
        """Look at the server. It waits for slot 0, which a client may have for as long as it likes."""
        self._known = None
        try:
            known = await self._learn(facts, changes, headers)
        except FAILURES:
            self._learning_breaker.failed(time.monotonic())
            raise
        self._learning_breaker.succeeded()
        self._known = self._learned_first = known
        return known

    def _look_is_over(self, look: asyncio.Future[KnownServer]) -> None:
        if not look.cancelled() and isinstance(error := look.exception(), Exception):
            self.failed(GOES_ON, error)  # no request may wait for it any more

    def _refuse_changed_adapters(self, facts: LlamaFacts) -> None:
        """The server goes on with KV of other scales, from its slots and its own cache in memory, so that nobody can
        tell which KV is whose until it is started anew.
        """
        first = self._learned_first
        if first is None or not facts.adapters or first.facts.start != facts.start or self._is_known(first, facts):
            return
        self._known = None
        self._adapter_changes += 1  # if they change back, too
        raise LlamaServerError("scales of adapters have changed: no prompt is cached until llama-server starts anew")

    def _is_known(self, server: KnownServer, facts: LlamaFacts) -> bool:
        return server.facts == facts and server.adapter_changes == self._adapter_changes

    async def _learn(self, facts: LlamaFacts, adapter_changes: int, headers: Mapping[str, str]) -> KnownServer:
        weights = await self._in_thread(lambda: self._files.model(facts))
        lora = await self._in_thread(lambda: self._files.adapters(facts))
        file = self._folder.new_name()
        try:
            await self._server.probe(headers)
            nbytes = await self._server.save_slot(0, file, headers)
            form = await self._in_thread(lambda: self._form_of(file, nbytes))
        except OtherSlotError as error:
            raise LlamaServerError(f"slot 0 is in other use: {error}") from None
        except SlotFileError as error:
            self._cannot_cache(facts, error)
            raise UncachedServerError from None
        except FileNotFoundError:
            raise LlamaServerError(
                f"llama-server wrote no file into {self._folder}: is it its --slot-save-path?"
            ) from None
        finally:
            self._folder.remove(file)
        name = Path(facts.model_path).stem
        namespace = Namespace(weights, form.digest, RUN_TOKENS, LLAMA_CPP_LAYOUT, lora=lora, name=name)
        _log.info("%s: %d slots, %d bytes of KV for each token", name, facts.slot_count, form.token_bytes)
        return KnownServer(facts, form, namespace, SlotLedger(facts.slot_count), adapter_changes)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._lookers, work)

    def _is_resting(self) -> bool:
        return self._breaker.is_open(time.monotonic())

    def failed(self, what: str, error: Exception) -> None:
        """Say once that something failed, and leave a store that does not answer alone for a while."""
        if isinstance(error, UnansweredError | TimeoutError) and not isinstance(error, aiohttp.ClientError):
            self._breaker.failed(time.monotonic())
        if isinstance(error, UncachedServerError):
            return
        self._say(f"{what}: {error}")

    def _say(self, text: str) -> None:
        if text not in self._told and len(self._told) < 64:
            self._told.add(text)
            _log.warning("%s", text)
