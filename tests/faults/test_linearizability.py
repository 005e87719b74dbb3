"""Objects that are no chunks, written through several gateways while servers are killed and hang: what clients see is
what one register would have shown them.
"""

from __future__ import annotations

import hashlib
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.clusters import cluster
from tests.support.linearizability import Call, Op, Outcome, is_linearizable
from tests.support.requests import s3_client
from tests.support.servers import LocalStack
from tests.support.waiting import eventually

BUCKET = "registers"
KEYS = [f"documents/{name}" for name in "abcd"]
THREADS = 6
ABSENT = ("404", "NoSuchKey")
REFUSED = ("412", "PreconditionFailed")
DOUBTFUL = ("409", "ConditionalRequestConflict")


def read(value: str | None, began_s: float, ended_s: float) -> Call:
    return Call(Op.READ, value, began_s, ended_s)


@pytest.mark.parametrize(
    ("history", "holds"),
    [
        ([Call(Op.PUT, "x", 0, 3), read("x", 1, 2), read(None, 2.5, 4)], False),
        ([Call(Op.PUT, "x", 0, 3), read(None, 1, 2), read("x", 2.5, 4)], True),
        ([Call(Op.PUT, "x", 0, 1), read(None, 2, 3)], False),
        ([Call(Op.PUT, "x", 0, 1, Outcome.UNKNOWN), read(None, 2, 3), read("x", 4, 5)], True),
        ([Call(Op.PUT, "x", 0, 1, Outcome.UNKNOWN), read("x", 2, 3), read(None, 4, 5)], False),
        ([Call(Op.PUT_IF, "x", 0, 1), Call(Op.PUT_IF, "y", 0, 1)], False),
        ([Call(Op.PUT_IF, "x", 0, 1), Call(Op.PUT_IF, "y", 0, 1, Outcome.REFUSED)], True),
        ([Call(Op.PUT_IF, "x", 0, 1, Outcome.REFUSED), read(None, 2, 3)], False),
        ([Call(Op.PUT_IF, "x", 0, 1, Outcome.REFUSED), read("x", 2, 3)], False),
        ([Call(Op.PUT, "x", 0, 1), Call(Op.PUT_IF, "y", 2, 3, expected="x"), read("y", 4, 5)], True),
        ([Call(Op.PUT, "x", 0, 1), Call(Op.DELETE, None, 2, 3), read("x", 4, 5)], False),
    ],
)
def test_the_checker_tells_histories_apart(history: Sequence[Call], holds: bool) -> None:
    assert is_linearizable(history) is holds


class Writer(threading.Thread):
    """Reads and writes registers at random through gateways that it takes in turn, and notes what it saw."""

    def __init__(self, number: int, clients: Sequence[Any], stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.history: dict[str, list[Call]] = {key: [] for key in KEYS}
        self._number, self._clients, self._stop_now = number, clients, stop
        self._random = random.Random(number)
        self._known: dict[str, str | None] = dict.fromkeys(KEYS)
        self._count = 0

    def run(self) -> None:
        while not self._stop_now.is_set():
            key, s3 = self._random.choice(KEYS), self._random.choice(self._clients)
            op = self._random.choices(list(Op), [5, 2, 5, 1])[0]
            self._count += 1
            value = None if op in (Op.READ, Op.DELETE) else f"{self._number}-{self._count}"
            expected = self._known[key] if op is Op.PUT_IF else None
            began_s = time.monotonic()
            seen, outcome = self._seen(lambda: self._carried_out(s3, op, key, value, expected))  # noqa: B023
            if outcome is None:
                continue
            ended_s = time.monotonic()
            if op is Op.READ:
                value = seen
            self.history[key].append(Call(op, value, began_s, ended_s, outcome, expected))
            if outcome is Outcome.DONE:
                self._known[key] = value

    def _carried_out(self, s3: Any, op: Op, key: str, value: str | None, expected: str | None) -> str | None:
        at = {"Bucket": BUCKET, "Key": key}
        if op is Op.READ:
            return str(s3.get_object(**at)["Body"].read().decode())
        if op is Op.DELETE:
            s3.delete_object(**at)
            return None
        assert value is not None
        conditions: dict[str, str] = {}
        if op is Op.PUT_IF:
            digest = None if expected is None else hashlib.md5(expected.encode(), usedforsecurity=False).hexdigest()
            conditions = {"IfNoneMatch": "*"} if digest is None else {"IfMatch": digest}
        s3.put_object(**at, Body=value.encode(), **conditions)
        return None

    @staticmethod
    def _seen(carry_out: Callable[[], str | None]) -> tuple[str | None, Outcome | None]:
        """The value that a call gave, and its outcome: None for a call that tells nothing of the register."""
        try:
            return carry_out(), Outcome.DONE
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code in ABSENT:  # also the answer to If-Match where there is no object
                return None, Outcome.DONE if error.operation_name == "GetObject" else Outcome.REFUSED
            if code in DOUBTFUL:
                return None, None
            return None, Outcome.REFUSED if code in REFUSED else Outcome.UNKNOWN
        except BotoCoreError:
            return None, Outcome.UNKNOWN


@pytest.mark.slow
def test_registers_behind_three_gateways_are_linearizable_while_servers_go_and_come(tmp_path: Path) -> None:
    with (
        LocalStack(tmp_path / "home") as home,
        cluster(tmp_path / "kv", home.url, gateway_count=3) as kv,
    ):
        s3_client(home.url).create_bucket(Bucket=BUCKET)
        clients = [s3_client(gateway.url, connect_timeout=2, read_timeout=4) for gateway in kv.gateways]
        stop = threading.Event()
        writers = [Writer(number, clients, stop) for number in range(THREADS)]
        for writer in writers:
            writer.start()
        for round_index in range(2):
            time.sleep(1.0)  # calls go on meanwhile, with each state of the servers
            kv.members["a"].kill()
            time.sleep(1.0)  # as above
            kv.members["a"].start()
            victim = kv.members["b"] if round_index == 0 else kv.gateways[1]
            victim.send(signal.SIGSTOP)
            time.sleep(1.0)  # as above
            victim.send(signal.SIGCONT)

        def outcomes() -> list[Outcome]:
            return [call.outcome for writer in writers for key in KEYS for call in writer.history[key]]

        wanted = 100 + outcomes().count(Outcome.DONE)  # as many again with all servers there
        assert eventually(lambda: outcomes().count(Outcome.DONE) > wanted and Outcome.REFUSED in outcomes())
        stop.set()
        for writer in writers:
            writer.join(60)
        histories = {key: [call for writer in writers for call in writer.history[key]] for key in KEYS}
        for key, history in histories.items():
            assert is_linearizable(history), key
