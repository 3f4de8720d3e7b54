"""Values that JSON lacks travel between tasks and come back as they were."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from evertick.attempts.body import encode_result
from evertick.attempts.typed_json import from_plain
from evertick.domain.errors import ResultLost
from evertick.sdk.runtime import Outputs, part_of
from evertick.storage.result_files import ResultFiles


class Colour(Enum):
    RED = 1
    BLUE = "b"


@dataclass(frozen=True)
class Point:
    x: Decimal
    when: datetime
    length: int = field(init=False, default=0)

    class Kind(Enum):
        NEAR = 1


@dataclass
class Line:
    points: list[Point]
    tags: set[str] = field(default_factory=set)


class Order(BaseModel):
    model_config = ConfigDict(strict=True)
    number: UUID
    placed: datetime
    total: Decimal


def no_file(_digest: str, _size: int) -> str:
    raise AssertionError("there is no file")


def back(value: object) -> Any:
    encoded = encode_result(value)
    assert encoded.refusal is None
    return from_plain(json.loads(encoded.text or "null"), no_file)


BERLIN = ZoneInfo("Europe/Berlin")
MOMENT = datetime(2026, 10, 25, 2, 30, 0, 123456, tzinfo=BERLIN)
VALUES: list[Any] = [
    MOMENT,
    MOMENT.replace(fold=1),
    datetime(2026, 3, 29, 2, 30, tzinfo=BERLIN),  # no clock shows it
    datetime(2030, 1, 1, tzinfo=UTC),
    datetime(2030, 1, 1, 5, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
    datetime(2030, 1, 1),
    date(2030, 2, 28),
    time(12, 30, 0, 5),
    time(12, 30, tzinfo=UTC),
    time(12, 30, tzinfo=BERLIN),
    timedelta(days=-3, microseconds=7),
    Decimal("1.50"),
    Decimal("-Infinity"),
    UUID("12345678-1234-5678-1234-567812345678"),
    b"\x00\xff",
    {1, 2, 3},
    frozenset({"a"}),
    {Decimal("1"), Decimal("2")},
    Colour.BLUE,
    Point.Kind.NEAR,
    {date(2030, 1, 1): 3, "x": Colour.RED},
    Point(Decimal("2"), MOMENT),
    Line([Point(Decimal("2"), datetime(2030, 1, 1))], {"a", "b"}),
    Order(number=UUID(int=5), placed=datetime(2030, 1, 1, tzinfo=UTC), total=Decimal("9.99")),
    {"$evertick": "decimal", "value": "no number of ours"},
    {"a": [{"$evertick": "file", "sha256": "0", "bytes": 1}]},
    "the text $evertick",
    {"deep": [{"list": [Decimal("1"), {"set": {1}}]}]},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = back(value)
    assert found == value
    assert type(found) is type(value)
    if isinstance(value, datetime):
        assert (found.utcoffset(), str(found.tzinfo)) == (value.utcoffset(), str(value.tzinfo))


SIMPLE = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
# Every kind beside and within every other is met with these; a hundred, the default, take five times as long.
LEAVES = 20
PLAIN = st.recursive(
    SIMPLE, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("$evertick"), inner), max_leaves=LEAVES
)
TYPED = st.recursive(
    SIMPLE
    | st.datetimes(timezones=st.none() | st.timezones())
    | st.dates()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.binary()
    | st.uuids(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("$evertick") | st.dates(), inner),
    max_leaves=LEAVES,
)


@settings(max_examples=100)
@given(TYPED)
def test_whatever_is_made_of_such_values_comes_back(value: Any) -> None:
    encoded = encode_result(value, max_bytes=10**9)
    if encoded.replaced_count == 0 and value is not None:
        assert from_plain(json.loads(encoded.text or ""), no_file) == value


@settings(max_examples=100)
@given(PLAIN)
def test_a_plain_value_is_plain_json(value: Any) -> None:
    """Whoever reads the database or the API sees it as it is, unless it has our own mark in it."""
    encoded = encode_result(value, max_bytes=10**9)
    if value is not None and encoded.replaced_count == 0 and "$evertick" not in (encoded.text or ""):
        assert json.loads(encoded.text or "") == value


def test_what_json_knows_by_another_name_is_plain() -> None:
    assert encode_result({"t": (1, 2), "o": OrderedDict(a=1)}).text == '{"t":[1,2],"o":{"a":1}}'


def test_a_class_that_nobody_can_import_is_refused_when_it_is_returned() -> None:
    @dataclass
    class Local:
        x: int

    refusal = encode_result([Local(1)]).refusal or ""
    assert "result[0] is of the class" in refusal
    assert "not at the top level of a module" in refusal


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"$evertick": "dataclass", "class": "subprocess:Popen", "value": {"args": "true"}}, "not of the kind"),
        ({"$evertick": "pydantic", "class": "subprocess:Popen", "value": {}}, "not of the kind"),
        ({"$evertick": "enum", "class": "os:system", "value": "x"}, "not of the kind"),
        ({"$evertick": "dataclass", "class": "no.such.module:X", "value": {}}, "cannot be imported here"),
        ({"$evertick": "dataclass", "class": f"{__name__}:Gone", "value": {}}, "cannot be imported here"),
        ({"$evertick": "dataclass", "class": f"{__name__}:Point", "value": {"y": 1}}, "cannot be read as"),
        ({"$evertick": "enum", "class": f"{__name__}:Colour", "value": "GREEN"}, "cannot be read as"),
        ({"$evertick": "decimal", "value": "x"}, "cannot be read as decimal"),
        ({"$evertick": "newer", "value": "x"}, "does not know"),
    ],
)
def test_what_cannot_be_made_is_said_and_nothing_is_called(stored: object, words: str) -> None:
    with pytest.raises(ResultLost, match=words):
        from_plain(stored, no_file)


def test_named_outputs_travel_with_what_was_returned() -> None:
    encoded = encode_result([1], pushed={"rows": Decimal("5"), "who": "x"})
    found = from_plain(json.loads(encoded.text or ""), no_file)
    assert found == Outputs([1], {"rows": Decimal("5"), "who": "x"})
    assert part_of("t", found, ()) == [1]
    assert part_of("t", found, ("rows",)) == Decimal("5")
    assert part_of("t", found, (0,)) == 1
    assert part_of("t", None, ("rows",)) is None
    with pytest.raises(ResultLost, match="the result of task 't' has no 'b'; it has: 'a'"):
        part_of("t", {"a": 1}, ("b",))


def test_an_output_that_cannot_be_stored_is_named() -> None:
    assert "output 'rows'[0] is of type object" in (encode_result(None, pushed={"rows": [object()]}).refusal or "")


# Files ------------------------------------------------------------------------------------------------------


def test_a_large_result_is_a_file_that_is_checked_when_it_is_read(tmp_path: Path) -> None:
    files = ResultFiles(folder=str(tmp_path / "results"))
    reference = json.loads(files.put(7, '["ä"]'))
    digest, size = reference["sha256"], reference["bytes"]
    assert (reference["$evertick"], size) == ("file", 6)
    assert files.get(7, digest, size) == '["ä"]'
    (path,) = (tmp_path / "results" / "7").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(files.put(7, '["ä"]')) == reference
    path.write_text('["a "]')
    with pytest.raises(ResultLost, match="was changed"):
        files.get(7, digest, size)
    path.unlink()
    with pytest.raises(ResultLost, match="EVERTICK_RESULTS_FOLDER"):
        files.get(7, digest, size)
