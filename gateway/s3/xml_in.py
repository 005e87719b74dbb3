"""The XML documents in S3 requests, parsed into values. A parser raises CallerError and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import PART_NUMBER_MAX, Checksum, ChecksumAlgorithm, ChecksumType, ClaimedPart
from gateway.s3.conditions import bare_etag
from gateway.s3.tags import checked_tags
from gateway.s3.upload import decode_checksum
from gateway.s3.xml_lifecycle import parse_lifecycle
from gateway.s3.xml_tree import Node, malformed, parse_tree

__all__ = [
    "parse_acl",
    "parse_complete",
    "parse_create_bucket",
    "parse_delete",
    "parse_lifecycle",
    "parse_tagging",
]

DELETE_KEYS_MAX = 1000
_PART_CHECKSUMS = {f"Checksum{algorithm.value}": algorithm for algorithm in ChecksumAlgorithm}
_PART_FIELDS = frozenset({"PartNumber", "ETag", *_PART_CHECKSUMS})


@dataclass(frozen=True, slots=True)
class DeleteEntry:
    """One key to delete. `etag` is the bare ETag that the object must have, where the request gives one."""

    key: str
    version_id: str | None = None
    etag: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteManifest:
    """DeleteObjects: the keys to delete. With `quiet` the answer lists failures only."""

    entries: list[DeleteEntry]
    quiet: bool = False


def parse_delete(body: bytes) -> DeleteManifest:
    """Delete. Raises CallerError: MalformedXML, NotImplemented."""
    root = parse_tree(body, "Delete")
    root.expect(("Object", "Quiet"))
    objects = root.all("Object")
    if not 1 <= len(objects) <= DELETE_KEYS_MAX:
        raise malformed(f"Delete names 1 to {DELETE_KEYS_MAX} objects")
    quiet = (root.leaf("Quiet") or "false").strip().lower()
    if quiet not in ("true", "false"):
        raise malformed("Quiet must be true or false")
    return DeleteManifest([_delete_entry(node) for node in objects], quiet == "true")


def parse_complete(body: bytes) -> list[ClaimedPart]:
    """CompleteMultipartUpload. Raises CallerError: MalformedXML, InvalidArgument, InvalidRequest."""
    root = parse_tree(body, "CompleteMultipartUpload")
    root.expect(("Part",))
    if not root.children:
        raise malformed("CompleteMultipartUpload must name its parts")
    if len(root.children) > PART_NUMBER_MAX:
        raise malformed(f"an upload has at most {PART_NUMBER_MAX} parts")
    return [_claimed_part(node) for node in root.children]


def parse_tagging(body: bytes) -> dict[str, str]:
    """Tagging. Raises CallerError: MalformedXML, InvalidTag."""
    root = parse_tree(body, "Tagging")
    root.expect(("TagSet",))
    tag_set = root.need("TagSet")
    tag_set.expect(("Tag",))
    pairs = []
    for tag in tag_set.children:
        fields = tag.fields(("Key", "Value"))
        if len(fields) < 2:
            raise malformed("Tag must have Key and Value")
        pairs.append((fields["Key"], fields["Value"]))
    return checked_tags(pairs)


def parse_create_bucket(body: bytes) -> str:
    """CreateBucketConfiguration's LocationConstraint, "" where there is none. Raises CallerError: MalformedXML,
    NotImplemented.
    """
    if not body.strip():
        return ""
    root = parse_tree(body, "CreateBucketConfiguration")
    root.expect(("LocationConstraint", "Location", "Bucket", "Tags"))
    for name in ("Location", "Bucket", "Tags"):
        node = root.only(name)
        if node is not None and node.children:
            raise CallerError(ErrorCode.NOT_IMPLEMENTED, f"{name} of a new bucket is not implemented", field=name)
    return (root.leaf("LocationConstraint") or "").strip()


def parse_acl(body: bytes, owner: str) -> None:
    """AccessControlPolicy. Raises CallerError: MalformedXML; NotImplemented unless it is the owner's full control."""
    root = parse_tree(body, "AccessControlPolicy")
    root.expect(("Owner", "AccessControlList"))
    named = root.only("Owner")
    is_plain = named is None or named.leaf("ID") in (None, "", owner)
    grants = root.need("AccessControlList")
    grants.expect(("Grant",))
    for grant in grants.children:
        grant.expect(("Grantee", "Permission"))
        permission = (grant.leaf("Permission") or "").strip()
        if permission not in ("FULL_CONTROL", "READ", "WRITE", "READ_ACP", "WRITE_ACP"):
            raise malformed("Permission is not one of S3's")
        is_plain = is_plain and permission == "FULL_CONTROL" and grant.need("Grantee").leaf("ID") == owner
    if not is_plain or len(grants.children) != 1:
        problem = "only the owner's full control is implemented; use access keys' rights for others"
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field="AccessControlList")


def _delete_entry(node: Node) -> DeleteEntry:
    fields = node.fields(("Key", "VersionId", "ETag", "LastModifiedTime", "Size"))
    for name in ("LastModifiedTime", "Size"):
        if name in fields:
            raise CallerError(ErrorCode.NOT_IMPLEMENTED, f"{name} as a condition is not implemented", field=name)
    if not fields.get("Key"):
        raise malformed("Object must have a Key")
    etag = bare_etag(fields["ETag"]) if "ETag" in fields else None
    return DeleteEntry(fields["Key"], fields.get("VersionId", "").strip() or None, etag)


def _claimed_part(node: Node) -> ClaimedPart:
    fields = node.fields(_PART_FIELDS)
    number = fields.get("PartNumber", "").strip()
    if not number.isascii() or not number.isdigit() or len(number) > 18:
        raise malformed("PartNumber must be a number")
    if not 1 <= int(number) <= PART_NUMBER_MAX:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, f"part numbers are 1 to {PART_NUMBER_MAX}", field="PartNumber")
    if "ETag" not in fields:
        raise malformed("Part must have an ETag")
    given = [name for name in fields if name in _PART_CHECKSUMS]
    if len(given) > 1:
        raise malformed("Part has more than one checksum")
    checksum = _part_checksum(given[0], fields[given[0]]) if given else None
    return ClaimedPart(int(number), bare_etag(fields["ETag"]), checksum)


def _part_checksum(name: str, text: str) -> Checksum:
    algorithm = _PART_CHECKSUMS[name]
    return Checksum(algorithm, decode_checksum(algorithm, text.strip()), ChecksumType.FULL_OBJECT)
