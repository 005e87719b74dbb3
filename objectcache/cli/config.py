"""Configuration: a TOML file, environment variables and command-line options become checked settings.

Order for credentials: the config file's, then AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, then a generated pair kept
in a file only its owner can read.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import secrets
import string
import sys
import tomllib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from pydantic import ValidationError

from descriptors.peer_auth import PeerSecrets
from gateway.app import GatewaySettings
from gateway.s3.credentials import Credential
from objectcache.adapters.interfaces import LOOPBACK
from objectcache.cli.config_compression import CompressionConfig
from objectcache.cli.config_errors import told, unquoted
from objectcache.cli.config_former import renewed
from objectcache.cli.config_internals import InternalsConfig, said
from objectcache.cli.config_memory import document_pools, landing_bytes, storage_pools
from objectcache.cli.config_orchestrator import ApiKeyConfig, EngineConfig, OrchestratorConfig
from objectcache.cli.config_tables import (
    BucketConfig,
    ClusterConfig,
    ComputeProfileConfig,
    CredentialConfig,
    GatewayConfig,
    SchedulerConfig,
    StorageConfig,
    TenantConfig,
    UpstreamConfig,
    twice_in,
)
from objectcache.cli.config_values import ConfigError as ConfigError
from objectcache.cli.config_values import Model
from storage_server.delivery.scheduler.settings import SchedulerSettings
from storage_server.planning.durability import Durability
from storage_server.settings import (
    StorageSettings,
    UpstreamSettings,
    Write,
)

PEER_SECRET_BYTES = 32
KEYS_TOLD = 8
"""A message names no more access keys than these."""
PEER_SECRETS_MAX = 8
_log = logging.getLogger(__name__)


class Config(Model):
    """A whole config file."""

    gateway: GatewayConfig = GatewayConfig()
    storage: StorageConfig = StorageConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    tenants: tuple[TenantConfig, ...] = ()
    compute_profiles: tuple[ComputeProfileConfig, ...] = ()
    credentials: tuple[CredentialConfig, ...] = ()
    upstream: UpstreamConfig = UpstreamConfig()
    buckets: tuple[BucketConfig, ...] = ()
    compression: CompressionConfig = CompressionConfig()
    cluster: ClusterConfig = ClusterConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    engines: tuple[EngineConfig, ...] = ()
    api_keys: tuple[ApiKeyConfig, ...] = ()
    internals: InternalsConfig = InternalsConfig()

    def gateway_settings(self) -> GatewaySettings:
        """The settings of a gateway. Raises ConfigError when sizes do not fit each other."""
        try:
            values = self.gateway.model_dump(exclude={"tls_certificate", "tls_key"})
            return GatewaySettings(
                **{**values, **document_pools(self.storage.memory_bytes), **said(self.internals.gateway)}
            )
        except ValueError as error:
            raise ConfigError(f"[gateway]: {error}") from None

    def storage_settings(self, data_dir: Path) -> StorageSettings:
        """The settings of a storage server. Raises ConfigError when sizes do not fit each other."""
        chosen = said(self.storage)
        memory_bytes = chosen.pop("memory_bytes")
        if isinstance(chosen.get("ucx"), bool):
            chosen["ucx"] = (LOOPBACK,) if chosen["ucx"] else ()
        if isinstance(chosen.get("shm"), tuple):
            chosen |= {"shm": True, "shm_users": chosen["shm"]}
        scheduler = self.scheduler_settings()
        try:
            chosen = {**storage_pools(memory_bytes), **chosen, **said(self.internals.storage)}
            upstream = self.upstream_settings()
            if upstream is not None and upstream.write is Write.THROUGH:  # what the cache loses, upstream has
                chosen.setdefault("durability", Durability.RELAXED)
            caches = tuple(bucket.cache() for bucket in self.buckets)
            return StorageSettings(
                data_dir=data_dir, scheduler=scheduler, upstream=upstream, caches=caches,
                compression=self.compression.settings(), losses=self.compression.loss_table(),
                max_errors={each.access_key: each.max_error for each in self.tenants if each.max_error is not None},
                max_losses={each.access_key: each.max_loss for each in self.tenants if each.max_loss is not None},
                error_budgets={
                    each.access_key: each.error_budget for each in self.tenants if each.error_budget is not None
                },
                **chosen,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(f"[storage]: {error}") from None

    def upstream_settings(self) -> UpstreamSettings | None:
        """The settings of the way to another service; None where none is named. Raises ConfigError, ValueError."""
        pools = {"landing_bytes": landing_bytes(self.storage.memory_bytes), **said(self.internals.upstream)}
        return self.upstream.settings(os.environ, pools)

    def scheduler_settings(self) -> SchedulerSettings:
        """The settings of the scheduler. Raises ConfigError."""
        try:
            return self.scheduler.settings(self.internals.scheduler, self.tenants, self.compute_profiles)
        except ValueError as error:
            raise ConfigError(f"[scheduler]: {error}") from None


def load_config(path: Path | None) -> Config:
    """The file's configuration, or the defaults without one. Raises ConfigError."""
    if path is None:
        return Config()
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: it must be UTF-8, and byte {error.start} is not") from None
    try:
        document, former = renewed(tomllib.loads(text))
        config = Config.model_validate(document)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {unquoted(text, str(error)) or error}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {told(Config, error.errors(include_url=False, include_input=False))}") from None
    for told_once in former:
        _log.warning("%s: %s", path, told_once)
    return config


