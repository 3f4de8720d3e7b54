"""Named SQL statements of `queries/<noun>.sql` and stored functions, each declared once as the signature of a Python function.

A statement starts at `-- name: claim_batch`; the comment lines below it give the reason for its form. `@query` declares a
statement, `@sql_function` a stored function. The call, its casts and its result come from the signature, when it is declared.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import cache, partial, wraps
from pathlib import Path
from types import FunctionType, UnionType
from typing import Any, LiteralString, ParamSpec, TypeVar, get_args, get_origin, overload

import psycopg
from psycopg import AsyncConnection, AsyncCursor, errors
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, Loader
from psycopg.rows import AsyncRowFactory, RowMaker, class_row, scalar_row, tuple_row
from psycopg.types.composite import TupleDumper
from psycopg.types.json import Jsonb

from evertick.domain.access import Actor

SQL_DIRECTORY = Path(__file__).with_name("queries")
FUNCTIONS_DIRECTORY = Path(__file__).with_name("functions")


_NAME = re.compile(r"^--\s*name:\s*(\w+)\s*$")


def sql(noun: str, name: str) -> LiteralString:
    """The statement `name` of `queries/<noun>.sql`."""
    known = statements(noun)
    if name not in known:
        raise LookupError(f"queries/{noun}.sql has no statement {name!r}; it has: {', '.join(sorted(known)) or 'none'}")
    return known[name]


@cache
def statements(noun: str, directory: Path = SQL_DIRECTORY) -> dict[str, LiteralString]:
    """Every statement of one file, in the order of the file."""
    path = directory / f"{noun}.sql"
    if not path.is_file():
        known = ", ".join(nouns(directory)) or "none"
        raise LookupError(f"There is no {path.name} in {directory}; there is: {known}")
    return _split(path.read_text(encoding="utf-8"), path)


def nouns(directory: Path = SQL_DIRECTORY) -> list[str]:
    """The nouns that have a file of statements."""
    return sorted(path.stem for path in directory.glob("*.sql"))


def _split(text: str, path: Path) -> dict[str, LiteralString]:
    bodies: dict[str, list[str]] = {}
    current: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if match := _NAME.match(line):
            if match[1] in bodies:
                raise LookupError(f"{path.name}:{number} names {match[1]!r} a second time")
            current = bodies[match[1]] = []
        elif line.lstrip().startswith("--") or not line.strip():
            # Comments are left out: psycopg would read a per cent sign in one as a parameter.
            continue
        elif current is None:
            raise LookupError(f"{path.name}:{number} comes before any '-- name:' line")
        else:
            current.append(line)
    if empty := [name for name, lines in bodies.items() if not lines]:
        raise LookupError(f"{path.name} has nothing under {', '.join(empty)}")
    return {name: "\n".join(lines).rstrip().rstrip(";") for name, lines in bodies.items()}


T = TypeVar("T")


Params = Mapping[str, object]


class _Json(Loader):
    """Like psycopg's own loader, in a fifth of the time for an empty object: most params are empty, and every run row has some."""

    def load(self, data: Buffer) -> Any:
        # `json.loads` would detect the encoding of bytes first.
        text = str(data, "utf-8")
        return {} if text == "{}" else json.loads(text)


# How values are decoded on all our connections.
VALUES = AdaptersMap(psycopg.adapters)


VALUES.register_loader("json", _Json)


VALUES.register_loader("jsonb", _Json)


class _ActorDumper(TupleDumper):
    """As a row of the type `actor`."""

    def dump(self, obj: Any) -> Buffer | None:
        return super().dump((obj.name, obj.origin, obj.request_id))


VALUES.register_dumper(Actor, _ActorDumper)


def record_row(record: type[T]) -> AsyncRowFactory[T]:
    """Like psycopg's `class_row`, in half the time if the columns are in field order: it builds no dictionary per row."""
    named: AsyncRowFactory[T] = class_row(record)
    expected = [name.encode() for name in getattr(record, "__match_args__", ())]

    def make(cursor: AsyncCursor[Any]) -> RowMaker[T]:
        result = cursor.pgresult
        if result is None or [result.fname(number) for number in range(result.nfields)] != expected:
            return named(cursor)

        def in_order(values: Sequence[Any]) -> T:
            return record(*values)

        return in_order

    return make


async def all_rows(conn: AsyncConnection, statement: LiteralString, params: Params, record: type[T]) -> list[T]:
    async with conn.cursor(row_factory=record_row(record)) as cursor:
        await cursor.execute(statement, params)
        return await cursor.fetchall()


# Declarations -----------------------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")
Declared = Callable[P, Coroutine[Any, Any, R]]

