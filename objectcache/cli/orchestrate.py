"""`objectcache orchestrator`: routes OpenAI requests to engines. `explain` prints what became of one."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from objectcache.cli import admin_token, serve
from objectcache.cli.cluster import etcd_of
from objectcache.cli.config import Config, ConfigError, load_config
from objectcache.cli.listening import Listen, listening, tls_of
from objectcache.cli.remote import printable
from objectcache.orchestrator.rules.policies import PolicyName
from objectcache.orchestrator.settings import EngineSettings, OrchestratorSettings, StoreSettings

KEY_VARIABLE = "OBJECTCACHE_ENGINE_API_KEY"
RECEIPT_BYTES_MAX = 4 << 20
ASK_S = 10.0
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_orchestrator(commands: Commands, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "orchestrator",
        help="send each OpenAI request to the engine that will answer first",
        usage="%(prog)s --engine URL [--engine URL ...] [--store URL] [options]\n"
        "       %(prog)s explain REQUEST-ID [URL]",
        description="Stand in front of several engines. Point any OpenAI client at this address: each request goes to "
        "the engine whose first token will come soonest, by what each holds, what the store has, and what waits.",
        parents=parents,
    )
    command.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="an engine, for example http://10.0.0.1:8000; may be given more than once",
    )
    command.add_argument(
        "--store",
        metavar="URL",
        help="the ObjectCache that engines load from; its account comes from AWS_ACCESS_KEY_ID and"
        " AWS_SECRET_ACCESS_KEY",
    )
    command.add_argument(
        "--policy", choices=[each.value for each in PolicyName], help="default: ttft; docs/guides/orchestrator.md"
    )
    command.add_argument(
        "--data", type=Path, metavar="DIR", help="where engines, sessions and blocks are kept over a restart"
    )
    command.add_argument(
        "--registry",
        metavar="WHERE",
        help="etcd://HOST:PORT[,HOST:PORT]/PREFIX: engines that any of several orchestrators registers, all join",
    )
    command.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    command.add_argument("--port", type=int, default=8080, help="default: 8080; 0 picks a free one")
    command.add_argument("--tls-certificate", type=Path, metavar="FILE", help="PEM, with its chain; speaks https then")
    command.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM")
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML; see docs/reference/configuration.md")
    command.set_defaults(command=orchestrate)

    explain = command.add_subparsers(metavar="COMMAND").add_parser(
        "explain", help="print where a request went, and why", parents=parents
    )
    explain.add_argument("request_id", metavar="REQUEST-ID", help="of the header x-objectcache-request-id")
    explain.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8080", metavar="URL", help="the orchestrator; default: %(default)s"
    )
    explain.add_argument("--json", type=Path, metavar="FILE", help="write the receipt here; - is standard output")
    explain.set_defaults(command=explain_request)


def orchestrate(options: argparse.Namespace) -> int:
    """Run an orchestrator until a signal ends it. Raises ConfigError."""
    config = load_config(options.config)
    settings = settings_of(options, config)
    if not settings.engines and settings.data is None and options.registry is None:
        raise ConfigError(
            "an orchestrator needs an --engine, or --data or --registry with engines that were registered"
        )
    from objectcache.orchestrator.metadata_file import MetadataError  # other commands start sooner without these
    from objectcache.orchestrator.process import Orchestration
    from objectcache.orchestrator.registry import EtcdRegistry

    listen = Listen(options.host, options.port, tls=tls_of(options.tls_certificate, options.tls_key))
    engine_key = os.environ.get(KEY_VARIABLE)

    def make() -> Orchestration:
        registry = None
        if options.registry is not None:
            registry = EtcdRegistry(*etcd_of("--registry", options.registry, config.cluster))
        return Orchestration(settings, engine_key, lambda server: listening(server, listen), registry)

    try:
        serve.run("objectcache orchestrator", make)
    except (MetadataError, ValueError) as error:
        raise ConfigError(str(error)) from None
    return 0


def settings_of(options: argparse.Namespace, config: Config) -> OrchestratorSettings:
    """The settings by the config file and the options. Raises ConfigError."""
    table = config.orchestrator
    engines = [each.settings() for each in config.engines]
    engines += [_engine(each) for each in options.engine]
    twice = {each.label for each in engines if [other.label for other in engines].count(each.label) > 1}
    if twice:
        raise ConfigError(f"the engine {min(twice)} is there twice")
    keys = [each.key for each in config.api_keys]
    if len(set(keys)) != len(keys):
        raise ConfigError("[[api_keys]]: a key appears twice")
    admission = table.admission()
    if config.internals.orchestrator.queue_max is not None:
        admission = replace(admission, queue_max=config.internals.orchestrator.queue_max)
    others: dict[str, Any] = table.others()
    if options.policy is not None:
        others["policy"] = PolicyName(options.policy)
    if "admin_token" not in others:
        others["admin_token"] = admin_token.find_or_make(os.environ)
    return OrchestratorSettings(
        engines=tuple(engines),
        store=_store(options, config),
        admission=admission,
        tenants={each.key: each.share() for each in config.api_keys},
        data=options.data,
        **others,
    )


def explain_request(options: argparse.Namespace) -> int:
    """Print a receipt. 1 where there is none. Raises ConfigError."""
    token = admin_token.known(os.environ)
    if token is None:
        raise ConfigError(f"no orchestrator of this user has made an admin token: set {admin_token.VARIABLE}")
    headers = {"Authorization": f"Bearer {token}"}
    asked = urllib.request.Request(
        f"{options.url.rstrip('/')}/_orchestrator/receipts/{options.request_id}", headers=headers
    )
    try:
        with urllib.request.urlopen(asked, timeout=ASK_S) as answer:
            receipt = json.loads(answer.read(RECEIPT_BYTES_MAX))
            lines = receipt_lines(receipt)
    except urllib.error.HTTPError as error:
        print(printable(f"objectcache: {options.url}: {error}"), file=sys.stderr)
        return 1
    except urllib.error.URLError as error:
        print(printable(f"objectcache: no orchestrator at {options.url}: {error.reason}"), file=sys.stderr)
        return 1
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        print(printable(f"objectcache: {options.url}: {error}"), file=sys.stderr)
        return 1
    except (KeyError, TypeError, AttributeError):
        print(f"objectcache: {options.url}: that is no receipt of an orchestrator", file=sys.stderr)
        return 1
    if options.json is not None:
        text = json.dumps(receipt, indent=2) + "\n"
        if str(options.json) == "-":
            print(text, end="")
        else:
            options.json.write_text(text)
        return 0
    print("\n".join(map(printable, lines)))
    return 0


def receipt_lines(receipt: dict[str, Any]) -> list[str]:
    """A receipt for people to read."""
    lines = [
        f"request      {receipt['request_id']}  {receipt['path']}",
        f"prompt       {receipt['prompt_tokens']} tokens",
        f"waited       {_ms(receipt['waited_s'])}, tokenized {_ms(receipt['tokenize_s'])}, looked up "
        f"{_ms(receipt['lookup_s'])}, decided {_ms(receipt['decide_s'])}",
        f"engine       {receipt['engine']}: {receipt['reason']}",
    ]
    if receipt["predictions"]:
        lines.append("predicted    engine, TTFT = queue + routing + compute with loads; delay of others;")
        lines.append("             tokens held, stored, to load")
    for each in receipt["predictions"]:
        lines.append(
            f"  {each['engine']}  {_ms(each['ttft_s'])} = {_ms(each['queue_s'])} + {_ms(each['routing_s'])} + "
            f"{_ms(each['compute_s'])} ({each['choice']}; recompute {_ms(each['recompute_s'])}); "
            f"{_ms(each['others_s'])}; {each['held_tokens']}, {each['stored_tokens']}, {each['load_tokens']}"
        )
    for each in receipt["attempts"]:
        lines.append(f"sent to      {each['engine']}: {each.get('status', '')} {each.get('error', '')}".rstrip())
    lines.append(f"first byte   {_ms(receipt['ttft_s'])}, whole {_ms(receipt['total_s'])}, status {receipt['status']}")
    return [*lines, *([f"note         {receipt['note']}"] if receipt["note"] else [])]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"


def _engine(text: str) -> EngineSettings:
    if not text.startswith(("http://", "https://")) or len(text) > 512:
        raise ConfigError(f"--engine {text}: must be http://HOST:PORT")
    if urlsplit(text).path.strip("/"):
        raise ConfigError(f"--engine {text}: must be http://HOST:PORT, without {urlsplit(text).path}")
    try:
        return EngineSettings(text.rstrip("/"))
    except ValueError as error:
        raise ConfigError(f"--engine: {error}") from None


def _store(options: argparse.Namespace, config: Config) -> StoreSettings | None:
    """The store's address and account. Without an account the store is not asked."""
    endpoint = options.store or config.orchestrator.store
    access_key, secret_key = os.environ.get("AWS_ACCESS_KEY_ID", ""), os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    if not access_key or not secret_key:
        if endpoint is not None:
            raise ConfigError("--store needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        return None
    if endpoint is None:
        return None
    return StoreSettings(endpoint.rstrip("/"), access_key, secret_key)
