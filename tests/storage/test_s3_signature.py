"""Requests to object storage are signed as Amazon's documentation shows it."""

from __future__ import annotations

from datetime import UTC, datetime

from evertick.storage.object_store import EMPTY_HASH, Signer, encoded_query

SIGNER = Signer(
    key_id="AKIAIOSFODNN7EXAMPLE", secret_key="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", region="us-east-1"
)
AT, HOST = datetime(2013, 5, 24, tzinfo=UTC), {"Host": "examplebucket.s3.amazonaws.com"}


def signature(path: str, query: dict[str, str], **headers: str) -> str:
    made = SIGNER.headers("GET", path, query=query, headers={**HOST, **headers}, content_hash=EMPTY_HASH, now=AT)
    return made["authorization"].rpartition("Signature=")[2]


def test_a_get_is_signed_as_documented() -> None:
    found = signature("/test.txt", {}, Range="bytes=0-9")
    assert found == "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"


def test_a_list_is_signed_as_documented() -> None:
    found = signature("/", {"prefix": "J", "max-keys": "2"})
    assert found == "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"


def test_a_query_is_encoded_in_the_one_way_that_can_be_signed() -> None:
    assert encoded_query({"prefix": "a/b c", "list-type": "2"}) == "list-type=2&prefix=a%2Fb%20c"


def test_the_secret_is_not_shown() -> None:
    assert "bPxRfiCYEXAMPLEKEY" not in repr(SIGNER)