_PLACEHOLDER = re.compile(r"%\((\w+)\)s(::jsonb\b)?")
_FUNCTION = re.compile(r"^create function (\w+)\((.*?)\)\s+(?:returns|language)\b", re.S | re.M)
_CALL = re.compile(r"select (?:[\w, ]+ from )?(\w+)\(%")
_PARAMETER = re.compile(r"(\w+) (.+?)(?: default .*)?")


@cache
def function_files(directory: Path) -> dict[str, LiteralString]:
    """The text of each file of stored functions, in load order. Read once: a process keeps the functions it started with."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(directory.glob("*.sql"))}


@cache
def functions() -> dict[str, dict[str, str]]:
    """The parameters of each stored function and their types, in order. `p_shard` is the parameter `shard`."""
    scripts = function_files(FUNCTIONS_DIRECTORY).values()
    return {found[1]: _parameters(found[2]) for script in scripts for found in _FUNCTION.finditer(script)}


def parameters_of(function: str) -> dict[str, str]:
    """As `functions` has them, which reads all: a command declares few functions, and all of them take 3 ms. Of several with
    this name it is the last."""
    head = f"\ncreate function {function}("
    for script in reversed(function_files(FUNCTIONS_DIRECTORY).values()):
        at = script.rfind(head)
        if at >= 0 and (found := _FUNCTION.match(script, at + 1)):
            return _parameters(found[2])
    raise LookupError(f"There is no stored function {function} in {FUNCTIONS_DIRECTORY}.")


def _parameters(text: str) -> dict[str, str]:
    given = (" ".join(each.split()) for each in text.split(","))
    found = (_PARAMETER.fullmatch(each) for each in given if not each.startswith("out "))
    return {each[1].removeprefix("p_"): each[2] for each in found if each is not None}


def function_call(name: str, count: int | None = None, columns: Sequence[str] = ()) -> LiteralString:
    """The call of a stored function with its first parameters, all by default; without columns it returns a value."""
    arguments = ", ".join(f"%({each})s::{cast_to}" for each, cast_to in list(parameters_of(name).items())[:count])
    call = f"select {', '.join(columns)} from {name}({arguments})" if columns else f"select {name}({arguments})"
    return call


def executed_name(query: object) -> str | None:
    """`noun.name` of a statement, or the name of the stored function that it calls."""
    if not isinstance(query, str):
        return None
    called = _CALL.match(query)
    return called[1] if called and called[1] in functions() else _names().get(query)


def known_names() -> list[str]:
    """The statements and stored functions that `executed_name` can name."""
    return [*_names().values(), *functions()]


def text_of(name: str) -> LiteralString:
    """The text of a statement, or the call of a stored function."""
    noun, _, statement = name.partition(".")
    return sql(noun, statement) if statement else function_call(name)


@cache
def _names() -> dict[str, str]:
    return {text: f"{noun}.{name}" for noun in nouns() for name, text in statements(noun).items()}


class Signature:
    """The parameters of a declaration after the connection, and its result."""

    def __init__(self, declared: Callable[..., object]) -> None:
        assert isinstance(declared, FunctionType)
        self._declared = declared
        code, last = declared.__code__, declared.__defaults__ or ()
        self.names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        self.positional = self.names[: code.co_argcount - 1]
        self.defaults = dict(zip(reversed(self.positional), reversed(last), strict=False))
        self.defaults |= declared.__kwdefaults__ or {}
        self.result = self._type_of("return")

    def _type_of(self, name: str) -> Any:
        return eval(self._declared.__annotations__[name], self._declared.__globals__)

    def records(self, wanted: Collection[str]) -> dict[str, list[str]]:
        """The parameters that are not wanted themselves: records, each with its fields that are."""
        types = {each: self._type_of(each) for each in self.names if each not in wanted}
        return {
            name: [field for field in field_names(each) if field in wanted and field not in self.names]
            for name, each in types.items()
        }


def field_names(record: Any) -> tuple[str, ...]:
    return getattr(record, "_fields", None) or tuple(getattr(record, "__dataclass_fields__", ()))


class Statement:
    """A statement with its declaration: binds arguments by name, executes, and returns what the declaration promises."""

    def __init__(self, text: LiteralString, signature: Signature, *, prepare: bool | None = None) -> None:
        found = _PLACEHOLDER.findall(text)
        wanted = {name for name, _ in found}
        self.text = text
        self._prepare = prepare
        self._positional, self._defaults = signature.positional, signature.defaults
        self._records = list(signature.records(wanted).items())
        self._documents = sorted({name for name, is_document in found if is_document})
        self._row_factory, self._fetch = _reader(signature.result)
        bound = {*signature.names, *(field for _, fields in self._records for field in fields)}
        unused = [name for name, fields in self._records if not fields]
        if wrong := [*unused, *(wanted - bound)]:
            raise LookupError(f"The declaration and the statement differ in {', '.join(wrong)}: {text}")

    def bind(self, args: Sequence[object], given: Mapping[str, object]) -> dict[str, Any]:
        values = {**self._defaults, **dict(zip(self._positional, args, strict=False)), **given}
        for name, fields in self._records:
            record = values.pop(name)
            for field in fields:
                values[field] = getattr(record, field)
        for name in self._documents:
            if isinstance(values[name], dict | list):
                values[name] = Jsonb(values[name])
        return values

    async def run(self, conn: AsyncConnection, values: Params) -> Any:
        cursor = conn.cursor(row_factory=self._row_factory)
        await cursor.execute(self.text, values, prepare=self._prepare)
        return None if self._fetch is None else await self._fetch(cursor)


Fetch = Callable[[AsyncCursor[Any]], Awaitable[Any]]


def _reader(result: Any) -> tuple[AsyncRowFactory[Any], Fetch | None]:
    """How the rows become the declared result: none, all of them, one that may be missing, or exactly one."""
    if result is None:
        return tuple_row, None
    container = get_origin(result)
    if container is dict:
        return tuple_row, _rows_as(dict)
    if container is list:
        return _row_factory(get_args(result)[0]), AsyncCursor.fetchall
    if container is set:
        return _row_factory(get_args(result)[0]), _rows_as(set)
    if isinstance(result, UnionType):
        return _row_factory(get_args(result)[0]), AsyncCursor.fetchone
    if result is object:
        return scalar_row, AsyncCursor.fetchone
    return _row_factory(result), _truth if result is bool else _only_row


def _row_factory(record: Any) -> AsyncRowFactory[Any]:
    if field_names(record):
        return record_row(record)
    return tuple_row if get_origin(record) is tuple else scalar_row


def _rows_as(container: Callable[[list[Any]], Any]) -> Fetch:
    async def fetch(cursor: AsyncCursor[Any]) -> Any:
        return container(await cursor.fetchall())

    return fetch


async def _truth(cursor: AsyncCursor[Any]) -> bool:
    return bool(await cursor.fetchone())


async def _only_row(cursor: AsyncCursor[Any]) -> Any:
    row = await cursor.fetchone()
    assert row is not None, "the declaration promises a row"
    return row


@overload
def query(declared: Declared[P, R]) -> Declared[P, R]: ...


@overload
def query(*, prepare: bool) -> Callable[[Declared[P, R]], Declared[P, R]]: ...


def query(declared: Any = None, *, prepare: bool | None = None) -> Any:
    """Declares the statement that has the name of the function, in the file that has the name of its module."""
    if declared is None:
        return partial(query, prepare=prepare)
    text = sql(declared.__module__.rpartition(".")[2], declared.__name__)
    statement = Statement(text, Signature(declared), prepare=prepare)

    @wraps(declared)
    async def run(conn: AsyncConnection, *args: object, **given: object) -> Any:
        return await statement.run(conn, statement.bind(args, given))

    return run


def function_statement(declared: Callable[..., object], *, prepare: bool | None = None) -> Statement:
    """The call of the stored function that has the name of the declaration, which may begin with an underscore."""
    name = declared.__name__.removeprefix("_")
    signature, types = Signature(declared), parameters_of(name)
    fields = (field for each in signature.records(types).values() for field in each)
    given = {*signature.names, *fields} & types.keys()
    result = signature.result
    parts = get_args(result) if get_origin(result) is list or isinstance(result, UnionType) else (result,)
    text = function_call(name, len(given), field_names(parts[0]))
    return Statement(text, signature, prepare=prepare)


@overload
def sql_function(declared: Declared[P, R]) -> Declared[P, R]: ...


@overload
def sql_function(
    *, prepare: bool | None = None, retries: bool = True
) -> Callable[[Declared[P, R]], Declared[P, R]]: ...


def sql_function(declared: Any = None, *, prepare: bool | None = None, retries: bool = True) -> Any:
    """Declares the stored function of that name: one transaction, which runs again after a deadlock."""
    if declared is None:
        return partial(sql_function, prepare=prepare, retries=retries)
    statement = function_statement(declared, prepare=prepare)

    @wraps(declared)
    async def run(conn: AsyncConnection, *args: object, **given: object) -> Any:
        values = statement.bind(args, given)
        if not retries:
            return await statement.run(conn, values)
        return await retry_on_deadlock(lambda: statement.run(conn, values))

    return run


async def retry_on_deadlock(work: Callable[[], Awaitable[T]], *, tries: int = 5) -> T:
    """Run one whole transaction, and again if PostgreSQL aborted it because of a deadlock or a serialization failure.

    `work` must begin and end its own transaction: the failed one is already rolled back when it runs again.
    """
    for number in range(1, tries):
        try:
            return await work()
        except (errors.DeadlockDetected, errors.SerializationFailure):
            # Two victims that wait equally long would collide again.
            await asyncio.sleep(random.uniform(0, 0.01 * 2**number))
    return await work()
