"""XML out against golden text, XML in against what strangers send."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import (
    Attributes,
    BucketInfo,
    Checksum,
    ChecksumAlgorithm,
    ChecksumType,
    ClaimedPart,
    ListPage,
    ListRequest,
    ObjectInfo,
    ObjectPart,
    PartInfo,
    PartPage,
    UploadInfo,
    UploadListRequest,
    UploadPage,
    UploadRef,
)
from gateway.s3 import xml, xml_uploads
from gateway.s3.markup import leaf
from gateway.s3.xml_in import (
    DeleteEntry,
    DeleteManifest,
    parse_acl,
    parse_complete,
    parse_create_bucket,
    parse_delete,
    parse_lifecycle,
    parse_tagging,
)
from gateway.s3.xml_tree import DEPTH_MAX, ELEMENTS_MAX

HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n'
IN_S3 = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
CRC = Checksum(ChecksumAlgorithm.CRC32, "AAAAAA==")
WHEN = 1_700_000_000.25
INFO = ObjectInfo("a&b", 5, "e7", WHEN, Attributes(storage_class="STANDARD_IA"), CRC)
OWNER = "<Owner><ID>me</ID><DisplayName>me</DisplayName></Owner>"
LISTED = (
    "<Key>a&amp;b</Key><LastModified>2023-11-14T22:13:20.250Z</LastModified><ETag>&quot;e7&quot;</ETag>"
    "<ChecksumAlgorithm>CRC32</ChecksumAlgorithm><ChecksumType>FULL_OBJECT</ChecksumType><Size>5</Size>"
)
IA = "<StorageClass>STANDARD_IA</StorageClass>"


def same(document: bytes, name: str, inside: str) -> None:
    assert document.decode() == f"{HEAD}<{name} {IN_S3}>{inside}</{name}>"


def test_buckets() -> None:
    document = xml.buckets_document("me", [BucketInfo("b", 0.0, "me")], "p", "t")
    same(
        document,
        "ListAllMyBucketsResult",
        f"{OWNER}<Buckets><Bucket><Name>b</Name><CreationDate>1970-01-01T00:00:00.000Z</CreationDate></Bucket></Buckets>"
        "<ContinuationToken>t</ContinuationToken><Prefix>p</Prefix>",
    )


def test_what_is_known_of_a_bucket() -> None:
    same(xml.location_document("us-east-1"), "LocationConstraint", "")
    same(xml.location_document("eu-west-1"), "LocationConstraint", "eu-west-1")
    same(xml.versioning_document(), "VersioningConfiguration", "")
    grantee = (
        '<Grantee xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:type="CanonicalUser">'
        "<ID>me</ID><DisplayName>me</DisplayName></Grantee>"
    )
    grant = f"<Grant>{grantee}<Permission>FULL_CONTROL</Permission></Grant>"
    same(xml.acl_document("me"), "AccessControlPolicy", f"{OWNER}<AccessControlList>{grant}</AccessControlList>")


def test_a_listing_of_either_version() -> None:
    request = ListRequest("b", "a", "/", "0", 2)
    page = ListPage([INFO], ["a/"], "a/")
    same(
        xml.objects_v1_document(request, page, "me", xml.Names(url_encoded=True)),
        "ListBucketResult",
        "<Name>b</Name><Prefix>a</Prefix><Marker>0</Marker><NextMarker>a/</NextMarker><MaxKeys>2</MaxKeys>"
        "<Delimiter>/</Delimiter><IsTruncated>true</IsTruncated><EncodingType>url</EncodingType>"
        f"<Contents>{LISTED.replace('a&amp;b', 'a%26b')}{OWNER}{IA}</Contents>"
        "<CommonPrefixes><Prefix>a/</Prefix></CommonPrefixes>",
    )
    parameters = {"continuation-token": "MA==", "start-after": "0"}
    same(
        xml.objects_v2_document(request, page, None, parameters, xml.Names()),
        "ListBucketResult",
        "<Name>b</Name><Prefix>a</Prefix><Delimiter>/</Delimiter><MaxKeys>2</MaxKeys><KeyCount>2</KeyCount>"
        "<IsTruncated>true</IsTruncated><ContinuationToken>MA==</ContinuationToken><StartAfter>0</StartAfter>"
        f"<NextContinuationToken>YS8=</NextContinuationToken><Contents>{LISTED}{IA}</Contents>"
        "<CommonPrefixes><Prefix>a/</Prefix></CommonPrefixes>",
    )


def test_versions() -> None:
    request = ListRequest("b", max_keys=1)
    same(
        xml.versions_document(request, ListPage([INFO], [], "a&b"), "me", "k", "null", xml.Names()),
        "ListVersionsResult",
        "<Name>b</Name><Prefix></Prefix><KeyMarker>k</KeyMarker><VersionIdMarker>null</VersionIdMarker>"
        "<NextKeyMarker>a&amp;b</NextKeyMarker><NextVersionIdMarker>null</NextVersionIdMarker><MaxKeys>1</MaxKeys>"
        f"<IsTruncated>true</IsTruncated><Version>{LISTED}{OWNER}{IA}"
        "<VersionId>null</VersionId><IsLatest>true</IsLatest></Version>",
    )


def test_deletions() -> None:
    failure = xml.DeleteFailure("c", "v", "NoSuchVersion", "why")
    same(
        xml.delete_document([("a", None), ("b", "null")], [failure]),
        "DeleteResult",
        "<Deleted><Key>a</Key></Deleted><Deleted><Key>b</Key><VersionId>null</VersionId></Deleted>"
        "<Error><Key>c</Key><VersionId>v</VersionId><Code>NoSuchVersion</Code><Message>why</Message></Error>",
    )


def test_uploads_and_parts() -> None:
    ref = UploadRef("b", "k", "u")
    named = "<Bucket>b</Bucket><Key>k</Key><UploadId>u</UploadId>"
    same(xml_uploads.created_document(ref), "InitiateMultipartUploadResult", named)
    same(
        xml_uploads.completed_document("http://h/b/a", "b", INFO),
        "CompleteMultipartUploadResult",
        "<Location>http://h/b/a</Location><Bucket>b</Bucket><Key>a&amp;b</Key><ETag>&quot;e7&quot;</ETag>"
        "<ChecksumCRC32>AAAAAA==</ChecksumCRC32><ChecksumType>FULL_OBJECT</ChecksumType>",
    )
    upload = UploadInfo("u", "k", WHEN, "me", "STANDARD", ChecksumAlgorithm.CRC32, ChecksumType.COMPOSITE)
    people = OWNER.replace("Owner", "Initiator") + OWNER
    kept = "<ChecksumAlgorithm>CRC32</ChecksumAlgorithm><ChecksumType>COMPOSITE</ChecksumType>"
    same(
        xml_uploads.parts_document(ref, PartPage(upload, [PartInfo(3, 7, "e", WHEN, CRC)], 3), 1, 1),
        "ListPartsResult",
        f"{named}<PartNumberMarker>1</PartNumberMarker><NextPartNumberMarker>3</NextPartNumberMarker>"
        "<MaxParts>1</MaxParts><IsTruncated>true</IsTruncated><Part><PartNumber>3</PartNumber>"
        "<LastModified>2023-11-14T22:13:20.250Z</LastModified><ETag>&quot;e&quot;</ETag><Size>7</Size>"
        f"<ChecksumCRC32>AAAAAA==</ChecksumCRC32></Part>{people}<StorageClass>STANDARD</StorageClass>{kept}",
    )
    request = UploadListRequest("b", "p", "/", "m", "i", 1)
    same(
        xml_uploads.uploads_document(request, UploadPage([upload], ["p/"], "k", "u"), xml.Names()),
        "ListMultipartUploadsResult",
        "<Bucket>b</Bucket><KeyMarker>m</KeyMarker><UploadIdMarker>i</UploadIdMarker><Prefix>p</Prefix>"
        "<Delimiter>/</Delimiter><NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>"
        "<MaxUploads>1</MaxUploads><IsTruncated>true</IsTruncated><Upload><Key>k</Key><UploadId>u</UploadId>"
        f"{people}<StorageClass>STANDARD</StorageClass><Initiated>2023-11-14T22:13:20.250Z</Initiated>{kept}</Upload>"
        "<CommonPrefixes><Prefix>p/</Prefix></CommonPrefixes>",
    )


def test_the_rest() -> None:
    same(
        xml.copy_document("CopyObjectResult", "e", WHEN, CRC),
        "CopyObjectResult",
        "<LastModified>2023-11-14T22:13:20.250Z</LastModified><ETag>&quot;e&quot;</ETag>"
        "<ChecksumCRC32>AAAAAA==</ChecksumCRC32><ChecksumType>FULL_OBJECT</ChecksumType>",
    )
    tags = "<TagSet><Tag><Key>a</Key><Value>1</Value></Tag></TagSet>"
    same(xml.tagging_document({"a": "1"}), "Tagging", tags)
    assert xml_uploads.object_parts_element([ObjectPart(1, 5, CRC), ObjectPart(2, 6)], 0, 1) == (
        "<ObjectParts><PartsCount>2</PartsCount><PartNumberMarker>0</PartNumberMarker>"
        "<NextPartNumberMarker>1</NextPartNumberMarker><MaxParts>1</MaxParts><IsTruncated>true</IsTruncated>"
        "<Part><PartNumber>1</PartNumber><Size>5</Size><ChecksumCRC32>AAAAAA==</ChecksumCRC32></Part></ObjectParts>"
    )


def test_errors_can_be_read_by_any_parser() -> None:
    """Whatever was in the request: a client that cannot read the error cannot report it."""
    error = CallerError(ErrorCode.NO_SUCH_KEY, "a <\x01\udcff> b", field="key", index=3)
    document = xml.error_document(error, "/b/\x02\x00", xml.ErrorContext("ID"))
    assert document.decode() == (
        f"{HEAD}<Error><Code>NoSuchKey</Code><Message>a &lt;\ufffd\ufffd&gt; b</Message>"
        "<ArgumentName>key</ArgumentName><ChunkIndex>3</ChunkIndex><Resource>/b/\ufffd\ufffd</Resource><RequestId>ID</RequestId></Error>"
    )
    ElementTree.fromstring(document)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
@example("\r\n\t &<>\"'")
def test_text_xml_can_hold_comes_back_and_the_rest_is_referenced(text: str) -> None:
    written = leaf("Key", text)
    representable = all(
        c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff" for c in text
    )
    if representable:
        assert (ElementTree.fromstring(written).text or "") == text
    written.encode().decode("utf-8")
    assert not any(c < " " and c not in "\t\n" for c in written)


def test_documents_are_read() -> None:
    delete = (
        f"<Delete {IN_S3}><Quiet>true</Quiet><Object><Key> a&#xD;b </Key><VersionId>null</VersionId></Object>"
        '<Object><Key>c</Key><ETag>"e"</ETag></Object></Delete>'
    )
    entries = [DeleteEntry(" a\rb ", "null"), DeleteEntry("c", None, "e")]
    assert parse_delete(delete.encode()) == DeleteManifest(entries, quiet=True)
    complete = (
        '<s3:CompleteMultipartUpload xmlns:s3="x"><s3:Part><s3:PartNumber> 2 </s3:PartNumber>'
        "<s3:ETag>&quot;e&quot;</s3:ETag><s3:ChecksumCRC32>AAAAAA==</s3:ChecksumCRC32></s3:Part>"
        "</s3:CompleteMultipartUpload>"
    )
    assert parse_complete(complete.encode()) == [ClaimedPart(2, "e", CRC)]
    tagging = "<Tagging><TagSet><Tag><Key>a</Key><Value/></Tag></TagSet></Tagging>"
    assert parse_tagging(tagging.encode()) == {"a": ""}
    assert parse_create_bucket(b"") == parse_create_bucket(b"<CreateBucketConfiguration/>") == ""
    parse_acl(xml.acl_document("me"), "me")
    with pytest.raises(CallerError) as error:
        parse_acl(xml.acl_document("me"), "you")
    assert error.value.code is ErrorCode.NOT_IMPLEMENTED


PARSERS: list[Callable[[bytes], object]] = [
    parse_delete,
    parse_complete,
    parse_tagging,
    parse_lifecycle,
    parse_create_bucket,
    lambda body: parse_acl(body, "me"),
]
BILLION = (
    b'<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    b"<Delete><Object><Key>&b;</Key></Object></Delete>"
)
FILE = b'<!DOCTYPE a [<!ENTITY a SYSTEM "file:///etc/passwd">]><Delete><Object><Key>&a;</Key></Object></Delete>'


@pytest.mark.parametrize(
    "body",
    [
        b"<",
        b"<a>",
        b"<a/><b/>",
        b"\xff\xfe<\0a\0/\0>\0",
        b"\xef\xbb\xbf<x/>",
        b'<?xml version="1.0" encoding="utf-7"?><a/>',
        b"<a>\xff</a>",
        b"<a>&#x1;</a>",
        b"<a>\x01</a>",
        BILLION,
        FILE,
        b"<!DOCTYPE a><a/>",
        b"<a>" * (DEPTH_MAX + 1) + b"</a>" * (DEPTH_MAX + 1),
        b"<Delete>" + b"<a/>" * ELEMENTS_MAX + b"</Delete>",
    ],
)
def test_what_is_no_document_of_s3s_is_malformed(body: bytes) -> None:
    for parse in PARSERS:
        with pytest.raises(CallerError) as error:
            parse(body)
        assert error.value.code is ErrorCode.MALFORMED_XML


NAMES = st.sampled_from(
    [
        "Delete",
        "Object",
        "Key",
        "VersionId",
        "Quiet",
        "ETag",
        "CompleteMultipartUpload",
        "Part",
        "PartNumber",
        "ChecksumCRC32",
        "Tagging",
        "TagSet",
        "Tag",
        "Value",
        "LifecycleConfiguration",
        "Rule",
        "ID",
        "Filter",
        "And",
        "Prefix",
        "Status",
        "Expiration",
        "Days",
        "Date",
        "AccessControlPolicy",
        "Owner",
        "AccessControlList",
        "Grant",
        "Grantee",
        "Permission",
        "CreateBucketConfiguration",
        "LocationConstraint",
        "Location",
    ]
)
TEXTS = st.sampled_from(["", "1", "0", "-1", "x", "Enabled", "true", "2030-01-01", "FULL_CONTROL", "\u00e9", "9" * 30])
TREES = st.recursive(
    st.builds(lambda name, text: f"<{name}>{text}</{name}>", NAMES, TEXTS),
    lambda inner: st.builds(lambda name, kids: f"<{name}>{''.join(kids)}</{name}>", NAMES, st.lists(inner, max_size=4)),
    max_leaves=12,
)


@given(TREES.map(str.encode) | st.binary(max_size=60))
def test_any_body_is_a_value_or_a_callers_error(body: bytes) -> None:
    for parse in PARSERS:
        try:
            parse(body)
        except CallerError as error:
            assert error.http_status in (400, 501)  # noqa: PT017 - not raising is fine as well
