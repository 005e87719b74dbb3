"""`objectcache ls`, `du`, `rm`, `mb`, `get` and `put`: what is stored in a server, by bucket and by the first parts of
names, and the same for any S3 service.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from descriptors.headers import CACHE_HEADER
from descriptors.objects import BucketCache
from descriptors.prefix_keys import ROOTS, label
from descriptors.units import format_bytes
from objectcache.calibration.samples import progress_bar
from objectcache.calibration.text import aligned
from objectcache.cli.config_values import ConfigError, NoServerError
from objectcache.cli.remote import asked_s3, remote_options, told

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
SHOWN = 1000
DELETED_AT_ONCE = 1000
DEPTHS = {"bucket": 0, "model": 2, "folder": None}
"""How many parts of names objects are added up by: a chunk's name begins with ROOT/MODEL/."""


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """BUCKET, or BUCKET/KEY, where KEY may be the beginning of keys."""

    bucket: str
    key: str = ""

    @classmethod
    def of(cls, text: str) -> StoredPlace:
        """Also s3://BUCKET/KEY. Raises ConfigError without a bucket."""
        bucket, _, key = text.removeprefix("s3://").partition("/")
        if not bucket:
            raise ConfigError(f"{text}: write BUCKET or BUCKET/KEY")
        return cls(bucket, key)


