"""S3's XML documents."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from urllib.parse import quote
from xml.etree.ElementTree import Element, SubElement, tostring

from descriptors.errors import ObjectCacheError
from descriptors.storage_api import BucketInfo, ListPage, ListRequest

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def error_document(error: ObjectCacheError, resource: str, request_id: str) -> bytes:
    """S3's Error document, with the field that was wrong and the first bad chunk where there is one."""
    root = Element("Error")
    _add(root, "Code", error.code.value)
    _add(root, "Message", error.message)
    if error.field is not None:
        _add(root, "ArgumentName", error.field)
    if error.index is not None:
        _add(root, "ChunkIndex", str(error.index))
    if error.layer is not None:
        _add(root, "LayerIndex", str(error.layer))
    _add(root, "Resource", resource)
    _add(root, "RequestId", request_id)
    return _document(root)


def buckets_document(owner: str, buckets: list[BucketInfo]) -> bytes:
    """ListAllMyBucketsResult."""
    root = Element("ListAllMyBucketsResult", xmlns=NAMESPACE)
    _owner(root, owner)
    listed = SubElement(root, "Buckets")
    for bucket in buckets:
        entry = SubElement(listed, "Bucket")
        _add(entry, "Name", bucket.name)
        _add(entry, "CreationDate", timestamp(bucket.created_at))
    return _document(root)


def objects_document(request: ListRequest, page: ListPage, owner: str | None, parameters: dict[str, str]) -> bytes:
    """ListBucketResult of ListObjectsV2. `parameters` are echoed; `owner` is shown when it was asked for."""
    url_encoded = parameters.get("encoding-type") == "url"

    def text(value: str) -> str:
        return quote(value, safe="/-_.~*") if url_encoded else value

    root = Element("ListBucketResult", xmlns=NAMESPACE)
    _add(root, "Name", request.bucket)
    _add(root, "Prefix", text(request.prefix))
    if request.delimiter:
        _add(root, "Delimiter", text(request.delimiter))
    _add(root, "MaxKeys", str(request.max_keys))
    if url_encoded:
        _add(root, "EncodingType", "url")
    _add(root, "KeyCount", str(len(page.objects) + len(page.common_prefixes)))
    _add(root, "IsTruncated", "false" if page.next_after is None else "true")
    for name, element in (("continuation-token", "ContinuationToken"), ("start-after", "StartAfter")):
        if name in parameters:
            _add(root, element, text(parameters[name]) if name == "start-after" else parameters[name])
    if page.next_after is not None:
        _add(root, "NextContinuationToken", continuation_token(page.next_after))
    for info in page.objects:
        entry = SubElement(root, "Contents")
        _add(entry, "Key", text(info.key))
        _add(entry, "LastModified", timestamp(info.modified_at))
        _add(entry, "ETag", f'"{info.etag}"')
        _add(entry, "Size", str(info.nbytes))
        if owner is not None:
            _owner(entry, owner)
        _add(entry, "StorageClass", "STANDARD")
    for prefix in page.common_prefixes:
        _add(SubElement(root, "CommonPrefixes"), "Prefix", text(prefix))
    return _document(root)


def continuation_token(after: str) -> str:
    """An opaque token that says where the next page starts."""
    return base64.urlsafe_b64encode(after.encode()).decode()


def timestamp(unix_s: float) -> str:
    """ISO 8601 in UTC with milliseconds, as S3 writes it."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _owner(parent: Element, owner: str) -> None:
    element = SubElement(parent, "Owner")
    _add(element, "ID", owner)
    _add(element, "DisplayName", owner)


def _add(parent: Element, name: str, text: str) -> None:
    SubElement(parent, name).text = _NOT_XML.sub("\ufffd", text)


def _document(root: Element) -> bytes:
    return bytes(tostring(root, encoding="UTF-8", xml_declaration=True))
