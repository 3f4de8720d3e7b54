"""Declared parameters and the values that runs are started with."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from evertick.domain.dags.params import MAX_PARAMS_BYTES, Param, ParamType, check_params, declare_params, parse_param
from evertick.domain.errors import InvalidDag, InvalidParams

DECLARED = declare_params(
    {
        "rows": Param(100, minimum=1, maximum=1_000),
        "rate": Param(0.5, type=float),
        "mode": Param("fast", choices=["fast", "safe"], description="How careful to be"),
        "name": "x",
        "dry": False,
        "tables": ["a"],
        "extra": {"k": 1},
        "free": None,
        "limit": Param(type=int),
    }
)


def test_a_plain_value_declares_its_own_type() -> None:
    kinds = {spec.name: spec.type for spec in DECLARED}
    assert kinds == {
        "rows": ParamType.INTEGER,
        "rate": ParamType.NUMBER,
        "mode": ParamType.STRING,
        "name": ParamType.STRING,
        "dry": ParamType.BOOLEAN,
        "tables": ParamType.ARRAY,
        "extra": ParamType.OBJECT,
        "free": ParamType.ANY,
        "limit": ParamType.INTEGER,
    }


def test_defaults_fill_what_is_not_given() -> None:
    assert check_params(DECLARED, {"rows": 5}) == {
        "rows": 5,
        "rate": 0.5,
        "mode": "fast",
        "name": "x",
        "dry": False,
        "tables": ["a"],
        "extra": {"k": 1},
        "free": None,
        "limit": None,
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rows": 0}, "param 'rows' is 0, but must be an integer of at least 1 and at most 1000"),
        ({"rows": 1_001}, "at most 1000"),
        ({"rows": "5"}, "param 'rows' is '5', but must be an integer"),
        ({"rows": 5.0}, "must be an integer"),
        ({"rows": True}, "param 'rows' is True"),
        ({"rows": None}, "param 'rows' is None"),
        ({"rate": "fast"}, "must be a number"),
        ({"mode": "slow"}, "param 'mode' is 'slow', but must be one of 'fast', 'safe'"),
        ({"name": 3}, "must be a string"),
        ({"dry": 0}, "must be a boolean"),
        ({"tables": "a"}, "must be a list"),
        ({"extra": []}, "must be an object"),
        ({"free": {1, 2}}, "is not JSON"),
        ({"free": float("nan")}, "is not JSON"),
        ({"free": "\0"}, "contains a NUL character"),
        ({"free": "\ud800"}, "is not JSON"),
        ({"limit": "many"}, "param 'limit' is 'many', but must be an integer"),
        ({"row": 5}, "unknown param 'row' (did you mean 'rows'?)"),
        ({"zzz": 5}, "unknown param 'zzz' (known: dry, extra, free, limit, mode, name, rate, rows, tables)"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_what_is_allowed(given: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        check_params(DECLARED, given)
    assert expected in str(caught.value)


def test_every_wrong_value_is_named_at_once() -> None:
    with pytest.raises(InvalidParams) as caught:
        check_params(DECLARED, {"rows": 0, "mode": "slow", "odd": 1})
    assert all(name in str(caught.value) for name in ("'rows'", "'mode'", "'odd'"))


def test_unknown_values_are_passed_on_only_if_they_are_accepted() -> None:
    values = check_params(DECLARED, {"rows": 5, "odd one": [1, {"a": None}]}, accepts_unknown=True)
    assert values["odd one"] == [1, {"a": None}] and values["rows"] == 5
    for wrong, expected in (
        ({"rows": 0, "odd": 1}, "'rows'"),
        ({"odd": float("nan")}, "is not JSON"),
        ({"odd\0": 1}, "NUL"),
        ({"x" * 201: 1}, "more than 200 characters"),
        ({f"p{i}": 1 for i in range(201)}, "at most 200"),
        ({"odd": "x" * MAX_PARAMS_BYTES}, "bytes"),
    ):
        with pytest.raises(InvalidParams, match=expected):
            check_params(DECLARED, wrong, accepts_unknown=True)


def test_an_integer_is_a_number() -> None:
    assert check_params(DECLARED, {"rate": 2})["rate"] == 2


def test_a_required_parameter_must_be_given() -> None:
    declared = declare_params({"region": Param(type=str, required=True)})
    with pytest.raises(InvalidParams, match="param 'region' is required: a string"):
        check_params(declared, {})
    with pytest.raises(InvalidParams, match="is None"):
        check_params(declared, {"region": None})
    assert check_params(declared, {"region": "eu"}) == {"region": "eu"}


def test_values_are_bounded_in_size() -> None:
    with pytest.raises(InvalidParams, match="bytes"):
        check_params(DECLARED, {"name": "x" * MAX_PARAMS_BYTES})


def test_a_text_that_looks_like_an_escaped_nul_is_allowed() -> None:
    assert check_params(DECLARED, {"name": "\\u0000"})["name"] == "\\u0000"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"when": datetime(2030, 1, 1, tzinfo=UTC)}, "param 'when': datetime.datetime(2030"),
        ({"n": Param(5, maximum=3)}, "the default of param 'n' is 5"),
        ({"n": Param("x", type=int)}, "must be an integer"),
        ({"n": Param(1, type="whole")}, "type 'whole' is not one of"),
        ({"n": Param(1, type=bytes)}, "type <class 'bytes'> is not one of"),
        ({"n": Param("x", minimum=1)}, "minimum and maximum are for numbers"),
        ({"n": Param(1, minimum="0")}, "must be a number"),  # type: ignore[arg-type]
        ({"n": Param("a", choices="abc")}, "choices must be a list"),
        ({"n": Param("z", choices=["a"])}, "must be one of 'a'"),
        ({"n": Param("z", description=3)}, "description must be text"),  # type: ignore[arg-type]
        ({"two words": 1}, "param name 'two words'"),
        ({3: 1}, "param name 3"),
        ({f"p{i}": 1 for i in range(201)}, "at most 200"),
    ],
)
def test_a_wrong_declaration_is_refused(raw: Any, expected: str) -> None:
    with pytest.raises(InvalidDag) as caught:
        declare_params(raw)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("rows", "5", 5),
        ("rate", "0.25", 0.25),
        ("name", "5", "5"),
        ("name", '"quoted"', '"quoted"'),
        ("dry", "true", True),
        ("dry", "No", False),
        ("tables", '["a", "b"]', ["a", "b"]),
        ("extra", '{"k": [1]}', {"k": [1]}),
        ("free", "null", None),
        ("free", "hello", "hello"),
        ("free", "NaN", "NaN"),
        ("rows", "many", "many"),
    ],
)
def test_typed_text_becomes_the_declared_type(name: str, text: str, value: object) -> None:
    assert parse_param(DECLARED, name, text) == value


def test_typing_an_unknown_name_suggests_the_near_one() -> None:
    with pytest.raises(InvalidParams, match="did you mean 'rows'"):
        parse_param(DECLARED, "rowz", "5")
