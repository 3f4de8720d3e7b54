"""Signs requests to S3-compatible storage (AWS Signature Version 4). Pure: the time is an argument, nothing is sent."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote

EMPTY_HASH = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """The credentials and the region. Never printed: anyone with the secret can act as its owner."""

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
