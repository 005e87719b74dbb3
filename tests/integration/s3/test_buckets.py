"""Buckets: names, owners, places, versions that are not there, ACLs, and what is not implemented."""

from __future__ import annotations

import pytest

from tests.support.requests import OTHER, OWNER, READER
from tests.support.s3_calls import fresh_bucket, headers_of, refused, status_of
from tests.support.servers import Stack

ACL_OF_ALL = {"GrantRead": 'uri="http://acs.amazonaws.com/groups/global/AllUsers"'}
NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


@pytest.mark.parametrize(
    "name", ["ab", "a" * 64, "Upper", "under_score", "-dash", "dash-", "a..b", "a.-b", "192.168.0.1", "xn--b"]
)
def test_names_that_break_s3s_rules_are_refused(servers: Stack, name: str) -> None:
    reply = servers.request("PUT", f"/{name}")
    assert (reply.status, reply.code) == (400, "InvalidBucketName")


def test_a_bucket_is_made_once_and_deleted_when_empty(servers: Stack) -> None:
    s3, name = servers.s3(), fresh_bucket(servers)
    assert status_of(s3.create_bucket(Bucket=name)) == 200, "in us-east-1 S3 answers the owner as if it were new"
    assert refused(servers.s3(OTHER).create_bucket, Bucket=name) == (409, "BucketAlreadyExists")
    s3.put_object(Bucket=name, Key="k", Body=b"x")
    assert refused(s3.delete_bucket, Bucket=name) == (409, "BucketNotEmpty")
    s3.delete_object(Bucket=name, Key="k")
    assert status_of(s3.delete_bucket(Bucket=name)) == 204
    assert refused(s3.delete_bucket, Bucket=name) == (404, "NoSuchBucket")
    assert refused(s3.head_bucket, Bucket=name)[0] == 404


def test_every_question_about_a_missing_bucket_says_so(servers: Stack) -> None:
    """A tool must be able to tell a missing bucket from an empty answer."""
    s3 = servers.s3()
    for call in (
        s3.get_bucket_location,
        s3.get_bucket_versioning,
        s3.get_bucket_acl,
        s3.get_bucket_lifecycle_configuration,
        s3.list_objects,
        s3.list_objects_v2,
        s3.list_object_versions,
        s3.list_multipart_uploads,
        s3.delete_bucket,
    ):
        assert refused(call, Bucket="no-such-bucket") == (404, "NoSuchBucket")
    delete = {"Objects": [{"Key": "k"}]}
    assert refused(s3.delete_objects, Bucket="no-such-bucket", Delete=delete) == (404, "NoSuchBucket")
    delete = {"Objects": [{"Key": "k", "VersionId": "x"}]}
    assert refused(s3.delete_objects, Bucket="no-such-bucket", Delete=delete) == (404, "NoSuchBucket")


def test_a_bucket_is_in_the_configured_region_or_nowhere(servers: Stack) -> None:
    s3, name = servers.s3(), fresh_bucket(servers)
    assert s3.get_bucket_location(Bucket=name).get("LocationConstraint") is None
    assert headers_of(s3.head_bucket(Bucket=name))["x-amz-bucket-region"] == "us-east-1"
    place = "<LocationConstraint>{}</LocationConstraint>"
    here = f"<CreateBucketConfiguration {NAMESPACE}>{place}</CreateBucketConfiguration>"
    elsewhere = servers.request("PUT", f"/{name}-x", body=here.format("eu-west-1").encode())
    assert (elsewhere.status, elsewhere.code) == (400, "IllegalLocationConstraintException")
    assert servers.request("PUT", f"/{name}-y", body=here.format("us-east-1").encode()).status == 200
    assert servers.request("PUT", f"/{name}-z", body=b"<CreateBucketConfiguration/>").status == 200
    malformed = servers.request("PUT", f"/{name}-w", body=b"<Other/>")
    assert (malformed.status, malformed.code) == (400, "MalformedXML")


def test_buckets_are_listed_by_name_and_only_those_the_key_may_see(servers: Stack) -> None:
    names = sorted(fresh_bucket(servers) for _ in range(4))
    s3 = servers.s3()
    listed = s3.list_buckets()
    found = [bucket["Name"] for bucket in listed["Buckets"]]
    assert found == sorted(found)
    assert set(names) <= set(found)
    assert listed["Owner"]["ID"] == OWNER[0]
    assert [b["Name"] for b in s3.list_buckets(Prefix=names[1])["Buckets"]] == [names[1]]
    pages = s3.get_paginator("list_buckets").paginate(PaginationConfig={"PageSize": 3})
    assert [bucket["Name"] for page in pages for bucket in page["Buckets"]] == found
    assert refused(servers.s3(READER).list_buckets) == (403, "AccessDenied")


