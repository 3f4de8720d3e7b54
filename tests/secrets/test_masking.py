"""Secrets are hidden however they are written."""

from __future__ import annotations

import base64
import html
import json
import shlex
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertick.secrets.masking import HIDDEN, Masker

SECRET = 'p@ss "wörd" $1/&='
FORMS = [
    SECRET,
    json.dumps(SECRET),
    json.dumps({"a": [SECRET]}, ensure_ascii=False),
    json.dumps(json.dumps({"a": SECRET})),
    json.dumps(repr(SECRET)),
    repr(SECRET),
    repr(SECRET.encode()),
    quote(SECRET),
    quote(SECRET, safe=""),
    quote_plus(SECRET),
    html.escape(SECRET),
    shlex.quote(SECRET),
    SECRET.encode().hex(),
    SECRET.encode().hex(":"),
    base64.b64encode(SECRET.encode()).decode(),
    base64.b64encode(f"user:{SECRET}".encode()).decode(),
    base64.b64encode(f"ab{SECRET}xyz".encode()).decode(),
    base64.urlsafe_b64encode(f"a{SECRET}".encode()).decode(),
    base64.b32encode(SECRET.encode()).decode(),
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_hidden(form: str) -> None:
    shown = Masker([SECRET]).hide(f"before {form} after")
    assert HIDDEN in shown
    assert shown.startswith("before ") and shown.endswith(" after")
    assert not any(form[i : i + 12] in shown for i in range(len(form) - 11))


def test_a_key_of_many_lines_is_hidden_line_by_line() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqh\nkiG9w0BAQEFAASCBKc\n-----END KEY-----\n"
    shown = "\n".join(Masker([key]).hide(line) for line in key.splitlines())
    assert shown == "\n".join([HIDDEN] * 4)


def test_what_is_too_short_is_left_alone() -> None:
    assert Masker(["a", "", "abc"]).hide("abc a") == "abc a"


def test_json_stays_json() -> None:
    masker = Masker(["12345", "token", "true"])
    text = json.dumps({"n": 12345, "token": ["my token", True], "x": 1.5})
    assert json.loads(masker.hide_json(text)) == {"n": HIDDEN, HIDDEN: [f"my {HIDDEN}", True], "x": 1.5}
    assert masker.hide_json('{"a": 1}') == '{"a": 1}'


@settings(max_examples=200)
@given(st.lists(st.integers(1, 30), max_size=20), st.text("ab", min_size=0, max_size=60))
def test_a_stream_shows_no_secret_wherever_it_is_cut(cuts: list[int], noise: str) -> None:
    secret = "abbaabab-secret"
    text, masker, shown, kept = f"{noise}{secret}{noise}{secret}", Masker([secret]), "", ""
    while text:
        size = cuts.pop() if cuts else 7
        part, text = text[:size], text[size:]
        done, kept = masker.hide_stream(kept + part)
        shown += done
    shown += masker.hide(kept)
    assert secret not in shown
    assert shown == f"{noise}{HIDDEN}{noise}{HIDDEN}"
