"""Parameters from a DAG's signature and from pydantic models."""

# ruff: noqa: B008

from __future__ import annotations

from enum import Enum
from typing import Literal, Optional

import pytest
from pydantic import BaseModel, Field

from evertick import Param, dag, task
from evertick.domain.dags.params import ParamType, check_params
from evertick.domain.errors import InvalidDag, InvalidParams
from evertick.sdk.runtime import TaskContext, entered


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


class Wanted(BaseModel):
    rows: int = Field(5, gt=0, le=10)
    code: str = Field(pattern="[A-Z]{3}", max_length=3, description="Of a country")
    size: Size = Size.SMALL
    tags: list[str] = Field(default_factory=list, max_length=2)
    note: str | None = "x"
    extra: dict[str, int] = {}


@task
def copy(rows: object, where: object = None) -> None: ...


def test_a_signature_declares_and_the_body_passes_on() -> None:
    @dag
    def d(
        rows: int = Param(100, minimum=1),  # type: ignore[assignment]
        region: Literal["eu", "us"] = Param("eu"),  # type: ignore[assignment]
        size: Size = Param("s"),  # type: ignore[assignment]
        note: Optional[str] = Param("n"),  # type: ignore[assignment]  # noqa: UP045
    ) -> None:
        copy(rows, [region])

    made = d()
    by_name = {param.name: param for param in made.spec.params}
    assert (by_name["rows"].type, by_name["rows"].minimum) == (ParamType.INTEGER, 1)
    assert by_name["region"].choices == ("eu", "us")
    assert by_name["size"].choices == ("s", "l")
    assert by_name["note"].nullable
    with entered(TaskContext(run_id=1, dag="d", task="copy", params={"rows": 7, "region": "us"})):
        assert made.tasks["copy"].call_arguments({}) == ((7, ["us"]), {})


def test_a_function_with_other_arguments_keeps_them() -> None:
    @dag(name="x")
    def make(table: str, rows: int = Param(1)) -> None:  # type: ignore[assignment]
        copy.override(name=f"copy_{table}")(rows)

    assert [each.name for each in make("orders").spec.tasks] == ["copy_orders"]
    with pytest.raises(InvalidDag, match="'rows' is a parameter of its runs"):
        make("orders", rows=5)


@pytest.mark.parametrize("use", [bool, list, str, lambda ref: ref == 1, lambda ref: ref + 1, lambda ref: f"{ref}"])
def test_a_parameter_cannot_be_computed_with_in_a_dags_function(use: object) -> None:
    @dag
    def d(rows: int = Param(100)) -> None:  # type: ignore[assignment]
        use(rows)  # type: ignore[operator]

    with pytest.raises(InvalidDag, match="param 'rows' is known only when a run starts"):
        d()


def test_what_cannot_be_declared_is_refused() -> None:
    with pytest.raises(InvalidDag, match="declared twice"):

        @dag(params={"rows": 1})
        def twice(rows: int = Param(1)) -> None: ...  # type: ignore[assignment]

    with pytest.raises(InvalidDag, match="a run parameter cannot have type"):

        @dag
        def strange(rows: bytes = Param(None)) -> None: ...  # type: ignore[assignment]

    with pytest.raises(InvalidDag, match="not a pydantic model"):
        dag(params=int)(lambda: None)


def test_a_model_is_checked_without_its_code() -> None:
    @dag(params=Wanted)
    def d() -> None:
        copy(1)

    declared = d().spec.params
    assert check_params(declared, {"code": "DEU", "note": None}) == {
        "code": "DEU",
        "extra": {},
        "note": None,
        "rows": 5,
        "size": "s",
        "tags": [],
    }
    for given, words in (
        ({}, "'code' is required"),
        ({"code": "de"}, "matches"),
        ({"code": "DEU", "rows": 0}, "at least 1"),
        ({"code": "DEU", "rows": 11}, "at most 10"),
        ({"code": "DEU", "size": "m"}, "one of 's', 'l'"),
        ({"code": "DEU", "tags": ["a", "b", "c"]}, "at most 2 items"),
        ({"code": "DEU", "extra": 5}, "an object"),
    ):
        with pytest.raises(InvalidParams, match=words):
            check_params(declared, given)


def test_a_bound_that_nobody_could_check_is_refused() -> None:
    class Odd(BaseModel):
        share: float = Field(0.5, gt=0)

    with pytest.raises(InvalidDag, match="use ge= and le= instead"):
        dag(params=Odd)(lambda: None)


@pytest.mark.parametrize(
    ("param", "words"),
    [
        (Param(1, min_length=1), "for texts and lists"),
        (Param("a", max_length=-1), "whole number"),
        (Param("a", pattern="("), "not a regular expression"),
        (Param("a" * 1001, pattern="a*"), "1,001 characters; with a pattern, at most 1,000"),
        (Param("a" * 1000, pattern="(a|aa)+b"), "takes too long on a text of 1,000 characters"),
        (Param(1, pattern="a"), "for texts"),
        (Param("abc", max_length=2), "at most 2 characters"),
        (Param("abc", pattern="x*"), r"matches x\*"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(param: Param, words: str) -> None:
    with pytest.raises(InvalidDag, match=words):
        dag(params={"p": param})(lambda: None)


def test_null_where_it_is_allowed() -> None:
    @dag(params={"a": Param("x", nullable=True), "b": "y"})
    def d() -> None:
        copy(1)

    declared = d().spec.params
    assert check_params(declared, {"a": None})["a"] is None
    with pytest.raises(InvalidParams, match="'b' is None"):
        check_params(declared, {"b": None})
