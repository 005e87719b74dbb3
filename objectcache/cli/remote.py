"""Commands that ask a running server: how it is found, as whom it is asked, and what is said where none answers."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from descriptors.errors import ObjectCacheError
from objectcache.adapters.trust import CA_BUNDLE
from objectcache.cli.config_values import ConfigError, NoServerError

if TYPE_CHECKING:
    from nixl_client.client import Client
    from nixl_client.session.signed_http import SignedHttp

ENDPOINT_VARIABLES = ("OBJECTCACHE_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
DEFAULT_ENDPOINT = "http://127.0.0.1:9000"
REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
ANSWER_S = 30.0


def remote_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all these commands have."""
    server_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answer here; - is standard output")


def server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which server is asked, and as whom."""
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help=f"the server; default: {', '.join(f'${name}' for name in ENDPOINT_VARIABLES)}, or {DEFAULT_ENDPOINT}",
    )
    parser.add_argument(
        "--credentials",
        type=Path,
        metavar="FILE",
        help="the access key, as `serve` keeps it in DIR/credentials.json; default: $AWS_ACCESS_KEY_ID and"
        " $AWS_SECRET_ACCESS_KEY",
    )


def endpoint_of(given: str | None) -> str:
    """The server's address. Raises ConfigError for what is none."""
    text = given or next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), DEFAULT_ENDPOINT)
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port
    except ValueError:
        raise ConfigError(f"--endpoint {text}: the port is no number from 0 to 65535") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--endpoint {text}: write http://HOST:PORT or https://HOST:PORT")
    if parts.path.strip("/") or parts.query:
        raise ConfigError(f"--endpoint {text}: a server has no path; write {parts.scheme}://{parts.netloc}")
    if port is None and parts.scheme == "http" and "://" not in text:
        raise ConfigError(f"--endpoint {text}: the port is missing; write http://{text}:9000")
    return f"{parts.scheme}://{parts.netloc}"


def keys_of(file: Path | None) -> tuple[str, str]:
    """Access key and secret key. Raises ConfigError, which says how to give them."""
    if file is not None:
        file = file / "credentials.json" if file.is_dir() else file
        try:
            found = json.loads(file.read_text())
            return str(found["access_key"]), str(found["secret_key"])
        except OSError as error:
            raise ConfigError(f"--credentials {file}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f'--credentials {file}: it must be {{"access_key": …, "secret_key": …}}') from None
    access_key, secret_key = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not access_key or not secret_key:
        raise ConfigError(
            "an access key is needed: give --credentials DIR/credentials.json, where DIR is the --data of `serve`, or"
            " set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return access_key, secret_key


@contextmanager
def asked(options: argparse.Namespace) -> Iterator[SignedHttp]:
    """Signed requests to the server. Raises ConfigError, and NoServerError where it is none of ours, or not there."""
    from nixl_client.session.retries import Retries
    from nixl_client.session.signed_http import SignedHttp

    endpoint = endpoint_of(options.endpoint)
    with (
        _refusals_told(endpoint),
        closing(SignedHttp(endpoint, *keys_of(options.credentials), region(), ANSWER_S, Retries(1))) as http,
    ):
        yield http


@contextmanager
def connected(options: argparse.Namespace, bucket: str) -> Iterator[Client]:
    """A client of one bucket. Raises what `asked` raises."""
    from nixl_client.client import Client

    endpoint = endpoint_of(options.endpoint)
    access_key, secret_key = keys_of(options.credentials)
    client = Client(endpoint, bucket, access_key=access_key, secret_key=secret_key, region=region(), timeout_s=ANSWER_S)
    with _refusals_told(endpoint), client:
        yield client


@contextmanager
def _refusals_told(endpoint: str) -> Iterator[None]:
    from nixl_client.session.check import nobody_at, said
    from nixl_client.transports.http import UnansweredError

    try:
        yield
    except UnansweredError as error:
        raise NoServerError(nobody_at(endpoint, error)) from None
    except ObjectCacheError as error:
        raise NoServerError(f"{endpoint} refuses: {said(error)}") from None


WITHOUT_BODY = {"404": "there is no such bucket or object", "403": "this access key may not, or its secret is another"}
"""Answers to HEAD have no body that says more."""


@contextmanager
def asked_s3(options: argparse.Namespace) -> Iterator[Any]:
    """boto3's client of the server. Raises what `asked` raises."""
    import boto3
    from boto3.exceptions import S3UploadFailedError
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError, SSLError

    endpoint = endpoint_of(options.endpoint)
    access_key, secret_key = keys_of(options.credentials)
    s3 = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=region(),
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 2}, connect_timeout=ANSWER_S),
    )
    try:
        try:
            yield s3
        except S3UploadFailedError as error:  # it wraps the error that says more
            raise (error.__context__ or error) from None
    except S3UploadFailedError as error:
        raise NoServerError(f"{endpoint} refuses: {error}") from None
    except ClientError as error:
        answer = error.response.get("Error", {})
        what = WITHOUT_BODY.get(answer.get("Code", ""), f"{answer.get('Code')}: {answer.get('Message')}")
        raise NoServerError(f"{endpoint} refuses: {what}") from None
    except SSLError as error:
        reason = f"TLS fails: {CA_BUNDLE} names the PEM file of its CA" if "VERIFY" in str(error) else str(error)
        raise NoServerError(f"no ObjectCache at {endpoint}: {reason}") from None
    except EndpointConnectionError:
        raise NoServerError(f"no ObjectCache at {endpoint}: nobody answers there") from None
    except BotoCoreError as error:
        raise NoServerError(f"no ObjectCache at {endpoint}: {error}") from None
    finally:
        s3.close()


def region() -> str:
    """The region that requests are signed for."""
    return next(filter(None, map(os.environ.get, REGION_VARIABLES)), "us-east-1")


def printable(text: str) -> str:
    """The text without characters that a terminal acts on: strangers choose names of buckets, tenants those of keys."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def told(path: Path | None, answer: Any, lines: Sequence[str]) -> None:
    """Print the lines, or write the answer as JSON; `-` is standard output."""
    if path is None:
        print("\n".join(map(printable, lines)))
    elif str(path) == "-":
        print(json.dumps(answer, indent=2))
    else:
        path.write_text(json.dumps(answer, indent=2) + "\n")