def add_stored(commands: Commands, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the commands."""

    def command(name: str, what: str, run: Any, *arguments: tuple[str, dict[str, Any]]) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=what, parents=parents, description=f"{what[0].upper()}{what[1:]}.")
        for argument, options in arguments:
            added.add_argument(argument, **options)
        remote_options(added)
        added.set_defaults(command=run)
        return added

    place = {"metavar": "BUCKET[/PREFIX]"}
    command("ls", "list buckets, or the objects of one", run_ls, ("place", {**place, "nargs": "?"}))
    du = command(
        "du", "count objects and bytes, by bucket, model or folder", run_du, ("place", {**place, "nargs": "?"})
    )
    du.add_argument(
        "--by",
        choices=DEPTHS,
        default="model",
        help="add up by bucket, by model, which is what the first two parts of chunks' names say, or by folder;"
        " default: model",
    )
    rm = command(
        "rm", "delete an object, all that begin so, or a model's KV", run_rm, ("place", {"metavar": "BUCKET/KEY"})
    )
    which = rm.add_mutually_exclusive_group()
    which.add_argument("--recursive", action="store_true", help="delete all objects whose names begin with KEY")
    which.add_argument("--model", metavar="NAME", help="delete the KV of this model in BUCKET, as `du` names it")
    mb = command("mb", "make a bucket, which may be a cache", run_mb, ("bucket", {"metavar": "BUCKET"}))
    mb.add_argument(
        "--cache",
        nargs="?",
        const="auto",
        metavar="SIZE",
        help="objects are deleted ahead of writes that need their room; without a size the cache has 80 %% of what the"
        " file system offers",
    )
    file = {"type": Path, "metavar": "FILE"}
    command("get", "write an object into a file", run_get, ("place", {"metavar": "BUCKET/KEY"}), ("file", file))
    command("put", "store a file", run_put, ("file", file), ("place", {"metavar": "BUCKET/KEY"}))


def run_ls(options: argparse.Namespace) -> int:
    """0: listed."""
    with asked_s3(options) as s3:
        if options.place is None:
            rows = [_bucket(s3, each) for each in s3.list_buckets().get("Buckets", [])]
            cells = [[row["name"], _cache(row["cache"]), row["created_at"]] for row in rows]
            told(options.json, rows, aligned(["bucket", "cache", "created"], cells) if rows else ["no buckets"])
            return 0
        place = StoredPlace.of(options.place)
        found: list[dict[str, Any]] = []
        for each in objects_of(s3, place):
            found.append(each)
            if options.json is None and len(found) > SHOWN:
                break
        cells = [[each["modified_at"], format_bytes(each["bytes"]), each["key"]] for each in found[:SHOWN]]
        more = [f"… and more: --json has all, `objectcache du {options.place}` counts them"] * (len(found) > SHOWN)
        told(options.json, found, [*aligned(["modified", "size", "key"], cells), *more] if found else ["no objects"])
    return 0


def run_du(options: argparse.Namespace) -> int:
    """0: counted."""
    with asked_s3(options) as s3:
        places = (
            [StoredPlace.of(options.place)]
            if options.place is not None
            else [StoredPlace(each["Name"]) for each in s3.list_buckets().get("Buckets", [])]
        )
        rows = []
        for place in places:
            for group, (count, nbytes) in sorted(counted(objects_of(s3, place), DEPTHS[options.by]).items()):
                rows.append({"bucket": place.bucket, "group": group, "objects": count, "bytes": nbytes})
        cells = [
            [f"{row['bucket']}/{row['group']}", f"{row['objects']:,}", format_bytes(int(str(row["bytes"])))]
            for row in rows
        ]
        told(
            options.json,
            rows,
            aligned(["objects whose names begin with", "count", "size"], cells) if rows else ["empty"],
        )
    return 0


def run_rm(options: argparse.Namespace) -> int:
    """0: deleted. 1: there was nothing, or not all could be."""
    place = StoredPlace.of(options.place)
    if options.model is not None and place.key:
        raise ConfigError(f"{options.place}: --model deletes in a whole bucket; write {place.bucket}")
    if not place.key and not options.recursive and options.model is None:
        raise ConfigError(f"{options.place}: that is a whole bucket; write BUCKET/KEY, or say --recursive or --model")
    places = [place]
    if options.model is not None and (not options.model or label(options.model) != options.model):
        raise ConfigError(f"--model {options.model!r}: write the name as `objectcache du {place.bucket}` does")
    if options.model is not None:
        places = [StoredPlace(place.bucket, f"{root}/{label(options.model)}/") for root in ROOTS]
    with asked_s3(options) as s3:
        if not options.recursive and options.model is None:
            s3.head_object(Bucket=place.bucket, Key=place.key)
            s3.delete_object(Bucket=place.bucket, Key=place.key)
            told(options.json, {"deleted": 1, "failed": []}, [f"deleted {place.bucket}/{place.key}"])
            return 0
        deleted, failed = 0, []
        found = (each["key"] for one in places for each in objects_of(s3, one))
        for keys in _in_groups(found, DELETED_AT_ONCE):
            errors = []
            if plain := [{"Key": key} for key in keys if key.isprintable()]:
                wanted = {"Objects": plain, "Quiet": True}
                errors = s3.delete_objects(Bucket=place.bucket, Delete=wanted).get("Errors", [])
            for key in keys:
                if not key.isprintable():  # XML has no such characters, or folds them into those of another key
                    s3.delete_object(Bucket=place.bucket, Key=key)
            deleted += len(keys) - len(errors)
            failed += [{"key": each.get("Key"), "code": each.get("Code")} for each in errors]
        nothing = [f"{options.place} has nothing of it: `objectcache du {place.bucket}` says what is there"]
        lines = [
            f"deleted {deleted:,} objects",
            *nothing * (not deleted and not failed),
            *(f"kept {each['key']}: {each['code']}" for each in failed[:SHOWN]),
        ]
        told(options.json, {"deleted": deleted, "failed": failed}, lines)
    return 1 if failed or not deleted else 0


def run_mb(options: argparse.Namespace) -> int:
    """0: made, or there already as it was asked for."""
    cache = None
    if options.cache is not None:
        try:
            cache = BucketCache.of_text(options.cache)
        except ValueError as error:
            raise ConfigError(f"--cache {options.cache}: {error}") from None
    with asked_s3(options) as s3:
        if cache is not None:
            text = cache.text()
            s3.meta.events.register("before-call.s3.CreateBucket", lambda params, **_: params["headers"].update(
                {CACHE_HEADER: text}))  # fmt: skip
        s3.create_bucket(Bucket=options.bucket)
        made = _bucket(s3, {"Name": options.bucket})
        told(options.json, made, [f"{options.bucket}: {_cache(made['cache']) or 'nothing is evicted'}"])
        if cache is not None and made["cache"] is None:
            print(f"objectcache: {options.bucket} is there already, and is no cache by itself", file=sys.stderr)
            return 1
    return 0


def run_get(options: argparse.Namespace) -> int:
    """0: written."""
    place = StoredPlace.of(options.place)
    with asked_s3(options) as s3:
        nbytes = s3.head_object(Bucket=place.bucket, Key=place.key)["ContentLength"]
        with progress_bar(nbytes, place.key) as advance:
            s3.download_file(place.bucket, place.key, str(options.file), Callback=advance)
        got = options.file.stat().st_size
        if got != nbytes:
            raise NoServerError(f"{options.place} has {nbytes} bytes, and {got} came: {options.file} is not the object")
        told(options.json, {"bytes": nbytes}, [f"{options.file}: {format_bytes(nbytes)}"])
    return 0


def run_put(options: argparse.Namespace) -> int:
    """0: stored."""
    place = StoredPlace.of(options.place)
    if not place.key or place.key.endswith("/"):
        place = StoredPlace(place.bucket, place.key + options.file.name)
    nbytes = options.file.stat().st_size
    with asked_s3(options) as s3:
        from boto3.s3.transfer import TransferConfig

        # with threads, awscrt prints a traceback for each part that is ended because another one was refused
        one_by_one = TransferConfig(use_threads=False)
        with progress_bar(nbytes, place.key) as advance:
            s3.upload_file(str(options.file), place.bucket, place.key, Callback=advance, Config=one_by_one)
        told(options.json, {"bytes": nbytes}, [f"{place.bucket}/{place.key}: {format_bytes(nbytes)}"])
    return 0


def objects_of(s3: Any, place: StoredPlace) -> Iterator[dict[str, Any]]:
    """Objects whose keys begin with the place's, page by page."""
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=place.key):
        for each in page.get("Contents", []):
            yield {
                "key": each["Key"],
                "bytes": each["Size"],
                "modified_at": f"{each['LastModified']:%Y-%m-%d %H:%M:%S}",
            }


def counted(objects: Iterable[dict[str, Any]], depth: int | None) -> dict[str, tuple[int, int]]:
    """Objects and bytes by the first `depth` parts of keys, or all of them, without the last part."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for each in objects:
        parts = each["key"].split("/")[:-1][:depth]
        group = "/".join(parts) + "/" * bool(parts)
        count, nbytes = found[group]
        found[group] = (count + 1, nbytes + each["bytes"])
    return dict(found)


def _bucket(s3: Any, listed: dict[str, Any]) -> dict[str, Any]:
    headers = s3.head_bucket(Bucket=listed["Name"])["ResponseMetadata"]["HTTPHeaders"]
    created = f"{listed['CreationDate']:%Y-%m-%d %H:%M:%S}" if "CreationDate" in listed else ""
    return {"name": listed["Name"], "cache": headers.get(CACHE_HEADER), "created_at": created}


def _cache(text: str | None) -> str:
    if text is None:
        return ""
    return "a cache, as large as the disk allows" if text == "auto" else f"a cache of {format_bytes(int(text))}"


def _in_groups(keys: Iterable[str], most: int) -> Iterator[list[str]]:
    group: list[str] = []
    for key in keys:
        group.append(key)
        if len(group) == most:
            yield group
            group = []
    if group:
        yield group
