"""Proves that no value in a shell command can become code, or refuses the command.

A value is a variable of the environment. A shell runs such a variable as code only if the command says so: by `eval`, by
arithmetic, by a nested script, by a command whose name it is. A command with values must not contain any of these, wherever they
are: a value could reach them through a variable, a pipe or a file. Their arguments may be constants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import PurePosixPath

from evertick.sdk.shell_syntax import KEYWORDS, Command, Parser, Part, Unproven, Word, set_of

_SHELLS = frozenset(("sh", "bash", "dash", "ash", "ksh", "mksh", "zsh", "rbash"))
# The options of an interpreter before a constant script: options without an argument, and options that are followed by code.
_SHELL_OPTIONS = (re.compile(r"[-+][abefhklmnuvxBCEHPT]+"), re.compile(r"-[abefhklmnuvxBCEHPT]*c"))
_SHELL_NAMED = re.compile(r"[-+][abefhklmnuvxBCEHPT]*o")
_PYTHON_OPTIONS = (re.compile(r"-[bBdEIiOPqsSuvx]+"), re.compile(r"-[cm]"))
_OTHER_OPTIONS = (re.compile(r"-[lanpwW]"), re.compile(r"-[lanpwW]*[eEr]"))
_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_OTHERS = re.compile(r"(perl|ruby|node|nodejs|php|lua|Rscript|tclsh)[\d.]*")
# The first argument of these is a program.
_FILTERS = frozenset(("awk", "gawk", "mawk", "nawk", "sed", "gsed"))
_FILTER_OPTION = re.compile(r"-[rniEse]+|-F.+")
# They evaluate their arguments or their input, or change how the shell reads the rest.
_EVALUATORS = set_of("eval let alias coproc enable function select bind complete compgen compopt fc history")
_REMOTE = set_of("ssh su runuser rsh script watch parallel xargs")
_READERS = set_of(
    "at batch crontab expect screen tmux csh tcsh fish make gmake psql mysql mariadb sqlite3 sqlplus gdb vi vim ex ed ftp sftp"
    " gnuplot m4 bc dc deno bun"
)
_CONSTANT = frozenset(("wait", "jobs", "hash", "getopts"))
_DECLARATIONS = frozenset(
    ("export", "readonly", "local", "declare", "typeset", "unset", "read", "mapfile", "readarray")
)
# An option of these can name a command.
_WITH_COMMAND_OPTIONS = set_of(
    "tar bsdtar rsync scp git hg svn zip unzip sort find wget gpg man less more split env xz zstd dpkg apt apt-get yum"
    " pip pip3 npm cmake gcc cc go cargo mount nmap tcpdump strace openssl rpm restic borg"
)
# The commands that start another, with the letters of their options that take an argument, and the arguments before it.
_WRAPPERS = {
    "command": ("", 0),
    "builtin": ("", 0),
    "exec": ("a", 0),
    "env": ("uC", 0),
    "sudo": ("ugpCrtTUDRh", 0),
    "doas": ("uC", 0),
    "nohup": ("", 0),
    "busybox": ("", 0),
    "setsid": ("", 0),
    "time": ("fo", 0),
    "nice": ("n", 0),
    "ionice": ("cnp", 0),
    "stdbuf": ("ioe", 0),
    "timeout": ("ks", 1),
    "chroot": ("", 1),
}
# Variables that a program evaluates or whose value is a command, and numbers that bash computes.
_POWERFUL = re.compile(
    r"RANDOM|SRANDOM|SECONDS|LINENO|HISTCMD|BASH\w*|ENV|PS\d|PATH|IFS|OPTIND|SHELL\w*|LD_\w+|PYTHON\w*|PERL\w*|RUBY\w*"
    r"|NODE_\w+|GIT_\w+|SSH_\w+|JAVA_\w+|\w*OPTIONS|\w*OPTS|\w*PAGER|\w*EDITOR|\w*_COMMAND|BROWSER|PROMPT\w*|TAR_\w+|MAKE\w*|RSYNC_\w+"
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=")
_PROGRAM = re.compile(r"[\w./+@:%~-]+|\[\[?")
_UNARY = re.compile(r"-[nzefdsrwxhLpS]")
_COMPARISON = re.compile(r"==?|!=|=~|-(eq|ne|lt|le|gt|ge|nt|ot|ef)")
_WRITERS = frozenset(("tee", "cp", "mv", "ln", "install", "dd"))
_DEPTH = 5


def check_command(text: str, depth: int = 0) -> list[str]:
    """The quote that is open at each value of the command. Raises `Unproven`."""
    if depth > _DEPTH:
        raise Unproven(f"its scripts are nested more than {_DEPTH} deep")
    parser = Parser(text)
    parser.parse()
    _Rules(text, parser.commands, depth).check()
    return parser.quotes


class _Rules:
    def __init__(self, text: str, commands: list[Command], depth: int) -> None:
        self.text = text
        self.commands = commands
        self.depth = depth
        self.reads_values = any(
            command.is_piped or not all(map(self.is_constant, command.inputs)) for command in commands
        )
        self.written = [target for command in commands for target in command.targets]
        for command in commands:
            if any(word.text in _WRITERS for word in command.words):
                self.written += [word for word in command.words if word.text not in _WRITERS]

    def check(self) -> None:
        for command in self.commands:
            if not command.is_pattern:
                self._command(command.words)

    def is_constant(self, word: Word) -> bool:
        """Whether its text is known to the author: no value, and only variables that the command never sets."""
        return all(kind is Part.TEXT or (kind is Part.VARIABLE and self._is_given(name)) for kind, name in word.parts)

    def _is_given(self, name: str) -> bool:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name) or name.startswith("EVERTICK_"):
            return name in ("#", "?", "$", "!")
        return not re.search(rf"(?<![\w$])(?<!\$\{{){name}\b", self.text)

    def _command(self, words: list[Word]) -> None:
        words = list(words)
        while words and words[0].is_plain and words[0].text in KEYWORDS:
            words.pop(0)
        words = self._without_assignments(words)
        if not words:
            return
        name, arguments = self._program(words[0]), words[1:]
        check = _Rules._interpreter if _is_interpreter(name) else _CHECKS.get(name, _Rules._other)
        check(self, name, arguments)
        self._require_not_written(name)

    def _program(self, word: Word) -> str:
        """The name of the command that a word names."""
        kind, last = word.parts[-1]
        if not (
            self.is_constant(word)
            and kind is Part.TEXT
            and _PROGRAM.fullmatch(word.text or last)
            and (word.text is not None or "/" in last)
        ):
            raise Unproven(
                "a value or a variable names the command to run, so it could run any. Write the command's name, and choose"
                " between commands with {% if %}"
            )
        return word.text if word.text == "." else PurePosixPath(word.text or last).name

    def _other(self, name: str, arguments: list[Word]) -> None:
        self._require_no_options(name, arguments)
        for place, word in enumerate(arguments):
            inner = PurePosixPath(word.text or "").name
            if inner in _REMOTE or inner == "eval":
                self._evaluator(inner, arguments)
            if _is_interpreter(inner):
                self._interpreter(inner, arguments[place + 1 :])
                return

    def _without_assignments(self, words: list[Word]) -> list[Word]:
        while words and (found := _ASSIGNMENT.match(words[0].prefix)):
            self._assigned(found[1], words.pop(0))
        if words and re.match(r"[A-Za-z_{]\w*\[", words[0].prefix):
            raise Unproven("the index of an array is evaluated as code. Use a plain variable")
        return words

    def _assigned(self, name: str, word: Word) -> None:
        if _POWERFUL.fullmatch(name) and not self.is_constant(_without_self(word, name)):
            raise Unproven(f"{name} is a variable that a program evaluates. Use another name")

    def _evaluator(self, name: str, arguments: list[Word]) -> None:
        is_closed = name not in _EVALUATORS and all(map(self.is_constant, arguments))
        if not is_closed or (self.reads_values and name not in _CONSTANT):
            raise Unproven(
                f"{name} evaluates text, which could be a value. Pass the value to a script as an argument, as in"
                " ./script.sh {{ params.x }} or bash -c 'printf %s \"$1\"' _ {{ params.x }}"
            )

    def _trap(self, name: str, arguments: list[Word]) -> None:
        if not arguments or arguments[0].text is None:
            raise Unproven("trap runs a text that could contain a value. Write the command in single quotes")
        check_command(arguments[0].text, self.depth + 1)

    def _declaration(self, name: str, arguments: list[Word]) -> None:
        self._require_unsplit(name, arguments)
        for word in arguments:
            found = _ASSIGNMENT.match(word.prefix)
            if found and name in ("export", "readonly", "local", "declare", "typeset"):
                self._assigned(found[1], word)
            elif name == "read" and word.text in ("-r", "-s", "-rs"):
                continue
            elif word.text is None or not _NAME.fullmatch(word.text) or _POWERFUL.fullmatch(word.text):
                raise Unproven(
                    f"{name} can evaluate its arguments. Give it plain names, as in {name} x, without options"
                )

    def _interpreter(self, name: str, arguments: list[Word]) -> None:
        """`bash -c 'script' arguments`, `bash script arguments`: the script is a constant."""
        flags, code = _options_of(name)
        rest = list(arguments)
        while rest and (text := rest[0].text) is not None:
            word = rest.pop(0)
            if code.fullmatch(text):
                self._script(name, rest, is_code=text != "-m")
                return
            if not text.startswith(("-", "+")):
                self._script(name, [word, *rest], is_code=False)
                return
            if name in _SHELLS and _SHELL_NAMED.fullmatch(text) and rest and _NAME.fullmatch(rest[0].text or ""):
                rest.pop(0)
            elif not flags.fullmatch(text):
                break
        if [word.text for word in arguments] not in (["--version"], ["-V"]):
            raise Unproven(
                f"{name} runs a text that could contain a value. Give it a constant script, and the value as an argument:"
                f" {_instead(name)}"
            )

    def _script(self, name: str, rest: list[Word], *, is_code: bool) -> None:
        script = rest[0].text if rest else None
        if script is None or script.startswith(("-", "+")) or "{}" in script:
            raise Unproven(
                f"{name} runs a script that contains a value or a variable, which would run as code. Write the script in single"
                f" quotes, and pass the value as an argument: {_instead(name)}"
            )
        if not is_code:
            self._require_not_written(script)
        elif name in _SHELLS:
            check_command(script, self.depth + 1)
        elif _OTHERS.fullmatch(name) and _values(rest) and rest[1].text != "--":
            raise Unproven(f"an argument could be an option of {name}, and so code. Write -- after the script")

    def _require_not_written(self, path: str) -> None:
        """A file that the command writes must not be run by it."""
        name = PurePosixPath(path).name
        for target in self.written:
            kind, end = target.parts[-1] if target.parts else (Part.TEXT, "")
            ending = PurePosixPath(target.text).name if target.text is not None else end if kind is Part.TEXT else ""
            is_same = name == ending if target.text is not None else name.endswith(ending)
            if is_same or path.startswith(("/dev/", "/proc/")):
                raise Unproven(
                    f"it runs {path}, which it may have written from a value. Write to a file of another name"
                )

    def _filter(self, name: str, arguments: list[Word]) -> None:
        self._require_unsplit(name, arguments)
        rest = list(arguments)
        while rest and _FILTER_OPTION.fullmatch(rest[0].text or ""):
            rest.pop(0)
        program = rest[0].text if rest else None
        is_plain = program is not None and not program.startswith("-") and not re.search(r"system|getline|\|", program)
        if not is_plain or any(not word.prefix or word.prefix.startswith("-") for word in _values(rest[1:])):
            raise Unproven(
                f"a value could be a program of {name}. Pipe it in, as in printf '%s' {{{{ params.x }}}} | {name} …, or begin a"
                " file name with ./"
            )

    def _test(self, name: str, arguments: list[Word]) -> None:
        words = [word for word in arguments if word.text not in ("]", "]]")]
        if words and words[0].text == "!":
            words.pop(0)
        texts = [word.text or "" for word in words]
        if name != "[[" and any(word.is_split for word in words):
            raise Unproven(f"{name} has a variable without quotes, which could become an operator. Quote it")
        if len(words) == 1 or (len(words) == 2 and _UNARY.fullmatch(texts[0])):
            return
        if len(words) == 3 and (found := _COMPARISON.fullmatch(texts[1])):
            is_arithmetic = name == "[[" and found[1] and len(found[1]) == 2 and found[1] not in ("nt", "ot", "ef")
            if not is_arithmetic or all(map(_is_number, (words[0], words[2]))):
                return
        elif all(map(self.is_constant, words)) and not any(text in ("-v", "-R") for text in texts):
            return
        raise Unproven(
            f"{name} can evaluate its operands. Write one comparison, as in [ {{{{ params.x }}}} = yes ], and combine them with"
            " && and ||; compare numbers with [ … -eq … ]"
        )

    def _printf(self, name: str, arguments: list[Word]) -> None:
        first = arguments[0].prefix if arguments else "%"
        if (not first or first.startswith("-")) and first != "--":
            raise Unproven("the format of printf could be an option. Write printf '%s' {{ params.x }}")

    def _loop(self, name: str, arguments: list[Word]) -> None:
        self._declaration("for", arguments[:1])

    def _case(self, name: str, arguments: list[Word]) -> None:
        """It compares texts and runs none of them."""

    def _source(self, name: str, arguments: list[Word]) -> None:
        path = arguments[0].text if len(arguments) == 1 else None
        if path is None or path.startswith(("-", "/dev/", "/proc/")):
            raise Unproven(f"{name} runs a file whose name is not constant. Write the name of the file")
        self._require_not_written(path)

    def _wrapped(self, name: str, arguments: list[Word]) -> None:
        self._require_unsplit(name, arguments)
        letters, leading = _WRAPPERS[name]
        rest = list(arguments)
        while rest and self.is_constant(rest[0]) and rest[0].prefix.startswith("-"):
            option = rest.pop(0).text or ""
            if (option.startswith("--") and "=" not in option and option != "--") or option.startswith("-S"):
                raise Unproven(f"{option} of {name} is not understood. Write it with '=', or leave it out")
            if len(option) == 2 and option[1] in letters and rest and self.is_constant(rest[0]):
                rest.pop(0)
        for _ in range(leading):
            if rest and self.is_constant(rest[0]):
                rest.pop(0)
        self._command(rest)

    def _require_unsplit(self, name: str, arguments: list[Word]) -> None:
        if any(word.is_split and not self.is_constant(word) for word in arguments):
            raise Unproven(
                f"{name} has an argument without quotes, of which the shell may make several. Write it in double quotes"
            )

    def _require_no_options(self, name: str, arguments: list[Word]) -> None:
        if name not in _WITH_COMMAND_OPTIONS:
            return
        if any((word.text or "").startswith(("-exec", "-ok")) for word in arguments) and list(_values(arguments)):
            raise Unproven(f"{name} -exec runs a command that could be a value. Use a loop or a script file")
        for word in arguments:
            if word.text == "--":
                return
            if not self.is_constant(word) and (word.is_split or not word.prefix):
                raise Unproven(
                    f"an argument of {name} that begins with a value could be an option, and options of {name} can run commands."
                    f" Write -- before it, or begin it with text, as in ./{{{{ params.x }}}}"
                )


# Any other command is an interpreter, or checked by `_other`.
_CHECKS: dict[str, Callable[[_Rules, str, list[Word]], None]] = {
    **dict.fromkeys(_WRAPPERS, _Rules._wrapped),
    **dict.fromkeys(_FILTERS, _Rules._filter),
    **dict.fromkeys(_DECLARATIONS, _Rules._declaration),
    **dict.fromkeys(_EVALUATORS | _REMOTE | _READERS | _CONSTANT, _Rules._evaluator),
    **dict.fromkeys(("[", "[[", "test"), _Rules._test),
    **dict.fromkeys(("source", "."), _Rules._source),
    "printf": _Rules._printf,
    "for": _Rules._loop,
    "case": _Rules._case,
    "trap": _Rules._trap,
}


def _is_interpreter(name: str) -> bool:
    return name in _SHELLS or bool(_PYTHON.fullmatch(name) or _OTHERS.fullmatch(name))


def _options_of(name: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    if name in _SHELLS:
        return _SHELL_OPTIONS
    return _PYTHON_OPTIONS if _PYTHON.fullmatch(name) else _OTHER_OPTIONS


def _instead(name: str) -> str:
    arguments = "-c 'printf %s \"$1\"' _" if name in _SHELLS else "script"
    return f"{name} {arguments} {{{{ params.x }}}}"


def _values(words: Collection[Word]) -> list[Word]:
    return [word for word in words if word.text is None]


def _without_self(word: Word, name: str) -> Word:
    """`PATH=./bin:$PATH` adds to a variable."""
    return Word([(kind, text) for kind, text in word.parts if not (kind is Part.VARIABLE and text == name)])


def _is_number(word: Word) -> bool:
    return (word.text or "").isdecimal() or [text for _, text in word.parts] in (["#"], ["?"])
