"""S3's XML answers about buckets and objects; gateway.s3.xml_uploads has those about multipart uploads."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from descriptors.errors import ErrorCode, ObjectCacheError
from descriptors.lifecycle import LifecycleRule
from descriptors.objects import BucketInfo, Checksum, ListPage, ListRequest, ObjectInfo
from gateway.s3.markup import NAMESPACE, bare_document, branch, document, flag, leaf, legible_leaf, timestamp

NULL_VERSION = "null"
DEFAULT_REGION = "us-east-1"
_XSI = "http://www.w3.org/2001/XMLSchema-instance"


_UNRESERVED = re.compile(r"[A-Za-z0-9/_.~*-]*").fullmatch


@dataclass(frozen=True, slots=True)
class Names:
    """Writes keys in a listing: percent-encoded when the caller asked for `encoding-type=url`."""

    url_encoded: bool = False

    def leaf(self, name: str, key: str) -> str:
        if not self.url_encoded:
            return leaf(name, key)
        return f"<{name}>{key if _UNRESERVED(key) else quote(key, safe='/-_.~*')}</{name}>"

    def encoding(self) -> list[str]:
        return [leaf("EncodingType", "url")] if self.url_encoded else []

    def common(self, prefixes: Iterable[str]) -> list[str]:
        return [branch("CommonPrefixes", [self.leaf("Prefix", prefix)]) for prefix in prefixes]

    def delimiter(self, delimiter: str) -> list[str]:
        return [self.leaf("Delimiter", delimiter)] if delimiter else []


@dataclass(frozen=True, slots=True)
class ErrorContext:
    """The parts of an Error document besides the error. A client that signed for another region than `region` reads it
    there and signs again. `argument_value` is the value of the wrong field.
    """

    request_id: str
    region: str = ""
    argument_value: str | None = None


def error_document(error: ObjectCacheError, resource: str, context: ErrorContext) -> bytes:
    """S3's Error document, with the field that was wrong and the first bad chunk where there is one."""
    parts = _error_parts(error, resource, context.request_id)
    if context.argument_value is not None:
        parts.append(legible_leaf("ArgumentValue", context.argument_value))
    if context.region and error.code is ErrorCode.AUTHORIZATION_HEADER_MALFORMED:
        parts.append(leaf("Region", context.region))
    return bare_document("Error", parts)


def range_error_document(error: ObjectCacheError, resource: str, request_id: str, requested: str, nbytes: int) -> bytes:
    """The Error document, with the elements by which the CRT client recognises an empty object."""
    parts = [legible_leaf("RangeRequested", requested), leaf("ActualObjectSize", nbytes)]
    return bare_document("Error", parts + _error_parts(error, resource, request_id))


def _error_parts(error: ObjectCacheError, resource: str, request_id: str) -> list[str]:
    parts = [legible_leaf("Code", error.code.value), legible_leaf("Message", error.message)]
    if error.field is not None:
        parts.append(legible_leaf("ArgumentName", error.field))
    if error.index is not None:
        parts.append(leaf("ChunkIndex", error.index))
    if error.layer is not None:
        parts.append(leaf("LayerIndex", error.layer))
    return [*parts, legible_leaf("Resource", resource), legible_leaf("RequestId", request_id)]


def buckets_document(owner: str, buckets: list[BucketInfo], prefix: str = "", next_token: str | None = None) -> bytes:
    """ListAllMyBucketsResult."""
    listed = [
        branch("Bucket", [leaf("Name", bucket.name), leaf("CreationDate", timestamp(bucket.created_at))])
        for bucket in buckets
    ]
    parts = [owner_element("Owner", owner), branch("Buckets", listed)]
    if next_token is not None:
        parts.append(leaf("ContinuationToken", next_token))
    if prefix:
        parts.append(leaf("Prefix", prefix))
    return document("ListAllMyBucketsResult", parts)


def location_document(region: str) -> bytes:
    """LocationConstraint; empty for us-east-1, as in S3."""
    head = '<?xml version="1.0" encoding="UTF-8"?>\n'
    text = "" if region == DEFAULT_REGION else region
    return f'{head}<LocationConstraint xmlns="{NAMESPACE}">{text}</LocationConstraint>'.encode()


