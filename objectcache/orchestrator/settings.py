"""Settings of an orchestrator, checked where they are read (objectcache.orchestrator)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from objectcache.orchestrator.rules.admission import AdmissionSettings, Tenant
from objectcache.orchestrator.rules.policies import PolicyName

MIB = 1 << 20
TEXT_MAX = 512
REQUESTS_MAX_MAX = 65_536


class Role(Enum):
    """The role of an engine. A prefill engine only computes long prompts, whose KV others have from the store."""

    BOTH = "both"
    PREFILL = "prefill"


BIND = "bind:"
RANK_MARK = "#"
"""It stands between an engine's name and the number of a data-parallel rank, and in no name."""
SECRET_TOPIC_CHARACTERS_MIN = 16


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine. `events` and `replay` are ZMQ endpoints; None: those that `GET /kv_event_sources` names, if any.
    An endpoint that begins with `bind:` is bound here, for an engine that connects to it; anybody else may, too, so
    `topic` is then a secret that only the engine knows. `requests_max` is how many requests the engine runs at the same
    time; None: REQUESTS_MAX_DEFAULT, within its KV blocks. Everybody sees the URL, as the engine's name, so it has no
    password. Raises ValueError.
    """

    url: str
    name: str = ""
    role: Role = Role.BOTH
    events: str | None = None
    replay: str | None = None
    topic: str = ""
    requests_max: int | None = None
    token_us: float | None = None

    def __post_init__(self) -> None:
        if not _is_plain_address(self.url):
            raise ValueError("url must be http://HOST:PORT, and nothing else")
        if RANK_MARK in self.name + self.url:
            raise ValueError("name and url: # is for the ranks of an engine")
        if self.events is not None and self.events.startswith(BIND) and len(self.topic) < SECRET_TOPIC_CHARACTERS_MIN:
            problem = (
                f"events: {BIND} lets anybody send events who reaches the port; it needs a topic of at least"
                f" {SECRET_TOPIC_CHARACTERS_MIN} characters that only the engine knows"
            )
            raise ValueError(problem)

    @property
    def label(self) -> str:
        """Its name, which is its URL where it has none."""
        return self.name or self.url


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The store that is asked for prefixes. `endpoint` is where the orchestrator reaches it; None: where the engines
    say. Lookups that take longer than `timeout_s` count as nothing stored.
    """

    endpoint: str | None = None
    access_key: str = ""
    secret_key: str = ""
    region: str = "us-east-1"
    timeout_s: float = 0.25
    lease_s: float = 30.0


@dataclass(frozen=True, slots=True)
class OrchestratorSettings:
    """Everything that is set. `tenants` are by the API key that a client sends; with none, every key is accepted as one
    tenant. Everything under `/_orchestrator` but the page's files asks for `admin_token`.
    """

    engines: tuple[EngineSettings, ...] = ()
    policy: PolicyName = PolicyName.TTFT
    store: StoreSettings | None = None
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    data: Path | None = None
    tokenizer: Path | None = None
    admin_token: str = field(kw_only=True)
    tenant_salts: bool = False
    """Whether each tenant's prompts get a salt of their own: no tenant can tell by time what another has sent."""
    body_bytes_max: int = 16 * MIB
    bodies_bytes_max: int = 256 * MIB
    connections_max: int = 16_384
    header_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    keepalive_timeout_s: float = 75.0
    send_idle_timeout_s: float = 60.0
    first_byte_timeout_s: float = 600.0
    stream_idle_timeout_s: float = 600.0
    poll_s: float = 1.0
    probe_timeout_s: float = 2.0
    token_cache_bytes: int = 64 * MIB
    response_cache_bytes: int = 0
    response_cache_s: float = 300.0
    receipts_max: int = 10_000
    prefill_tokens_min: int = 256
    cors_origins: tuple[str, ...] = ()
    """The origins of web pages that may ask, such as https://chat.example; `*` is any. None: browsers keep answers from
    pages of other origins.
    """
    drain_s: float = 25.0
    """How long requests that run may go on when the orchestrator is told to stop."""


def _is_plain_address(url: str) -> bool:
    """Whether a URL has a port that can be, and no user, password, query or fragment."""
    parts = urlsplit(url)
    try:
        is_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    return is_port and url.isprintable() and not (parts.query or parts.fragment or "@" in parts.netloc or "?" in url)


def engine_settings(document: Mapping[str, Any]) -> EngineSettings:
    """The settings of an engine that is registered by JSON. Raises ValueError."""
    if not isinstance(document, Mapping):
        raise ValueError("an engine must be a JSON object")
    known = {each.name for each in dataclasses.fields(EngineSettings)}
    if unknown := set(document) - known:
        raise ValueError(f"{', '.join(sorted(unknown))}: not known; an engine has {', '.join(sorted(known))}")
    url = document.get("url")
    if not isinstance(url, str) or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ValueError("url must be http://HOST:PORT")
    if urlsplit(url).path.strip("/"):
        raise ValueError(f"url must be http://HOST:PORT, without {urlsplit(url).path}")
    found: dict[str, Any] = {"url": url.rstrip("/")}
    for name in ("name", "events", "replay", "topic"):
        value = document.get(name)
        if value is not None:
            if not isinstance(value, str) or len(value) > TEXT_MAX or not value.isprintable():
                raise ValueError(f"{name} must be a text of at most {TEXT_MAX} printable characters")
            found[name] = value
    requests_max = document.get("requests_max")
    if requests_max is not None:
        if type(requests_max) is not int or not 1 <= requests_max <= REQUESTS_MAX_MAX:
            raise ValueError(f"requests_max must be from 1 to {REQUESTS_MAX_MAX}")
        found["requests_max"] = requests_max
    token_us = document.get("token_us")
    if token_us is not None:
        if not isinstance(token_us, int | float) or not 0 < token_us < 1e9:
            raise ValueError("token_us must be microseconds")
        found["token_us"] = float(token_us)
    if "role" in document:
        found["role"] = Role(document["role"])
    return EngineSettings(**found)


def registered(settings: EngineSettings) -> dict[str, Any]:
    """The document that `engine_settings` reads."""
    return {
        **{name: value for name, value in dataclasses.asdict(settings).items() if value is not None},
        "role": settings.role.value,
    }
