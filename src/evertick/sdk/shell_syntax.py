"""Parses a shell command that contains places for values, as far as bash and dash agree on it. It refuses the rest, and never
guesses.

A place is `\\0NAME\\0`. A value is not part of the text: its place becomes a quoted reference to a variable of the environment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

_PLACE = re.compile("\0([^\0]*)\0")
# The forms of `${…}` that evaluate nothing: no arithmetic, no indirection, no nested expansion.
_BRACED = re.compile(
    r"\$\{(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[(?:[@*]|\d+)\])?(?:(?::?[-=+?]|##?|%%?|//?)[^'\"\\$`{}\0\n]*)?\}"
)
_NAME = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])")
_ANSI_TEXT = re.compile(r"\$'((?:[^'\\\0]|\\[^'\0])*)'")
_DELIMITER = re.compile(r"<<(-?)[ \t]*(?:'([^'\0\n]+)'|\"([^\"\\$`\0\n]+)\"|(\w+))(?=[\s;&|<>)]|$)")
_REDIRECTION = re.compile(r"&>>?|<<<|<>|<&|>&|>>|>\||[<>]")

_ARITHMETIC = "(( )) evaluates variables as code. Calculate in the template, as in {{ params.n + 1 }}"


def set_of(names: str) -> frozenset[str]:
    return frozenset(names.split())


KEYWORDS = set_of("if then else elif fi do done while until { } !")


class Unproven(Exception):
    """The command is not provably safe; the message says why, and what to write instead."""


class Part(StrEnum):
    TEXT = "text"
    VARIABLE = "variable"
    SUBSTITUTION = "substitution"
    VALUE = "value"


@dataclass(slots=True)
class Word:
    """One word: its parts in order. `is_split`: an expansion in it may become several words. `is_plain`: it has no quotes."""

    parts: list[tuple[Part, str]] = field(default_factory=list)
    is_split: bool = False
    is_plain: bool = True

    def add(self, kind: Part, text: str) -> None:
        if kind is Part.TEXT and self.parts and self.parts[-1][0] is Part.TEXT:
            text = self.parts.pop()[1] + text
        self.parts.append((kind, text))

    @property
    def text(self) -> str | None:
        """The word, if all of it is known."""
        return "".join(text for _, text in self.parts) if all(kind is Part.TEXT for kind, _ in self.parts) else None

    @property
    def prefix(self) -> str:
        """The known text at its beginning."""
        return self.parts[0][1] if self.parts and self.parts[0][0] is Part.TEXT else ""


@dataclass(slots=True)
class Command:
    """A simple command. `inputs` are the words and bodies that it reads; `targets` are the files that it writes."""

    words: list[Word] = field(default_factory=list)
    inputs: list[Word] = field(default_factory=list)
    targets: list[Word] = field(default_factory=list)
    is_piped: bool = False
    is_pattern: bool = False

    @property
    def keyword(self) -> str | None:
        """The first word after keywords such as `then`."""
        words = (word.text if word.is_plain else None for word in self.words)
        return next((text for text in words if text not in KEYWORDS), None)


class Parser:
    """`commands` are all commands, with those of substitutions; `quotes` has the quote that is open at each place."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.commands: list[Command] = []
        self.quotes: list[str] = []
        self._expects_pattern = False
        self._bodies: list[tuple[Command, re.Match[str]]] = []

    def parse(self) -> None:
        self._script("")
        if len(self.quotes) != len(_PLACE.findall(self.text)):
            raise Unproven("a value is in a position that cannot be parsed")

    def _script(self, closing: str) -> None:
        outer, self._bodies = self._bodies, []
        command, depth, self._expects_pattern = Command(), 0, False
        while self.at < len(self.text):
            character = self.text[self.at]
            redirection = _REDIRECTION.match(self.text, self.at)
            if character in " \t" or self.text.startswith("\\\n", self.at):
                self.at += 1 if character in " \t" else 2
            elif character == "#":
                self._comment()
            elif character == "\n":
                command = self._end(command, closing, is_piped=command.is_piped and not command.words)
                self.at += 1
                if outer:
                    raise Unproven("a here-document begins on a line that continues in a substitution")
                self._read_bodies()
            elif character == ")" and closing and not depth:
                self._end(command, closing)
                self.at += 1
                break
            elif redirection:
                self._redirect(command, redirection)
            elif character in ";&|()":
                depth += {"(": 1, ")": -1}.get(character, 0)
                command = self._operator(command, closing)
            else:
                self._add_word(command)
        else:
            self._end(command, closing)
            if closing:
                raise Unproven("a substitution is not closed")
        if self._bodies:
            raise Unproven("a here-document is not closed")
        self._bodies = outer

    def _operator(self, command: Command, closing: str) -> Command:
        text = self.text[self.at : self.at + 2]
        if text == "((":
            raise Unproven(_ARITHMETIC)
        is_pipe = text[0] == "|" and text != "||"
        self.at += 2 if text in ("&&", "||", "|&", ";;", ";&") else 1
        command.is_pattern = self._expects_pattern and command.keyword != "esac" and (is_pipe or text[0] == ")")
        expects = text in (";;", ";&") or (
            (self._expects_pattern or command.keyword == "case") and (is_pipe or text[0] == "(")
        )
        after = self._end(command, closing, is_piped=is_pipe)
        self._expects_pattern = expects and command.keyword != "esac"
        return after

    def _end(self, command: Command, closing: str, *, is_piped: bool = False) -> Command:
        if command.words or command.inputs or command.targets:
            self.commands.append(command)
            self._expects_pattern = command.keyword == "case"
            if closing and self._expects_pattern:
                raise Unproven("a substitution contains `case`. Use if, or a script file")
        return Command(is_piped=is_piped)

    def _comment(self) -> None:
        end = self.text.find("\n", self.at)
        end = len(self.text) if end < 0 else end
        self.quotes += ["" for _ in _PLACE.findall(self.text[self.at : end])]
        self.at = end

    def _add_word(self, command: Command) -> None:
        word = self._word()
        is_number = (word.text or "").isdecimal() and word.is_plain and self.text[self.at : self.at + 1] in ("<", ">")
        if not is_number:
            command.words.append(word)

    def _redirect(self, command: Command, found: re.Match[str]) -> None:
        if self.text.startswith("<<", self.at) and found[0] != "<<<":
            body = _DELIMITER.match(self.text, self.at)
            if body is None:
                raise Unproven("the delimiter of a here-document must be one word")
            self._bodies.append((command, body))
            self.at = body.end()
            return
        self.at = found.end()
        if self.text[self.at : self.at + 1] == "(":
            raise Unproven("<( ) is not the same in every shell. Use a pipe or a file")
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        (command.inputs if found[0].startswith("<") else command.targets).append(self._word())

    def _read_bodies(self) -> None:
        bodies, self._bodies = self._bodies, []
        for command, found in bodies:
            strip, single, double, plain = found.groups()
            delimiter, begin = single or double or plain, self.at
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, start = self.text[self.at : end], self.at
                self.at = min(end + 1, len(self.text))
                if (line.lstrip("\t") if strip else line) == delimiter:
                    break
                if plain and line.endswith("\\"):
                    raise Unproven("a line of a here-document ends with a backslash")
            else:
                raise Unproven("a here-document is not closed")
            command.inputs.append(self._body(begin, start, is_literal=not plain))

    def _body(self, begin: int, end: int, *, is_literal: bool) -> Word:
        after, body = self.at, Word()
        if is_literal:
            if "\0" in self.text[begin:end]:
                raise Unproven(
                    "a here-document with a quoted delimiter contains a value, which would stay a name. Write <<EOF without"
                    " quotes"
                )
            body.add(Part.TEXT, self.text[begin:end])
            return body
        self.at = begin
        while self.at < end:
            self._quoted_character(body, "<<")
        if self.at > end:
            raise Unproven("a substitution in a here-document is not closed")
        self.at = after
        return body

    def _word(self) -> Word:
        word = Word()
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;&|()<>":
            character = self.text[self.at]
            if character == "'":
                self._single_quotes(word)
            elif character == '"':
                word.is_plain = False
                self.at += 1
                while (following := self.text[self.at : self.at + 1]) != '"':
                    if not following:
                        raise Unproven("a quote is not closed")
                    self._quoted_character(word, '"')
                self.at += 1
                word.add(Part.TEXT, "")
            elif character == "\\":
                word.is_plain = False
                self._escaped(word, removes="")
            elif found := _ANSI_TEXT.match(self.text, self.at):
                word.is_plain = False
                word.add(Part.SUBSTITUTION if "\\" in found[1] else Part.TEXT, found[1])
                self.at = found.end()
            elif character == "$":
                word.is_split = self._dollar(word, is_quoted=False) or word.is_split
            else:
                self._other(word, "")
        return word

    def _single_quotes(self, word: Word) -> None:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise Unproven("a quote is not closed")
        self._refuse_newline(self.text[self.at : end])
        pieces = self.text[self.at + 1 : end].split("\0")
        for place, piece in enumerate(pieces):
            word.add(Part.VALUE if place % 2 else Part.TEXT, piece)
        self.quotes += ["'" for _ in pieces[1::2]]
        word.is_plain = False
        self.at = end + 1

    def _quoted_character(self, word: Word, quote: str) -> None:
        """One character or expansion within double quotes or a here-document."""
        character = self.text[self.at]
        if quote != "<<":
            self._refuse_newline(character)
        if character == "\\":
            self._escaped(word, removes='$`"\\\n' if quote == '"' else "$`\\\n")
        elif character == "$":
            self._dollar(word, is_quoted=True)
        else:
            self._other(word, quote)

    def _refuse_newline(self, text: str) -> None:
        if self._bodies and "\n" in text:
            raise Unproven("a here-document begins on a line that continues in quotes")

    def _escaped(self, word: Word, *, removes: str) -> None:
        """`removes` are the characters whose backslash is removed; without any, every backslash is."""
        following = self.text[self.at + 1 : self.at + 2]
        if following == "\0":
            raise Unproven("a value follows a backslash. Remove the backslash")
        kept = "\\" if removes and following not in removes else ""
        word.add(Part.TEXT, "" if following == "\n" else kept + following)
        self.at += 2

    def _other(self, word: Word, quote: str) -> None:
        """A value, or a character without a meaning."""
        character = self.text[self.at]
        if character == "`":
            raise Unproven("backticks are parsed differently by every shell. Write $( ) instead")
        if found := _PLACE.match(self.text, self.at):
            word.add(Part.VALUE, found[1])
            self.quotes.append(quote)
            self.at = found.end()
        else:
            word.add(Part.TEXT, character)
            self.at += 1

    def _dollar(self, word: Word, *, is_quoted: bool) -> bool:
        """An expansion, or a dollar sign. Returns whether its value is split into words."""
        following = self.text[self.at + 1 : self.at + 2]
        if following == "\0" or (following == '"' and not is_quoted):
            raise Unproven("a value or a quote follows a dollar sign. Remove the dollar sign")
        if self.text.startswith("$((", self.at) or following == "[":
            raise Unproven(f"${_ARITHMETIC}")
        if following == "(":
            self.at += 2
            self._script(")")
            word.add(Part.SUBSTITUTION, "")
            return not is_quoted
        found = (_BRACED if following == "{" else _NAME).match(self.text, self.at)
        if found is None and following in ("{" if is_quoted else "{'"):
            raise Unproven("this form of ${ } or $' ' may evaluate its text. Use a plain variable")
        if found is None:
            word.add(Part.TEXT, "$")
            self.at += 1
            return False
        word.add(Part.VARIABLE, found[2] if following == "{" else found[1])
        self.at = found.end()
        return not is_quoted and found[0] not in ("$#", "$?")
