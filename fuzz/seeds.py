"""Well-formed inputs of each target, for the fuzzers to start from."""

from __future__ import annotations

from descriptors.descriptor import Delivery, Descriptor, RdmaTarget
from descriptors.descriptor_codec import encode_binary, encode_json
from descriptors.rdma_token import ObjectPath, RdmaToken, encode_token
from gateway.s3.aws_chunked import SignatureChain
from gateway.s3.payload_form import PayloadForm

_XMLNS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_SCOPE = "AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request"
_EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def seeds(target: str) -> list[bytes]:
    """Inputs that go deep into `target`."""
    return {
        "request": _requests(),
        "headers": [_HEADERS],
        "range": [b"bytes=0-9", b"bytes=5-", b"bytes=-3", b"bytes=0-1,3-4"],
        "host": [b"kvc.s3.example.com:9000", b"kvc.localhost", b"127.0.0.1", b"[::1]:9000"],
        "chunks": _chunks(),
        "form": [_FORM],
        "policy": [_POLICY],
        "descriptor": _descriptors(),
        "token": _tokens(),
        "xml_delete": [
            (
                f"<Delete {_XMLNS}><Quiet>true</Quiet><Object><Key>a</Key><VersionId>null</VersionId></Object></Delete>"
            ).encode()
        ],
        "xml_complete": [
            (
                f'<CompleteMultipartUpload {_XMLNS}><Part><PartNumber>1</PartNumber><ETag>"{"0" * 32}"</ETag>'
                "<ChecksumCRC32>AAAAAA==</ChecksumCRC32></Part></CompleteMultipartUpload>"
            ).encode()
        ],
        "xml_tagging": [
            f"<Tagging {_XMLNS}><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>".encode()
        ],
        "xml_lifecycle": [
            (
                f"<LifecycleConfiguration {_XMLNS}><Rule><ID>r</ID><Filter><And><Prefix>p</Prefix><Tag><Key>a</Key>"
                "<Value>b</Value></Tag></And></Filter><Status>Enabled</Status><Expiration><Days>1</Days></Expiration>"
                "<AbortIncompleteMultipartUpload><DaysAfterInitiation>2</DaysAfterInitiation>"
                "</AbortIncompleteMultipartUpload></Rule></LifecycleConfiguration>"
            ).encode()
        ],
        "xml_create_bucket": [
            (
                f"<CreateBucketConfiguration {_XMLNS}><LocationConstraint>us-east-1</LocationConstraint>"
                "</CreateBucketConfiguration>"
            ).encode()
        ],
        "xml_acl": [
            (
                f"<AccessControlPolicy {_XMLNS}><Owner><ID>owner</ID></Owner><AccessControlList><Grant>"
                '<Grantee xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:type="CanonicalUser">'
                "<ID>owner</ID></Grantee><Permission>FULL_CONTROL</Permission></Grant></AccessControlList></AccessControlPolicy>"
            ).encode()
        ],
    }[target]


_POLICY = (
    b'{"expiration": "2030-01-31T12:00:00.000Z", "conditions": [{"bucket": "b"}, ["starts-with", "$key", "k"],'
    b' ["content-length-range", 1, 100]]}'
)
_FORM = (
    b"multipart/form-data; boundary=x\n"
    b'--x\r\nContent-Disposition: form-data; name="key"\r\n\r\nk/${filename}\r\n'
    b'--x\r\nContent-Disposition: form-data; name="policy"\r\n\r\ne30=\r\n'
    b'--x\r\nContent-Disposition: form-data; name="X-Amz-Algorithm"\r\n\r\nAWS4-HMAC-SHA256\r\n'
    b'--x\r\nContent-Disposition: form-data; name="X-Amz-Credential"\r\n\r\nA/20130524/us-east-1/s3/aws4_request\r\n'
    b'--x\r\nContent-Disposition: form-data; name="X-Amz-Date"\r\n\r\n20130524T000000Z\r\n'
    b'--x\r\nContent-Disposition: form-data; name="X-Amz-Signature"\r\n\r\n0\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\nContent-Type: a/b\r\n\r\nbytes\r\n--x--\r\n'
)
_HEADERS = b"\n".join(
    (
        b"PUT /bucket/key?partNumber=1&response-content-type=text/plain HTTP/1.1",
        b"host:h",
        b"content-length:5",
        b"content-md5:XUFAKrxLKna5cZ2REBfFkg==",
        b"content-encoding:aws-chunked,gzip",
        b"x-amz-decoded-content-length:5",
        b"x-amz-checksum-crc32:AAAAAA==",
        b"x-amz-trailer:x-amz-checksum-crc32",
        b"x-amz-sdk-checksum-algorithm:CRC32",
        b"x-amz-meta-a:=?UTF-8?B?w6k=?=",
        b"x-amz-tagging:a=b&c=d",
        b"x-amz-storage-class:STANDARD",
        b"x-amz-copy-source:/b/k%20?versionId=null",
        b"x-amz-copy-source-range:bytes=0-9",
        b'if-match:"a", "b"',
        b"if-none-match:*",
        b"if-modified-since:Sat, 29 Oct 1994 19:43:31 GMT",
    )
)


def _requests() -> list[bytes]:
    names = "host;x-amz-content-sha256;x-amz-date"
    authorization = f"AWS4-HMAC-SHA256 Credential={_SCOPE},SignedHeaders={names},Signature={'0' * 64}"
    fields = f"host:kvc.localhost\nx-amz-content-sha256:{_EMPTY_SHA256}\nx-amz-date:20130524T000000Z"
    query = (
        f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={_SCOPE}&X-Amz-Date=20130524T000000Z&X-Amz-Expires=60"
        f"&X-Amz-SignedHeaders=host&X-Amz-Signature={'0' * 64}"
    )
    return [
        f"GET /bucket/key?list-type=2\n{fields}\nauthorization:{authorization}".encode(),
        f"GET /bucket/k%20y?{query}\nhost:h".encode(),
        b"GET /b?AWSAccessKeyId=k&Signature=s\nhost:h",
    ]


def _chunks() -> list[bytes]:
    forms = list(PayloadForm)
    trailer = b"x-amz-checksum-crc32:AAAAAA==\r\n\r\n"
    unsigned = bytes([5, forms.index(PayloadForm.UNSIGNED_CHUNKS_TRAILER), 1]) + b"5;a=b\r\nhello\r\n0\r\n" + trailer
    chain = SignatureChain(b"key", "20130524T000000Z", "scope", "0" * 64)
    hello = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    head = f"5;chunk-signature={chain.chunk(hello)}\r\nhello\r\n0;chunk-signature={chain.chunk(_EMPTY_SHA256)}\r\n\r\n"
    return [unsigned, bytes([5, forms.index(PayloadForm.SIGNED_CHUNKS), 3]) + head.encode()]


def _tokens() -> list[bytes]:
    text = encode_token(RdmaToken("agent-1", "region", 4096, 1 << 20, "request-0123456789", ObjectPath.BUFFER))
    fields = b'{"agent_id":"a","region_id":"kv","offset":0,"length":1,"request_id":"request-0123456789"}'
    return [text.encode(), fields]


def _descriptors() -> list[bytes]:
    target = RdmaTarget("agent-1", "region", 0, 1 << 20)
    plain = Descriptor(("k1", "k2"), 2, 16, 4096, Delivery.LAYER_MAJOR)
    aimed = Descriptor(("k1",), 1, 16, 4096, Delivery.AUTO, rdma_target=target, request_id="request-0123456789")
    return [encode(descriptor) for descriptor in (plain, aimed) for encode in (encode_binary, encode_json)]