def check_tenants(config: Config, credentials: Sequence[Credential]) -> None:
    """Raises ConfigError for a `[[tenants]]` table of nobody."""
    known = {each.access_key for each in credentials}
    for tenant in config.tenants:
        if tenant.access_key not in known:
            near = difflib.get_close_matches(tenant.access_key, known, 1, 0.6)
            remedy = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(sorted(known)[:KEYS_TOLD])}"
            raise ConfigError(f"[[tenants]]: {tenant.access_key} is no access key of this server; {remedy}")


def load_credentials(config: Config, environment: Mapping[str, str], file: Path) -> list[Credential]:
    """Credentials in the order the module's head gives; a new pair is printed once, to standard error."""
    if config.credentials:
        if twice := twice_in(each.access_key for each in config.credentials):
            raise ConfigError(f"[[credentials]]: access_key {twice} appears twice")
        _tell_unknown(file, {each.access_key for each in config.credentials}, "[[credentials]] of the configuration")
        return [Credential(c.access_key, c.secret_key, c.buckets, c.actions) for c in config.credentials]
    access_key, secret_key = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if access_key and secret_key:
        _tell_unknown(file, {access_key}, "AWS_ACCESS_KEY_ID")
        return [Credential(access_key, secret_key)]
    if file.exists():
        return [_stored_credential(file)]
    letters = string.ascii_uppercase + string.digits
    access_key = "OC" + "".join(secrets.choice(letters) for _ in range(18))
    secret_key = secrets.token_urlsafe(30)
    _write_private(file, json.dumps({"access_key": access_key, "secret_key": secret_key}) + "\n")
    print(
        f"new credentials, kept in {file}:\n  AWS_ACCESS_KEY_ID={access_key}\n  AWS_SECRET_ACCESS_KEY={secret_key}",
        file=sys.stderr,
        flush=True,
    )
    return [Credential(access_key, secret_key)]


def _stored_credential(file: Path) -> Credential:
    try:
        stored = json.loads(file.read_text())
        return Credential(stored["access_key"], stored["secret_key"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{file} is not a credentials file; remove it to have a new one made") from None


def _tell_unknown(file: Path, known: Set[str], others: str) -> None:
    """Warn where the key of an earlier start is none any more: whoever has it is refused from now on."""
    with contextlib.suppress(ConfigError, OSError):
        key = _stored_credential(file).access_key
        if key not in known:
            _log.warning(
                "the access key %s of %s is not known any more, because the keys are those of %s; name it there, too,"
                " if it is still in use", key, file, others,
            )  # fmt: skip


def credentials_from(config: Config, environment: Mapping[str, str], file: Path) -> str:
    """Where `load_credentials` finds them, for people."""
    if config.credentials:
        return "from the configuration"
    if environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
        return "from AWS_ACCESS_KEY_ID in the environment"
    return f"from {file}"


def load_peer_secrets(file: Path, *, create: bool) -> PeerSecrets:
    """The secrets that gateways and storage servers share, one a line: the first signs, each is accepted. Raises
    ConfigError when the file is absent, or a secret too short.
    """
    if not file.exists():
        if not create:
            raise ConfigError(f"{file}: no such file; copy the storage server's peer-secret there")
        _write_private(file, secrets.token_hex(PEER_SECRET_BYTES) + "\n")
    try:
        secrets_there = [line for line in map(bytes.strip, file.read_bytes().splitlines()) if line]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if not secrets_there or min(map(len, secrets_there)) < PEER_SECRET_BYTES or len(secrets_there) > PEER_SECRETS_MAX:
        raise ConfigError(
            f"{file}: from 1 to {PEER_SECRETS_MAX} lines, each a secret of at least {PEER_SECRET_BYTES} characters"
        )
    return PeerSecrets(*secrets_there)


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
