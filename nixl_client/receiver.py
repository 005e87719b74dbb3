"""The thread that owns the client's NIXL agent: registers memory, and hands arriving notices to the fetches waiting.

While fetches are under way it polls for notices with a short sleep; otherwise it sleeps on its queue.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from adapters.nixl_agent import Agent, Memory, NixlFailure, Registration
from descriptors.notices import GREETING, Notice, NoticeError, decode_notice

POLL_INTERVAL_S = 100e-6
BUSY_POLL_S = 50e-6
"""A poll that takes this long has moved bytes itself, as over TCP: there are likely to be more."""
GREETING_S = 1.0
_GREETING_ID = ""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Receiver:
    """`devices` are those UCX uses, None for all. Start-up raises ImportError or NixlFailure where UCX cannot run."""

    def __init__(self, devices: str | None = None) -> None:
        self._devices = devices
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, Callable[[Notice], None]] = {}
        self._greeted = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="objectcache-receiver", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # NIXL aborts a process that ends with an agent in a running thread
        try:
            self._call(self._start)
        except BaseException:
            self._commands.put(self._stop)
            raise

    def register(self, memory: Memory) -> Registration:
        """Register memory for the server to write into."""
        return self._call(lambda: self._agent.register(memory))

    def deregister(self, registration: Registration) -> None:
        """Undo `register`."""
        self._call(registration.close)

    def metadata(self) -> bytes:
        """The agent's metadata as it is now."""
        return self._call(self._agent.metadata)

    def greeted_by(self, register: Callable[[], _T]) -> _T:
        """Run `register`, polling meanwhile, and give the server's greeting `GREETING_S` to arrive: the connection is
        then open before the first fetch needs it.
        """
        self._greeted.clear()
        self._call(lambda: self._listeners.__setitem__(_GREETING_ID, lambda _: None))
        try:
            registered = register()
            self._greeted.wait(GREETING_S)
            return registered
        finally:
            self.forget(_GREETING_ID)

    def listen(self, request_id: str, on_notice: Callable[[Notice], None]) -> None:
        """From now on hand notices of this request to `on_notice`, in this object's thread."""
        self._listeners[request_id] = on_notice
        self._commands.put(_nothing)  # the thread may be asleep

    def forget(self, request_id: str) -> None:
        """Drop notices of this request from now on."""
        self._listeners.pop(request_id, None)

    def stop(self) -> None:
        """End the thread; registered memory is let go with the agent."""
        self._commands.put(self._stop)
        self._thread.join(timeout=10)
        atexit.unregister(self.stop)

    def _start(self) -> None:
        self._agent = Agent(str(uuid.uuid4()), self._devices)

    def _stop(self) -> None:
        self._stopping = True

    def _call(self, action: Callable[[], _T]) -> _T:
        future: Future[_T] = Future()
        self._commands.put(lambda: _settle(future, action))
        return future.result()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._commands.get(block=not self._listeners)()
            except queue.Empty:
                began_s = time.monotonic()
                self._take_notices()
                if time.monotonic() - began_s < BUSY_POLL_S:
                    time.sleep(POLL_INTERVAL_S)
        if hasattr(self, "_agent"):
            del self._agent

    def _take_notices(self) -> None:
        try:
            arrived = self._agent.notices()
        except NixlFailure as failure:
            _log.warning("reading notices failed: %s", failure)
            return
        for message in arrived:
            if message == GREETING:
                self._greeted.set()
                continue
            try:
                notice = decode_notice(message)
            except NoticeError:
                continue
            listener = self._listeners.get(notice.request_id)
            if listener is not None:
                _guard(listener, notice)


def _nothing() -> None:
    pass


def _guard(listener: Callable[[Notice], None], notice: Notice) -> None:
    """A listener that fails must not take the thread, and every other fetch, with it."""
    try:
        listener(notice)
    except Exception:
        _log.exception("entering %r failed", notice)


def _settle(future: Future[Any], action: Callable[[], Any]) -> None:
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
