"""Renames SQL identifiers by `sql.toml`, in .sql files and in the SQL strings of Python files. A one-off tool.

python tools/rename/sql.py [--write] PATH ...     without --write it only reports

It looks at words and their neighbours, so it also says what it could not decide: columns whose table it does not know,
table names that are texts, and output columns. An output column keeps its old name (`as old`), because Python records
and API documents are built from it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# In a Python file, the quotes between two parts of one text are space.
_TOKEN = re.compile(
    r"""(?P<glue>"\s*\n\s*[rf]{0,2}")|(?P<comment>--[^\n]*)|(?P<text>'(?:[^'\n]|'')*')|(?P<place>%\(\w+\)s)|(?P<slot>\{\w*\})"""
    r"""|(?P<word>[A-Za-z_]\w*)|(?P<space>\s+)|(?P<other>.)""",
    re.S,
)
_SQL = re.compile(
    r"\b(select|insert into|update|delete from|truncate|create (or replace )?(function|view|table|index|trigger)"
    r"|drop (function|table|view)|alter (table|function)|vacuum|analyze|perform|lock table|from \w+ \w)\b"
)
_BEFORE_TABLE = {"from", "join", "into", "update", "table", "only", "references", "truncate", "exists", "view", "using"}
_CLAUSES = {"select", "from", "where", "set", "values", "group", "order", "returning", "on", "having", "limit"}
_NO_ALIAS = _CLAUSES | {"as", "set", "cross", "left", "join", "for", "union", "with", "inner", "natural", "do", "loop"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    kind: str
    text: str
    depth: int


@dataclass(slots=True)
class Names:
    """What `sql.toml` says. `own_columns`: those whose name only renamed columns have, so that no table need be known."""

    functions: dict[str, str]
    relations: dict[str, str]
    types: dict[str, str]
    columns: dict[str, dict[str, str]]
    own_columns: dict[str, str]
    having: dict[str, set[str]]
    views: set[str]
    values: dict[str, dict[str, dict[str, str]]]

    @classmethod
    def read(cls, tables: str, views: set[str]) -> Names:
        given = tomllib.loads((HERE / "sql.toml").read_text(encoding="utf-8"))
        targets: dict[str, set[str]] = {}
        for renamed in given["columns"].values():
            for old, new in renamed.items():
                targets.setdefault(old, set()).add(new)
        owners = {old: {table for table, names in given["columns"].items() if old in names} for old in targets}
        having = columns_of(tables)
        own = {
            old: next(iter(new))
            for old, new in targets.items()
            if len(new) == 1
            and {table for table, names in having.items() if old in names} <= owners[old]
            and ("_" in old or old in given["distinct"])
        }
        return cls(
            functions=given["functions"],
            relations={**given["tables"], **given["views"]},
            types={**given["types"], **given["tables"]},
            columns=given["columns"],
            own_columns=own,
            having=having,
            views=views,
            values=given["values"],
        )


@dataclass(slots=True)
class Report:
    changed: Counter[str] = field(default_factory=Counter)
    doubtful: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


def columns_of(text: str) -> dict[str, set[str]]:
    """The columns of each `create table`."""
    found = {}
    for match in re.finditer(r"^create table (\w+) \((.*?)^\)", text, re.S | re.M):
        found[match[1]] = set(re.findall(r"^    (\w+) ", match[2], re.M)) - {"check", "unique", "primary"}
    return found


def tokens_of(text: str) -> list[Token]:
    found, depth = [], 0
    for match in _TOKEN.finditer(text):
        kind = str(match.lastgroup)
        depth -= match[0] == ")"
        found.append(Token(kind="space" if kind == "glue" else kind, text=match[0], depth=depth))
        depth += match[0] == "("
    return found


class Renaming:
    """One statement, or one definition of a function or view."""

    def __init__(self, text: str, names: Names, report: Report, place: str, *, keeps_outputs: bool) -> None:
        self.tokens, self.names, self.report, self.place = tokens_of(text), names, report, place
        self.keeps_outputs = keeps_outputs
        self.solid = [n for n, token in enumerate(self.tokens) if token.kind not in ("space", "comment")]
        self.aliases: dict[str, set[str]] = {}
        for alias, table in self._aliases(text):
            self.aliases.setdefault(alias, set()).add(table)
        self.keys = self._document_keys()
        self.tables = {table for tables in self.aliases.values() for table in tables}
        defined = re.search(r"^create (?:table (\w+)|(?:unique )?index (?:concurrently )?\w+ on (\w+))", text, re.M)
        self.defined = (defined[1] or defined[2]) if defined else ""

    def _document_keys(self) -> dict[str, set[int]]:
        """By the alias of a `jsonb_to_recordset(…) as x(…)` the places of its columns: keys of a document, which stay."""
        found: dict[str, set[int]] = {}
        words = [(n, self.tokens[n]) for n in self.solid]
        for place, (_, token) in enumerate(words):
            if not re.fullmatch(r"jsonb?_to_record(set)?", token.text):
                continue
            closed = next(
                (
                    k
                    for k in range(place + 2, len(words))
                    if words[k][1].depth == token.depth and words[k][1].text == ")"
                ),
                None,
            )
            if closed is None:
                continue
            named = closed + 2 if closed + 1 < len(words) and words[closed + 1][1].text == "as" else closed + 1
            if named + 1 >= len(words) or words[named + 1][1].text != "(":
                continue
            columns = found.setdefault(words[named][1].text, set())
            for n, each in words[named + 2 :]:
                if each.text == ")" and each.depth == words[named + 1][1].depth:
                    break
                # The first word of each item: its type may have a new name.
                before = self.tokens[self.solid[self.solid.index(n) - 1]].text
                if before in (",", "("):
                    columns.add(n)
        return found

    def _aliases(self, text: str) -> Iterator[tuple[str, str]]:
        plain = re.sub(r"--[^\n]*", "", text)
        names = {*self.names.having, *self.names.relations, *self.names.views}
        known = "|".join(sorted(names, key=len, reverse=True))
        for table, alias in re.findall(rf"\b(?:evertick\.)?({known})\b(?:\s+as)?\s+(\w+)", plain):
            yield (alias if alias not in _NO_ALIAS else table), table
            yield table, table
        # Variables and arguments that are a row.
        for alias, table in re.findall(rf"\b(\w+)\s+({known})(?=\s*[,;)]|\s+:=)", plain):
            if alias not in _BEFORE_TABLE:
                yield alias, table
        for table in re.findall(rf"\b(?:from|join|into|update)\s+(?:evertick\.)?({known})\b", plain):
            yield table, table

    def result(self) -> str:
        return "".join(self._renamed(position) for position in range(len(self.tokens)))

    def _around(self, position: int, step: int, count: int = 1) -> str:
        """The word or sign that many places before or after, without spaces and comments."""
        if position not in self._index:
            return ""
        place = self._index[position] + step * count
        return self.tokens[self.solid[place]].text.lower() if 0 <= place < len(self.solid) else ""

    @property
    def _index(self) -> dict[int, int]:
        if not hasattr(self, "_positions"):
            self._positions = {n: place for place, n in enumerate(self.solid)}
        return self._positions

    def _renamed(self, position: int) -> str:
        token = self.tokens[position]
        if token.kind == "comment":
            return self._in_comment(token.text)
        if token.kind == "text":
            return self._in_text(token.text, position)
        if token.kind != "word":
            return token.text
        word, before, after = token.text, self._around(position, -1), self._around(position, 1)
        is_qualified = before == "." and self._around(position, -1, 2) != "evertick"
        if any(position in places for places in self.keys.values()):
            return word
        if is_qualified and self._around(position, -1, 2) in self.keys:
            return word
        if is_qualified:
            return self._column(position, self._around(position, -1, 2))
        for kind, new in self._choices(position, word, before, after):
            self.report.changed[kind] += 1
            return new
        return self._column(position, None)

    def _choices(self, position: int, word: str, before: str, after: str) -> Iterator[tuple[str, str]]:
        names = self.names
        follows = self.tokens[position + 1].text if position + 1 < len(self.tokens) else ""
        if word in names.functions and (
            follows == "(" or before == "function" or (after == "." and self._is_own(word))
        ):
            yield "function", names.functions[word]
        if word in names.relations and self._is_relation(position, word, before, after):
            yield "table", names.relations[word]
        if word in names.types and self._is_type(before, after):
            yield "type", names.types[word]

    def _is_own(self, word: str) -> bool:
        """`finish.refused`: an argument of the function that is being defined."""
        return (
            self.tokens[0].text != ""
            and re.search(rf"function {word}\(", "".join(t.text for t in self.tokens)) is not None
        )

    def _is_relation(self, position: int, word: str, before: str, after: str) -> bool:
        if before in _BEFORE_TABLE or (before == "." and self._around(position, -1, 2) == "evertick"):
            return before != "exists" and not (before == "using" and after == "(")
        if before == "on" and after == "(" and self._around(position, -1, 3) in ("index", "unique", "concurrently"):
            return True
        if after == "." and word in self.aliases.get(word, ()):
            return True
        return before == "," and self._clause(position) in ("from", "truncate", "using", "vacuum") and after != "("

    def _clause(self, position: int) -> str:
        depth = self.tokens[position].depth
        for n in range(position - 1, -1, -1):
            each = self.tokens[n]
            if each.depth < depth:
                return ""
            if (
                each.depth == depth
                and each.kind == "word"
                and each.text.lower() in _CLAUSES | {"using", "truncate", "vacuum"}
            ):
                return each.text.lower()
        return ""

    @staticmethod
    def _is_type(before: str, after: str) -> bool:
        if before in (":", "setof", "returns", "type") or after == "[":
            return True
        words = _NO_ALIAS | {"and", "or", "not", "then", "by", "begin", "else", "declare"}
        is_name = re.fullmatch(r"[a-z_]\w*", before) is not None and before not in words
        return (
            is_name
            and after in (",", ";", ")", ":", "%", "not", "default", "primary")
            and before not in ("from", "join", "into", "when", "else", "return")
        )

    def _column(self, position: int, alias: str | None) -> str:
        word = self.tokens[position].text
        tables = self.aliases.get(alias, set()) if alias else set()
        if (tables and tables <= self.names.views) or (self.tables and self.tables <= self.names.views):
            return word
        if self.keeps_outputs and self._around(position, -1) == "as":
            return word
        new = self._column_of_any(tables, word)
        if new is None and alias is None:
            new = self.names.columns.get(self.defined, {}).get(word) or self._column_of_list(position, word)
            new = new or self._column_of_only_table(word)
        if new is None and word in self.names.own_columns and not word.startswith("p_"):
            new = self.names.own_columns[word]
        if new is None:
            wanted = {t for t, renamed in self.names.columns.items() if word in renamed}
            if wanted & self.tables and not tables - wanted:
                self.report.doubtful.append(
                    f"{self.place}: {alias + '.' if alias else ''}{word} ({', '.join(sorted(wanted & self.tables))}?)"
                )
            return word
        self.report.changed["column"] += 1
        return new + self._kept_output(position, word, new)

    def _column_of_any(self, tables: set[str], word: str) -> str | None:
        """An alias may stand for several tables in one statement: they must agree on the name."""
        found = {self.names.columns[each][word] for each in tables if word in self.names.columns.get(each, ())}
        kept = {
            each
            for each in tables
            if word in self.names.having.get(each, ()) and word not in self.names.columns.get(each, ())
        }
        return next(iter(found)) if len(found) == 1 and not kept else None

    def _column_of_list(self, position: int, word: str) -> str | None:
        """In `insert into t (a, b)` and `update t set a = …`."""
        clause = "".join(token.text for token in self.tokens[max(0, position - 900) : position])
        plain = re.sub(r"--[^\n]*", "", clause)
        found = re.search(r"\binsert\s+into\s+(?:evertick\.)?(\w+)(?:\s+as\s+\w+)?\s*\([\w\s,]*$", plain)
        if found is None and self._around(position, 1) == "=" and self._clause(position) == "set":
            updates = [*re.finditer(r"\bupdate\s+(?:only\s+)?(?:evertick\.)?(\w+)\b", plain)]
            found = updates[-1] if updates else None
        return self.names.columns.get(found[1], {}).get(word) if found else None

    def _column_of_only_table(self, word: str) -> str | None:
        """In a plain statement a bare name is a column of the one table that has it."""
        having = [table for table in self.tables if word in self.names.having.get(table, ())]
        return self.names.columns.get(having[0], {}).get(word) if self.keeps_outputs and len(having) == 1 else None

    def _kept_output(self, position: int, word: str, new: str) -> str:
        """At the end of an item of a select list, of the statement or of a part of it: ` as old`."""
        if not self.keeps_outputs or self._clause(position) != "select":
            return ""
        if self._around(position, 1) not in (",", "from", "", ")"):
            return ""
        if self.tokens[position].depth == 0:
            self.report.outputs.append(f"{self.place}: {word}")
        return f" as {word}"

    def _in_comment(self, text: str) -> str:
        """Names that can be nothing else: with an underscore, before a bracket, or in backticks."""
        known = {**self.names.own_columns, **self.names.types, **self.names.relations, **self.names.functions}

        def new(match: re.Match[str]) -> str:
            word = match[0]
            marked = text[match.start() - 1 : match.start()] == "`" or text[match.end() : match.end() + 1] == "("
            return known[word] if word in known and ("_" in word or marked) else word

        return re.sub(r"[A-Za-z_]\w*", new, text)

    def _in_text(self, text: str, position: int) -> str:
        bare = text[1:-1]
        for table, columns in self.names.values.items():
            for values in columns.values():
                if bare in values and table in self.tables:
                    self.report.changed["value"] += 1
                    return f"'{values[bare]}'"
        if (
            bare in self.names.relations
            and self._around(position, 1) == ":"
            and self._around(position, 1, 3) == "regclass"
        ):
            return f"'{self.names.relations[bare]}'"
        if bare in self.names.relations:
            self.report.doubtful.append(f"{self.place}: the text {text} may be the name of a table")
        elif _SQL.search(bare):
            return f"'{Renaming(bare, self.names, self.report, self.place, keeps_outputs=False).result()}'"
        return text


def rename_sql_file(text: str, names: Names, report: Report, place: str) -> str:
    """Statement by statement, definition by definition."""
    is_statements = re.search(r"^-- name: ", text, re.M) is not None
    parts = re.split(
        r"(?=^-- name: )" if is_statements else r"(?<=;)(?=\n)(?=(?:\n*--[^\n]*)*\n+(?:create|alter|insert)\b)",
        text,
        flags=re.M,
    )
    done = []
    for part in parts:
        named = re.search(r"^-- name: (\w+)|^create (?:or replace )?\w+ (?:index )?(\w+)", part, re.M)
        where = f"{place}:{(named[1] or named[2]) if named else '?'}"
        keeps = is_statements or re.search(r"^create view", part, re.M) is not None
        head, _, body = part.partition("\n") if is_statements and part.startswith("-- name: ") else ("", "", part)
        new = Renaming(body, names, report, where, keeps_outputs=keeps).result()
        done.append(f"{head}\n{new}" if head else new)
    return "".join(done)


def rename_python_file(text: str, names: Names, report: Report, place: str) -> str:
    """Each text that is SQL, with the parts that follow each other taken as one."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    runs: list[list[int]] = []
    before = None
    for token in tokenize.generate_tokens(iter(lines).__next__):
        if token.type == tokenize.STRING:
            start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
            if before == tokenize.STRING:
                runs[-1][1] = end
            else:
                runs.append([start, end])
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.type
    for start, end in reversed(runs):
        part = text[start:end]
        bare = part.strip("rfb\"'")
        if _SQL.search(part) and not re.match(r"[A-Z`]", bare):
            where = f"{place}:{text.count(chr(10), 0, start) + 1}"
            text = text[:start] + Renaming(part, names, report, where, keeps_outputs=False).result() + text[end:]
        elif bare in names.relations or bare in names.functions:
            report.doubtful.append(f"{place}:{text.count(chr(10), 0, start) + 1}: the text {part} may be a name")
    return text


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Rename SQL identifiers by sql.toml.")
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    tables = next(ROOT.glob("src/evertick/*/migrations/0001_baseline.sql")).read_text(encoding="utf-8")
    views = {
        name
        for path in ROOT.glob("src/evertick/*/functions/*.sql")
        for name in re.findall(r"^create view (\w+)", path.read_text(encoding="utf-8"), re.M)
    }
    names, report, files = Names.read(tables, views), Report(), 0
    for given in options.paths:
        for path in [given] if given.is_file() else sorted([*given.rglob("*.sql"), *given.rglob("*.py")]):
            text = path.read_text(encoding="utf-8")
            rename = rename_sql_file if path.suffix == ".sql" else rename_python_file
            new = rename(text, names, report, str(path))
            if new != text:
                files += 1
                if options.write:
                    path.write_text(new, encoding="utf-8")
    print("\n".join(f"doubtful {each}" for each in report.doubtful))
    print("\n".join(f"output   {each}" for each in report.outputs))
    print(
        f"{files} files; {dict(report.changed)}; {len(report.doubtful)} doubtful, {len(report.outputs)} outputs keep their name"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
