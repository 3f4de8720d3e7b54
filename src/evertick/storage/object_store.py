"""S3-compatible object storage: put, get, list and remove, over HTTP with the standard library. Blocking; call it in a thread.

Each object is sent with the hash of its content, so that the server refuses content damaged on the way, and is named by it, so
that putting it twice is harmless. Must never expose the secret key.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from evertick.config import Settings
from evertick.domain.errors import ResultLost, StorageUnavailable

EMPTY_HASH = hashlib.sha256(b"").hexdigest()
# Timeout of one response, not of the whole transfer: it continues as long as bytes arrive.
ANSWER_SECONDS = 20.0
# Timeout of a complete partial read, because a user waits for it.
PART_SECONDS = 60.0
PIECE_BYTES = 1024 * 1024
_MOST_ERROR_BYTES = 4096
NONE: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore:
    """One bucket and a prefix in it."""

    endpoint: str
    bucket: str
    prefix: str
    signer: Signer

    @property
    def place(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def put(self, name: str, file: Path, *, content_hash: str) -> None:
        with file.open("rb") as body:
            self.put_file(name, body, content_hash=content_hash)

    def put_file(self, name: str, body: BinaryIO, *, content_hash: str) -> None:
        """Put the complete content of an open file."""
        body.seek(0)
        headers = {"content-length": str(os.fstat(body.fileno()).st_size)}
        self._call("PUT", self._path(name), headers=headers, body=body, content_hash=content_hash)

    def put_bytes(self, name: str, body: bytes) -> None:
        """Put a small object within one response timeout, so that nothing arrives long after the caller has timed out."""
        headers, digest = {"content-length": str(len(body))}, hashlib.sha256(body).hexdigest()
        self._call("PUT", self._path(name), headers=headers, body=body, content_hash=digest)

    def has(self, name: str) -> bool:
        try:
            self._call("HEAD", self._path(name))
        except ResultLost:
            return False
        return True

    def get(self, name: str, into: Path, *, content_hash: str) -> None:
        """Download an object completely and verify it. Raises ResultLost if it is missing or was changed."""
        draft = into.with_name(f".{os.getpid()}-{os.urandom(4).hex()}")
        try:
            into.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                self.get_file(name, file, content_hash=content_hash)
            draft.rename(into)
        finally:
            with suppress(OSError):
                draft.unlink()

    def get_file(self, name: str, file: BinaryIO, *, content_hash: str) -> None:
        """The same into an open file, whose content is invalid if this raises."""
        digest = hashlib.sha256()
        with self._open("GET", self._path(name)) as answer:
            while piece := _read(answer, PIECE_BYTES, self.place):
                digest.update(piece)
                file.write(piece)
            self._refuse_rest(answer)
        if digest.hexdigest() != content_hash:
            raise ResultLost(f"{self.place}/{name} was changed. Clear the task that produced it.")

    def get_part(self, name: str, *, at: int, size: int) -> bytes:
        """Read a range of bytes, fewer at the end of the object. Not verified here: the caller knows the expected hash. Raises
        ResultLost if the object is missing or ends before the range."""
        found, give_up_at = bytearray(), time.monotonic() + PART_SECONDS
        with self._open("GET", self._path(name), headers={"range": f"bytes={at}-{at + size - 1}"}) as answer:
            # Some servers do not support ranges, and some that do return 200 instead of 206.
            start = 0 if answer.getheader("content-range") else at
            while len(found) < start + size and (piece := _read(answer, PIECE_BYTES, self.place)):
                found += piece
                if time.monotonic() > give_up_at:
                    raise StorageUnavailable(f"{self.place} is too slow: {len(found)} bytes in {PART_SECONDS:g} s")
            if len(found) < start + size:
                self._refuse_rest(answer)
        return bytes(found[start : start + size])

    def remove(self, name: str) -> None:
        """Remove the object. A missing object is not an error."""
        self._call("DELETE", self._path(name))

    def folders(self, under: str) -> Iterator[str]:
        """The names directly below `under`, which ends with a slash."""
        for page in self._pages(under, delimiter="/"):
            for found in _texts(page, "{*}CommonPrefixes/{*}Prefix"):
                yield found.removeprefix(self._key(under)).rstrip("/")

    def remove_all(self, under: str) -> None:
        """Remove everything below `under`. Missing objects are not an error."""
        for page in self._pages(under):
            for key in _texts(page, "{*}Contents/{*}Key"):
                self._call("DELETE", f"/{self.bucket}/{quote(key, safe='/-_.~')}")

    def _pages(self, under: str, **wanted: str) -> Iterator[ElementTree.Element]:
        query = {"list-type": "2", "prefix": self._key(under), **wanted}
        while True:
            page = _parsed(self._call("GET", f"/{self.bucket}", query=query), self.place)
            yield page
            onward = next(_texts(page, "{*}NextContinuationToken"), None)
            if onward is None:
                return
            query = {**query, "continuation-token": onward}

    def _refuse_rest(self, answer: http.client.HTTPResponse) -> None:
        """Raise if the response was truncated: `http.client` reports that only for responses read in one call."""
        if answer.length:
            raise StorageUnavailable(f"{self.place} broke off: {answer.length} bytes are missing")

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _path(self, name: str) -> str:
        return f"/{self.bucket}/{quote(self._key(name), safe='/-_.~')}"

    def _call(self, method: str, path: str, **request: Any) -> bytes:
        """The complete response."""
        with self._open(method, path, **request) as answer:
            return _read(answer, None, self.place)

    def _open(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] = NONE,
        query: Mapping[str, str] = NONE,
        body: BinaryIO | bytes | None = None,
        content_hash: str = EMPTY_HASH,
    ) -> http.client.HTTPResponse:
        """A successful response, to be read and closed. Raises StorageUnavailable, or ResultLost if the object is missing."""
        parts, now = urlsplit(self.endpoint), datetime.now(UTC)
        given = {"host": parts.netloc, **headers}
        signed = self.signer.headers(method, path, query=query, headers=given, content_hash=content_hash, now=now)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_SECONDS)
        target = f"{path}?{encoded_query(query)}" if query else path
        try:
            # One request per connection: it closes with its response, even if that is not read completely.
            connection.request(method, target, body=body, headers={**signed, "connection": "close"})
            answer = connection.getresponse()
            if answer.status < 300:
                return answer
            told = answer.read(_MOST_ERROR_BYTES).decode("utf-8", "replace")
        # A ValueError means an address or a key that cannot be sent at all.
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            raise StorageUnavailable(f"{self.place} cannot be reached: {error or type(error).__name__}") from None
        connection.close()
        code = re.search(r"<Code>(\w+)</Code>", told)
        # The response to a HEAD has no body that could tell whether the object or the bucket is missing.
        is_missing = answer.status == 404 and (
            method == "HEAD" or (method == "GET" and code is not None and code[1] == "NoSuchKey")
        )
        if is_missing or answer.status == 416:
            raise ResultLost(f"{self.place}: there is no {path}. Clear the task that produced it.")
        raise StorageUnavailable(f"{self.place} refused: {answer.status} {code[1] if code else answer.reason}")


def open_store(settings: Settings) -> ObjectStore | None:
    """The object storage of the settings, which are already validated."""
    if settings.storage is None:
        return None
    parts = urlsplit(settings.storage)
    endpoint = settings.storage_endpoint or f"https://s3.{settings.storage_region}.amazonaws.com"
    key_id, secret_key = settings.storage_key_id or "", settings.storage_secret_key or ""
    signer = Signer(key_id=key_id, secret_key=secret_key, region=settings.storage_region)
    return ObjectStore(endpoint=endpoint.rstrip("/"), bucket=parts.netloc, prefix=parts.path.strip("/"), signer=signer)


def _read(answer: http.client.HTTPResponse, most: int | None, place: str) -> bytes:
    try:
        return answer.read(most)
    except (OSError, http.client.HTTPException) as error:
        raise StorageUnavailable(f"{place} broke off: {error or type(error).__name__}") from None


def _parsed(raw: bytes, place: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(raw)
    except ElementTree.ParseError as error:
        raise StorageUnavailable(f"{place} returned a response that is not a list: {error}") from None


def _texts(page: ElementTree.Element, path: str) -> Iterator[str]:
    """The texts of elements. The path names them in any namespace: not every server declares it."""
    return (each.text for each in page.iterfind(path) if each.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """AWS Signature Version 4. Pure: the time is an argument. Never printed: anyone with the secret can act as its owner."""

    key_id: str
    secret_key: str = field(repr=False)
    region: str

    def headers(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        content_hash: str,
        now: datetime,
    ) -> dict[str, str]:
        """`headers` plus the authentication headers. They must include the host; `path` is already encoded."""
        stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        signed = {name.lower(): value.strip() for name, value in headers.items()}
        signed |= {"x-amz-content-sha256": content_hash, "x-amz-date": stamp}
        names = ";".join(sorted(signed))
        lines = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
        asked = "\n".join((method, path, encoded_query(query), lines, names, content_hash))
        scope = f"{day}/{self.region}/s3/aws4_request"
        text = "\n".join(("AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(asked.encode()).hexdigest()))
        key = f"AWS4{self.secret_key}".encode()
        for part in (day, self.region, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.new(key, text.encode(), "sha256").hexdigest()
        who = f"AWS4-HMAC-SHA256 Credential={self.key_id}/{scope},SignedHeaders={names},Signature={signature}"
        return {**signed, "authorization": who}


def encoded_query(query: Mapping[str, str]) -> str:
    return "&".join(f"{quote(name, safe='-_.~')}={quote(query[name], safe='-_.~')}" for name in sorted(query))
