"""Masks secrets in an attempt's output: plain, escaped, in base64, in hex, and when they arrive in parts.

Masking happens before any truncation, so that no half of a secret is left at a cut.
"""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "***"
# Shorter values occur in many words by accident: masking them would protect nothing and ruin the text.
SHORTEST = 4


class Masker:
    def __init__(self, secrets: Iterable[str]) -> None:
        self._known: set[str] = set()
        self.add(secrets)

    def add(self, secrets: Iterable[str]) -> None:
        """Hide these from now on, too."""
        self._known |= {form for secret in secrets for part in _parts(secret) for form in _forms(part)}
        forms = sorted((form for form in self._known if len(form) >= SHORTEST), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, forms))) if forms else None
        self._longest = len(forms[0]) if forms else 0

    def hide(self, text: str) -> str:
        return self._pattern.sub(HIDDEN, text) if self._pattern is not None else text

    def hide_json(self, text: str) -> str:
        """JSON stays JSON: a number that is a secret becomes text."""
        return text if self.hide(text) == text else json.dumps(self._hidden(json.loads(text)), ensure_ascii=False)

    def hide_stream(self, text: str) -> tuple[str, str]:
        """The part of a continuing text that can be shown, and the end of it that may be the start of a secret."""
        hidden = self.hide(text)
        keep = min(len(hidden), max(0, self._longest - 1))
        return hidden[: len(hidden) - keep], hidden[len(hidden) - keep :]

    def _hidden(self, value: Any) -> Any:
        match value:
            case str():
                return self.hide(value)
            case dict():
                return {self.hide(key): self._hidden(item) for key, item in value.items()}
            case list():
                return [self._hidden(item) for item in value]
            case bool() | None:
                return value
            case _:
                shown = json.dumps(value)
                return value if self.hide(shown) == shown else HIDDEN


def _parts(secret: str) -> Iterator[str]:
    """The whole, and each of its lines: a multi-line key is often printed line by line."""
    yield secret
    stripped = secret.strip()
    if stripped != secret:
        yield stripped
    lines = [line.strip() for line in secret.splitlines()]
    if len(lines) > 1:
        yield from (line for line in lines if len(line) >= 2 * SHORTEST)


def _escaped(text: str) -> Iterator[str]:
    yield json.dumps(text)[1:-1]
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield repr(text)[1:-1]


def _forms(secret: str) -> Iterator[str]:
    if len(secret) < SHORTEST:
        return
    raw = secret.encode("utf-8", "surrogatepass")
    yield secret
    yield repr(raw)[2:-1]
    for escaped in _escaped(secret):
        yield escaped
        yield from _escaped(escaped)  # a document inside a text, as in a log of JSON lines
    yield from (html.escape(secret), quote(secret, safe=""), quote(secret), quote_plus(secret), shlex.quote(secret))
    yield from (raw.hex(), raw.hex().upper(), raw.hex(" "), raw.hex(":"))
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(3):
            # At any position in the encoded data: the characters that depend only on the secret.
            text = encode(b"\0" * before + raw).decode().rstrip("=")
            first = -(-before * 8 // 6)
            last = (before + len(raw)) * 8 // 6
            if last - first >= 2 * SHORTEST:
                yield text[first:last]
    yield base64.b32encode(raw).decode().rstrip("=")