def versioning_document() -> bytes:
    """VersioningConfiguration of a bucket that never had versions."""
    return document("VersioningConfiguration", [])


def acl_document(owner: str) -> bytes:
    """AccessControlPolicy: the owner, with full control."""
    grantee = f'<Grantee xmlns:xsi="{_XSI}" xsi:type="CanonicalUser">{_owner(owner)}</Grantee>'
    grant = branch("Grant", [grantee, leaf("Permission", "FULL_CONTROL")])
    return document("AccessControlPolicy", [owner_element("Owner", owner), branch("AccessControlList", [grant])])


def objects_v1_document(request: ListRequest, page: ListPage, owner: str, names: Names) -> bytes:
    """ListBucketResult of ListObjects. NextMarker only where a delimiter was given, as S3 does."""
    parts = [leaf("Name", request.bucket), names.leaf("Prefix", request.prefix), names.leaf("Marker", request.after)]
    if request.delimiter and page.next_after is not None:
        parts.append(names.leaf("NextMarker", page.next_after))
    parts += [leaf("MaxKeys", request.max_keys), *names.delimiter(request.delimiter)]
    parts += [flag("IsTruncated", page.next_after is not None), *names.encoding()]
    parts += [branch("Contents", _listed(info, owner, names)) for info in page.objects]
    return document("ListBucketResult", [*parts, *names.common(page.common_prefixes)])


def objects_v2_document(
    request: ListRequest, page: ListPage, owner: str | None, parameters: dict[str, str], names: Names
) -> bytes:
    """ListBucketResult of ListObjectsV2. Token and start of `parameters` are echoed; `owner` where it was asked for."""
    parts = [leaf("Name", request.bucket), names.leaf("Prefix", request.prefix)]
    parts += [*names.delimiter(request.delimiter), leaf("MaxKeys", request.max_keys), *names.encoding()]
    parts.append(leaf("KeyCount", len(page.objects) + len(page.common_prefixes)))
    parts.append(flag("IsTruncated", page.next_after is not None))
    if "continuation-token" in parameters:
        parts.append(leaf("ContinuationToken", parameters["continuation-token"]))
    if "start-after" in parameters:
        parts.append(names.leaf("StartAfter", parameters["start-after"]))
    if page.next_after is not None:
        parts.append(leaf("NextContinuationToken", continuation_token(page.next_after)))
    parts += [branch("Contents", _listed(info, owner, names)) for info in page.objects]
    return document("ListBucketResult", [*parts, *names.common(page.common_prefixes)])


def versions_document(
    request: ListRequest, page: ListPage, owner: str, key_marker: str, version_marker: str, names: Names
) -> bytes:
    """ListVersionsResult of a bucket without versions: each object is its own latest, called null."""
    parts = [leaf("Name", request.bucket), names.leaf("Prefix", request.prefix)]
    parts += [names.leaf("KeyMarker", key_marker), leaf("VersionIdMarker", version_marker)]
    if page.next_after is not None:
        parts.append(names.leaf("NextKeyMarker", page.next_after))
        if page.objects and page.objects[-1].key == page.next_after:
            parts.append(leaf("NextVersionIdMarker", NULL_VERSION))
    parts += [leaf("MaxKeys", request.max_keys), *names.delimiter(request.delimiter)]
    parts += [flag("IsTruncated", page.next_after is not None), *names.encoding()]
    version = [leaf("VersionId", NULL_VERSION), flag("IsLatest", True)]
    parts += [branch("Version", [*_listed(info, owner, names), *version]) for info in page.objects]
    return document("ListVersionsResult", [*parts, *names.common(page.common_prefixes)])


@dataclass(frozen=True, slots=True)
class DeleteFailure:
    """The reason why one of many keys was not deleted."""

    key: str
    version_id: str | None
    code: str
    message: str


