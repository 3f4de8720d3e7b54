"""Return values as JSON that PostgreSQL can store."""

from __future__ import annotations

import json
import math
from enum import StrEnum

import pytest

from evertick.attempts.body import encode_result
from evertick.attempts.protocol import json_encoder


def test_a_value_becomes_compact_json_with_its_characters_kept() -> None:
    encoded = encode_result({"name": "Zoë 🎉", "rows": [1, 2.5, None, True]})
    assert encoded.text == '{"name":"Zoë 🎉","rows":[1,2.5,null,true]}'
    assert (encoded.refusal, encoded.replaced_count) == (None, 0)


def test_none_is_no_result() -> None:
    assert encode_result(None).text is None


def test_nul_and_lone_surrogates_become_replacement_characters_and_are_counted() -> None:
    encoded = encode_result({"a\x00": ["x\udcffy", "\\u0000 as text", "🎉"]})
    assert json.loads(encoded.text or "") == {"a\ufffd": ["x\ufffdy", "\\u0000 as text", "🎉"]}
    assert encoded.replaced_count == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, [1, {"x": -math.inf}]])
def test_a_number_that_json_lacks_is_refused(value: object) -> None:
    assert "result cannot be stored as JSON" in (encode_result(value).refusal or "")


def test_a_refusal_names_the_place_and_the_type() -> None:
    refusal = encode_result({"rows": [1, object()]}).refusal or ""
    assert "result['rows'][1] is of type object" in refusal
    assert "return only dict" in refusal


def test_a_dict_with_tuple_keys_is_refused_by_name() -> None:
    assert "a dict with a key of type tuple" in (encode_result({(1, 2): 3}).refusal or "")


def test_a_result_over_the_limit_is_refused_with_its_size_and_what_to_do() -> None:
    refusal = encode_result("ä" * 600, max_bytes=1000).refusal or ""
    assert refusal.startswith("result too large: str of 1,202 bytes as JSON, at most 1,000 are kept")
    assert "return its location" in refusal


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert encode_result(loop).refusal is not None
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert "nested too deeply" in (encode_result(deep).refusal or "")


class Named(StrEnum):
    ONE = "one"


@pytest.mark.parametrize(
    "value", [None, True, 1, -2.5, 'ü\n"', [], {}, [1, [2.0, {"a": None}]], {"k": (1,)}, Named.ONE]
)
def test_the_quick_encoder_writes_what_the_library_writes(value: object) -> None:
    assert json_encoder(allow_nan=True)(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("refused", [[float("nan")], [[object()]], {"a": {1}}])
def test_the_quick_encoder_goes_on_after_a_refusal(refused: object) -> None:
    encode = json_encoder(allow_nan=False)
    for _ in range(3):
        with pytest.raises((TypeError, ValueError)):
            encode(refused)
        assert encode([{"a": [1.5]}]) == '[{"a":[1.5]}]'