def test_versions_were_never_switched_on(servers: Stack) -> None:
    s3, name = servers.s3(), fresh_bucket(servers)
    assert "Status" not in s3.get_bucket_versioning(Bucket=name)
    for status in ("Enabled", "Suspended"):
        answer = refused(s3.put_bucket_versioning, Bucket=name, VersioningConfiguration={"Status": status})
        assert answer == (501, "NotImplemented")


def test_acls_say_what_is_so_and_take_nothing_else(servers: Stack) -> None:
    """A public-read that answered 200 would be a lie somebody relies on."""
    s3, name = servers.s3(), fresh_bucket(servers)
    acl = s3.get_bucket_acl(Bucket=name)
    assert acl["Owner"]["ID"] == OWNER[0]
    assert [(grant["Grantee"]["ID"], grant["Permission"]) for grant in acl["Grants"]] == [(OWNER[0], "FULL_CONTROL")]
    s3.put_bucket_acl(Bucket=name, ACL="private")
    s3.put_bucket_acl(Bucket=name, AccessControlPolicy={"Owner": acl["Owner"], "Grants": acl["Grants"]})
    assert refused(s3.put_bucket_acl, Bucket=name, ACL="public-read") == (501, "NotImplemented")
    assert refused(s3.put_bucket_acl, Bucket=name, **ACL_OF_ALL) == (501, "NotImplemented")
    read = [{**acl["Grants"][0], "Permission": "READ"}]
    answer = refused(s3.put_bucket_acl, Bucket=name, AccessControlPolicy={"Owner": acl["Owner"], "Grants": read})
    assert answer == (501, "NotImplemented")
    assert refused(s3.create_bucket, Bucket=f"{name}-p", ACL="public-read") == (501, "NotImplemented")
    s3.create_bucket(Bucket=f"{name}-q", ACL="private", ObjectOwnership="BucketOwnerEnforced")
    assert servers.request("PUT", f"/{name}?acl", headers={"x-amz-acl": "nonsense"}).code == "InvalidArgument"
    assert servers.request("PUT", f"/{name}?acl").code == "MissingRequestBodyError"


def test_what_buckets_cannot_do_is_not_implemented(servers: Stack) -> None:
    """Never silence, never a wrong success."""
    s3, name = servers.s3(), fresh_bucket(servers)
    for call in (
        s3.get_bucket_logging,
        s3.get_bucket_notification_configuration,
        s3.get_bucket_request_payment,
        s3.list_bucket_inventory_configurations,
        s3.delete_bucket_policy,
        s3.delete_bucket_tagging,
    ):
        assert refused(call, Bucket=name) == (501, "NotImplemented")
    assert refused(s3.create_bucket, Bucket=f"{name}-lock", ObjectLockEnabledForBucket=True) == (501, "NotImplemented")
    assert refused(s3.head_bucket, Bucket=f"{name}-lock")[0] == 404
    assert servers.request("POST", f"/{name}").code == "PreconditionFailed"  # an upload by HTML form has another type
    assert servers.request("GET", f"/{name}?acl&lifecycle").code == "InvalidArgument"


def test_the_expected_owner_is_compared(servers: Stack) -> None:
    """A caller who names the owner must never write into somebody else's bucket."""
    s3, name = servers.s3(), fresh_bucket(servers)
    s3.head_bucket(Bucket=name, ExpectedBucketOwner=OWNER[0])
    assert refused(s3.head_bucket, Bucket=name, ExpectedBucketOwner=OTHER[0])[0] == 403
    put = {"Bucket": name, "Key": "k", "Body": b"x"}
    assert refused(s3.put_object, **put, ExpectedBucketOwner=OTHER[0]) == (403, "AccessDenied")
    s3.put_object(**put, ExpectedBucketOwner=OWNER[0])
    copy = {"Bucket": name, "Key": "c", "CopySource": f"{name}/k"}
    assert refused(s3.copy_object, **copy, ExpectedSourceBucketOwner=OTHER[0]) == (403, "AccessDenied")