def delete_document(deleted: list[tuple[str, str | None]], failures: list[DeleteFailure]) -> bytes:
    """DeleteResult: the deleted keys as (key, version asked for), and the failures."""
    parts = [branch("Deleted", _versioned(key, version_id)) for key, version_id in deleted]
    for failure in failures:
        named = _versioned(failure.key, failure.version_id)
        parts.append(
            branch("Error", [*named, legible_leaf("Code", failure.code), legible_leaf("Message", failure.message)])
        )
    return document("DeleteResult", parts)


def tagging_document(tags: dict[str, str]) -> bytes:
    """Tagging."""
    listed = [branch("Tag", [leaf("Key", name), leaf("Value", value)]) for name, value in sorted(tags.items())]
    return document("Tagging", [branch("TagSet", listed)])


def lifecycle_document(rules: list[LifecycleRule]) -> bytes:
    """LifecycleConfiguration."""
    return document("LifecycleConfiguration", [branch("Rule", _rule(rule)) for rule in rules])


def copy_document(name: str, etag: str, modified_at: float, checksum: Checksum | None) -> bytes:
    """CopyObjectResult or CopyPartResult."""
    parts = [leaf("LastModified", timestamp(modified_at)), leaf("ETag", f'"{etag}"')]
    return document(name, parts + checksum_elements(checksum))


def checksum_elements(checksum: Checksum | None) -> list[str]:
    """The checksum's element, such as ChecksumCRC32, and its type: of the whole object, or composite."""
    if checksum is None:
        return []
    return [leaf(f"Checksum{checksum.algorithm.value}", checksum.value), leaf("ChecksumType", checksum.type.value)]


def continuation_token(after: str) -> str:
    """An opaque token from which the next page continues."""
    return base64.urlsafe_b64encode(after.encode()).decode()


def owner_element(name: str, owner: str) -> str:
    """Owner or Initiator: an access key."""
    return branch(name, [_owner(owner)])


def _owner(owner: str) -> str:
    return leaf("ID", owner) + leaf("DisplayName", owner)


def _listed(info: ObjectInfo, owner: str | None, names: Names) -> list[str]:
    parts = [
        names.leaf("Key", info.key),
        leaf("LastModified", timestamp(info.modified_at)),
        leaf("ETag", f'"{info.etag}"'),
    ]
    if info.checksum is not None:
        parts.append(leaf("ChecksumAlgorithm", info.checksum.algorithm.value))
        parts.append(leaf("ChecksumType", info.checksum.type.value))
    parts.append(leaf("Size", info.nbytes))
    if owner is not None:
        parts.append(owner_element("Owner", owner))
    parts.append(leaf("StorageClass", info.attributes.storage_class))
    return parts


def _versioned(key: str, version_id: str | None) -> list[str]:
    return [leaf("Key", key)] if version_id is None else [leaf("Key", key), leaf("VersionId", version_id)]


def _rule(rule: LifecycleRule) -> list[str]:
    parts = []
    if rule.expire_days is not None:
        parts.append(branch("Expiration", [leaf("Days", rule.expire_days)]))
    elif rule.expire_at is not None:
        midnight = datetime.fromtimestamp(rule.expire_at, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        parts.append(branch("Expiration", [leaf("Date", midnight)]))
    covered = leaf("Prefix", rule.prefix) if rule.legacy_prefix else branch("Filter", _filter(rule))
    parts += [leaf("ID", rule.rule_id), covered]
    parts.append(leaf("Status", "Enabled" if rule.enabled else "Disabled"))
    if rule.abort_days is not None:
        parts.append(branch("AbortIncompleteMultipartUpload", [leaf("DaysAfterInitiation", rule.abort_days)]))
    return parts


def _filter(rule: LifecycleRule) -> list[str]:
    terms = [leaf("Prefix", rule.prefix)] if rule.prefix else []
    terms += [branch("Tag", [leaf("Key", name), leaf("Value", value)]) for name, value in rule.tags.items()]
    if rule.larger_than is not None:
        terms.append(leaf("ObjectSizeGreaterThan", rule.larger_than))
    if rule.smaller_than is not None:
        terms.append(leaf("ObjectSizeLessThan", rule.smaller_than))
    if not terms:
        return [leaf("Prefix", "")]
    return terms if len(terms) == 1 else [branch("And", terms)]
