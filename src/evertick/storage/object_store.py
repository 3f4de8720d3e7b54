"""S3-compatible object storage: put, get, list and remove, over HTTP with the standard library. Blocking; call it in a thread.

Each object is sent with the hash of its content, so that the server refuses content damaged on the way, and is named by it, so
that putting it twice is harmless. Must never expose the secret key.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from evertick.config import Settings
from evertick.domain.errors import ResultLost, StorageUnavailable
from evertick.storage.s3_signature import EMPTY_HASH, Signer, encoded_query

# Timeout of one response, not of the whole transfer: it continues as long as bytes arrive.
ANSWER_SECONDS = 20.0
# Timeout of a complete partial read, because a user waits for it.
PART_SECONDS = 60.0
PIECE_BYTES = 1024 * 1024
_MOST_ERROR_BYTES = 4096


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
        size, path = os.fstat(body.fileno()).st_size, self._path(name)
        headers = self._signed("PUT", path, {"content-length": str(size)}, content_hash=content_hash)
        with self._asked(self._connection(), "PUT", path, headers, body) as answer:
            _read(answer, None, self.place)

    def put_bytes(self, name: str, body: bytes) -> None:
        """Put a small object within one response timeout, so that nothing arrives long after the caller has timed out."""
        path, digest = self._path(name), hashlib.sha256(body).hexdigest()
        headers = self._signed("PUT", path, {"content-length": str(len(body))}, content_hash=digest)
        with self._asked(self._connection(), "PUT", path, headers, body) as answer:
            _read(answer, None, self.place)

    def has(self, name: str) -> bool:
        path = self._path(name)
        headers = self._signed("HEAD", path, {}, content_hash=EMPTY_HASH)
        try:
            with self._asked(self._connection(), "HEAD", path, headers) as answer:
                _read(answer, None, self.place)
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
        path, digest = self._path(name), hashlib.sha256()
        headers = self._signed("GET", path, {}, content_hash=EMPTY_HASH)
        with self._asked(self._connection(), "GET", path, headers) as answer:
            while piece := _read(answer, PIECE_BYTES, self.place):
                digest.update(piece)
                file.write(piece)
            self._refuse_rest(answer)
        if digest.hexdigest() != content_hash:
            raise ResultLost(f"{self.place}/{name} was changed. Clear the task that produced it.")

    def get_part(self, name: str, *, at: int, size: int) -> bytes:
        """Read a range of bytes, fewer at the end of the object. Not verified here: the caller knows the expected hash. Raises
        ResultLost if the object is missing or ends before the range."""
        path, give_up_at = self._path(name), time.monotonic() + PART_SECONDS
        headers = self._signed("GET", path, {"range": f"bytes={at}-{at + size - 1}"}, content_hash=EMPTY_HASH)
        found = bytearray()
        with self._asked(self._connection(), "GET", path, headers) as answer:
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
        self._remove(self._path(name))

    def folders(self, under: str) -> Iterator[str]:
        """The names directly below `under`, which ends with a slash."""
        for page in self._pages(under, delimiter="/"):
            for found in _texts(page, "Prefix", within="CommonPrefixes"):
                yield found.removeprefix(self._key(under)).rstrip("/")

    def remove_all(self, under: str) -> None:
        """Remove everything below `under`. Missing objects are not an error."""
        for page in self._pages(under):
            for key in _texts(page, "Key", within="Contents"):
                self._remove(f"/{self.bucket}/{quote(key, safe='/-_.~')}")

    def _remove(self, path: str) -> None:
        headers = self._signed("DELETE", path, {}, content_hash=EMPTY_HASH)
        with self._asked(self._connection(), "DELETE", path, headers) as answer:
            _read(answer, None, self.place)

    def _pages(self, under: str, **wanted: str) -> Iterator[ElementTree.Element]:
        query = {"list-type": "2", "prefix": self._key(under), **wanted}
        while True:
            path = f"/{self.bucket}"
            headers = self._signed("GET", path, {}, content_hash=EMPTY_HASH, query=query)
            with self._asked(self._connection(), "GET", f"{path}?{encoded_query(query)}", headers) as answer:
                page = _parsed(_read(answer, None, self.place), self.place)
            yield page
            onward = next(_texts(page, "NextContinuationToken"), None)
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

    def _signed(
        self, method: str, path: str, headers: dict[str, str], *, content_hash: str, query: dict[str, str] | None = None
    ) -> dict[str, str]:
        given, now = {"host": urlsplit(self.endpoint).netloc, **headers}, datetime.now(UTC)
        return self.signer.headers(method, path, query=query or {}, headers=given, content_hash=content_hash, now=now)

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.endpoint)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=ANSWER_SECONDS)

    def _asked(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        headers: dict[str, str],
        body: object = None,
    ) -> http.client.HTTPResponse:
        """A successful response, to be read and closed. Raises StorageUnavailable, or ResultLost if the object is missing."""
        try:
            # One request per connection: it closes with its response, even if that is not read completely.
            connection.request(method, path, body=body, headers={**headers, "connection": "close"})  # type: ignore[arg-type]
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
            raise ResultLost(f"{self.place}: there is no {path.partition('?')[0]}. Clear the task that produced it.")
        raise StorageUnavailable(f"{self.place} refused: {answer.status} {code[1] if code else answer.reason}")


def open_store(settings: Settings) -> ObjectStore | None:
    """The object storage of the settings, which are already validated."""
    if settings.storage is None:
        return None
    parts = urlsplit(settings.storage)
    endpoint = settings.storage_endpoint or f"https://s3.{settings.storage_region}.amazonaws.com"
    signer = Signer(
        key_id=settings.storage_key_id or "",
        secret_key=settings.storage_secret_key or "",
        region=settings.storage_region,
    )
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


def _texts(page: ElementTree.Element, name: str, *, within: str | None = None) -> Iterator[str]:
    """The texts of elements by local name: not every server declares the namespace."""
    parents = [page] if within is None else [each for each in page if _local(each) == within]
    for parent in parents:
        yield from (each.text for each in parent if _local(each) == name and each.text)


def _local(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]
