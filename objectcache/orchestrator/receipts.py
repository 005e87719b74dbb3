"""Receipts: for each of the last requests, where it went, why, and what came of it."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from descriptors.descriptor import is_request_id
from objectcache.orchestrator.rules.policies import Decision
from objectcache.orchestrator.rules.prediction import Prediction

PREDICTIONS_MAX = 8
"""A receipt keeps no more predictions: the chosen engine's, and the next best ones."""
TEXT_MAX = 512
ATTEMPTS_KEPT = 16


@dataclass(slots=True)
class Receipt:
    """A request's life. Times are Unix seconds, durations seconds. `attempts` are the engines that it was sent to and
    what each gave: an HTTP status, or an error.
    """

    request_id: str
    tenant: str
    path: str
    at: float
    prompt_tokens: int | None = None
    waited_s: float = 0.0
    tokenize_s: float = 0.0
    lookup_s: float = 0.0
    decide_s: float = 0.0
    engine: str | None = None
    reason: str = ""
    predictions: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    ttft_s: float | None = None
    total_s: float | None = None
    status: int | None = None
    note: str = ""

    def routed(self, decision: Decision) -> None:
        """Note a decision; of a request that is sent again, the last one stays."""
        self.engine, self.reason = decision.engine, decision.reason
        self.predictions = [described(each) for each in decision.predictions[:PREDICTIONS_MAX]]

    def to_json(self) -> dict[str, Any]:
        """For people and programs."""
        return asdict(self)


def described(prediction: Prediction) -> dict[str, Any]:
    """A prediction with its sum."""
    fields = asdict(prediction)
    return {**fields, "choice": prediction.choice.value, "ttft_s": prediction.ttft_s}


class Receipts:
    """The last requests by id. `receipts_max` of them are kept."""

    def __init__(self, receipts_max: int) -> None:
        self._receipts_max = receipts_max
        self._by_id: OrderedDict[str, Receipt] = OrderedDict()
        self._open: set[str] = set()
        """The ids of requests that are being answered."""

    def open(self, said_id: str, tenant: str, path: str, at: float) -> Receipt:
        """The receipt of a request that has come. It has the id that the client said, unless that is none, a request of
        that id is being answered, or another tenant's receipt has it.
        """
        kept = self._by_id.get(said_id)
        is_taken = said_id in self._open or (kept is not None and kept.tenant != tenant)
        request_id = said_id if is_request_id(said_id) and not is_taken else uuid.uuid4().hex
        self._open.add(request_id)
        return Receipt(request_id, tenant, path, at)

    def close(self, receipt: Receipt) -> None:
        """The request is over: keep its receipt."""
        self._open.discard(receipt.request_id)
        self.add(receipt)

    def add(self, receipt: Receipt) -> None:
        """Keep one, without the rest of its long texts, which clients and engines may have given; the oldest goes."""
        receipt.note = receipt.note[:TEXT_MAX]
        receipt.attempts = [
            {name: value[:TEXT_MAX] if isinstance(value, str) else value for name, value in attempt.items()}
            for attempt in receipt.attempts[:ATTEMPTS_KEPT]
        ]
        self._by_id[receipt.request_id] = receipt
        self._by_id.move_to_end(receipt.request_id)
        while len(self._by_id) > self._receipts_max:
            self._by_id.popitem(last=False)

    def last(self, count: int) -> list[Receipt]:
        """The last so many, the latest first."""
        return list(islice(reversed(self._by_id.values()), count))

    def find(self, request_id: str) -> Receipt | None:
        """The receipt of a request; None where it is not kept."""
        return self._by_id.get(request_id)
