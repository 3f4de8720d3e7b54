"""Commands with a value in every position of the shell's grammar, and values that try to become code there.

`python -m tests.sdk.shell_contexts --contexts 20000 --seed 7` runs more of them than the test.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evertick.domain.errors import InvalidTemplate
from evertick.sdk.shell_templates import render_shell

SHELLS = ("/bin/bash", "/bin/dash")
CANARY = "canary"
_RUN = f"touch {CANARY}"
PAYLOADS = (
    *(
        f"x; {_RUN}",
        f"$({_RUN})",
        f"`{_RUN}`",
        f"a[$({_RUN})]",
        f"a[`{_RUN}`]+1",
        f"'; {_RUN}; '",
        f'"; {_RUN}; "',
        f"x\n{_RUN}\n#",
    ),
    *(
        f"EOT\n{_RUN}\n:",
        f")); {_RUN}; ((",
        f"); {_RUN}; (",
        f"}}; {_RUN}; ${{",
        f"-va[$({_RUN})]",
        f"\\'; {_RUN} #",
        f'\\"; {_RUN} #',
    ),
    *(
        f"-I{_RUN}",
        f"--checkpoint-action=exec={_RUN}",
        f"x || {_RUN}",
        f"x | {_RUN} &",
        f"${{x:-$({_RUN})}}",
        _RUN,
        f"../{CANARY}",
    ),
    *("two  words * ? ~ !", "\\", "'", '"', "$x ${y} $1", "-n", "-v", "=", "]", "ünï"),
)
# `@` is the position of the word, and the value of a word is `{{ params.v }}`.
_WORDS = (
    *(
        "V",
        '"V"',
        "'V'",
        '"a V b"',
        "'a V b'",
        "x=V",
        "$(printf %s V)",
        '"$(printf %s "V")"',
        "`printf %s V`",
        "${y:-V}",
        '"${y:-V}"',
    ),
    *("$((V))", "\\V", "$V", "a[V]", "$'V'", "$(( V + 1 ))", "--x=V", "\"'V'\"", "'\"V\"'", "V\"V\"'V'"),
)
_SHOWN = "printf '<%s>\\n'"
_COMMANDS = (
    *(
        f"{_SHOWN} @",
        "printf @",
        "echo @",
        f'x=@; {_SHOWN} "$x"',
        f"[ @ = a ] || {_SHOWN} @",
        "[ @ -eq 1 ]",
        "test @",
        "[ @ ]",
        "[ @ @ ]",
    ),
    *(
        f"[[ @ == a ]] || {_SHOWN} @",
        "[[ @ -eq 1 ]]",
        "[[ -v @ ]]",
        "[ -v @ ]",
        "test -v @",
        "printf -v @ x",
        "let @",
        "let x=@",
    ),
    *(
        "declare @",
        "declare -i x=@",
        "typeset @",
        "export @",
        f'export x=@; {_SHOWN} "$x"',
        "unset @",
        "read @ </dev/null",
        "@",
        "@ a",
    ),
    *(
        "eval @",
        'eval "x=@"',
        'x=@; eval "$x"',
        "x=@; $x",
        "x=@; echo $((x))",
        "x=@; [[ x -eq 1 ]]",
        "a[@]=1",
        "a=(@)",
        "a=([@]=1)",
    ),
    *(
        f'for i in @; do {_SHOWN} "$i"; done',
        f"case @ in *) {_SHOWN} @;; esac",
        f"case a in @) :;; *) {_SHOWN} @;; esac",
    ),
    *(
        "cat <<EOT\n@\nEOT",
        "cat <<'EOT'\n@\nEOT",
        "sh <<EOT\n@\nEOT",
        "cat <<EOT | sh\n@\nEOT",
        "cat <<-EOT\n\t@\n\tEOT",
        "cat <<< @",
    ),
    *(
        f"{_SHOWN} @ | cat",
        f"{_SHOWN} @ | sh",
        f"{_SHOWN} @ > f; . ./f",
        f"{_SHOWN} @ > g; cat g",
        "printf %s @ > h; sh h",
    ),
    *(
        f'set -- @; {_SHOWN} "$1"',
        'set -- @; eval "$1"',
        f'set -- @; {_SHOWN} "$@"',
        "trap @ EXIT",
        "echo a | xargs -I{} sh -c @",
    ),
    *(
        "find . -maxdepth 0 -exec sh -c @ \\;",
        f"env x=@ {_SHOWN} a",
        "env @",
        "env -S @",
        "command @",
        f"command {_SHOWN} @",
    ),
    *(
        f"timeout 5 {_SHOWN} @",
        "timeout @ true",
        f"exec {_SHOWN} @",
        "exec @",
        'bash -c \'printf "<%s>" "$1"\' _ @',
        "bash -c 'eval \"$1\"' _ @",
    ),
    *(
        "sh -c @",
        "bash -c @",
        "bash -c 'echo '@",
        'sh -c "echo "@',
        "python3 -c @",
        "tar cf /dev/null @",
        "awk @",
        "sed s/a/b/ @",
        "source @",
    ),
    *(
        ". @",
        "RANDOM=@",
        "PS4=@; set -x; :",
        "PATH=@; x",
        "wait @",
        "mapfile -C @ a </dev/null",
        "((@))",
        "((x=@))",
        "echo $((@))",
    ),
    *(
        ': "${x:@}"',
        ': "${!@}"',
        ': "${x@P}"',
        f'f() {{ {_SHOWN} "$1"; }}; f @',
        'f() { eval "$1"; }; f @',
        "BASH_ENV=@ bash -c 'true'",
    ),
    *(
        f'while read -r i; do {_SHOWN} "$i"; done <<EOT\n@\nEOT',
        "while read i; do echo $((i)); done <<EOT\n@\nEOT",
        "alias x=@\nx",
    ),
)
_AROUND = (
    *(
        "C",
        "if true; then C; fi",
        "{ C; }",
        "( C )",
        "g() { C; }; g",
        "for k in 1; do C; done",
        "while :; do C; break; done",
        "true && C",
    ),
    *(
        "case a in a) C;; esac",
        "case a in\n  a|b) C ;;\n  *) : ;;\nesac",
        "o=$(C); printf '%s\\n' \"$o\"",
        "`C`",
        "C | cat",
        "C 2>/dev/null",
    ),
    *(
        "bash -c 'C'",
        'sh -c "C"',
        "eval 'C'",
        'eval "C"',
        "# it's a V\nC",
        "trap 'C' EXIT",
        "sh <<EOT\nC\nEOT",
        "cat <<EOT\n$(C)\nEOT",
    ),
    *(
        'echo "$(C)"',
        "! C",
        "if C; then :; fi",
        "true\nC\ntrue",
        "sh -c \"sh -c 'C'\"",
        "echo \\\nC",
        "cat <<EOT; C\nit's $HOME\nEOT\ntrue",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    contexts: int
    refused: int
    cases: int
    executed: tuple[str, ...]
    changed: tuple[str, ...]


def commands(count: int, seed: int) -> Iterator[str]:
    """Different commands, at random but the same for a seed. Each command and each word is also there on its own."""
    plain = [command.replace("@", "V") for command in _COMMANDS]
    plain += [f"{_SHOWN} {word}" for word in _WORDS] + [around.replace("C", f"{_SHOWN} V") for around in _AROUND]
    chosen = dict.fromkeys(plain)
    rng = random.Random(seed)
    while len(chosen) < count:
        inner = rng.choice(_COMMANDS).replace("@", rng.choice(_WORDS))
        text = rng.choice(_AROUND).replace("C", inner)
        chosen[rng.choice(_AROUND).replace("C", text) if rng.random() < 0.2 else text] = None
    return (text.replace("V", "{{ params.v }}") for text in chosen)


def accepted(command: str) -> str | None:
    """The command as a shell gets it, or None if it is refused."""
    try:
        return render_shell(command, {"params": {"v": "x"}})[0]
    except InvalidTemplate:
        return None


def try_commands(shell: str, found: Sequence[str], directory: Path) -> Findings:
    """Run each accepted command with each payload: nothing may be executed, and a value that is shown is shown unchanged."""
    executed: list[str] = []
    changed: list[str] = []
    kept = [(command, text) for command in found if (text := accepted(command)) is not None]
    for command, text in kept:
        shown = run(shell, text, directory)
        if list(directory.rglob(CANARY)) or (directory.parent / CANARY).exists():
            executed.append(command)
            for path in (*directory.rglob(CANARY), directory.parent / CANARY):
                path.unlink(missing_ok=True)
        if is_shown(command) and (
            wrong := [each for each, seen in zip(PAYLOADS, shown, strict=True) if each not in seen]
        ):
            changed.append(f"{command}: {wrong[0]!r}")
    return Findings(
        contexts=len(found),
        refused=len(found) - len(kept),
        cases=len(found) * len(PAYLOADS),
        executed=tuple(executed),
        changed=tuple(changed),
    )


def is_shown(command: str) -> bool:
    """Whether a command shows the value on its own in both shells, and so must show it unchanged."""
    inner = command.replace("{{ params.v }}", "V")
    shows = [f"{_SHOWN} {word}" for word in ("V", '"V"', "'V'", '"$(printf %s "V")"', "--x=V")]
    return inner in {
        around.replace("C", show)
        for around in _AROUND
        if "EOT" not in around and "trap" not in around
        for show in shows
    }


def run(shell: str, text: str, directory: Path) -> list[str]:
    """What the command shows for each payload, each in a shell of its own within one process."""
    values = (f"export EVERTICK_VALUE_{number}=V" for number in range(text.count("EVERTICK_VALUE_")))
    setting = "; ".join(values)
    mark = "=-=-="
    script = [
        f"( {setting.replace('=V', '=' + shlex.quote(payload))}\n{text}\n) </dev/null\nprintf '%s' '{mark}'"
        for payload in PAYLOADS
    ]
    flags = ["--noprofile", "--norc"] if shell.endswith("bash") else []
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory)}
    done = subprocess.run(
        [shell, *flags, "-c", "\n".join(script)],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    shown = done.stdout.decode(errors="replace").split(mark)
    return [*shown, *[""] * len(PAYLOADS)][: len(PAYLOADS)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    bad = 0
    for shell in SHELLS:
        with tempfile.TemporaryDirectory() as directory:
            inside = Path(directory, "work")
            inside.mkdir()
            found = try_commands(shell, list(commands(given.contexts, given.seed)), inside)
        print(f"{shell}: {found.contexts:,} commands, {found.refused:,} refused, {found.cases:,} cases")
        print(
            *(f"  executed: {each!r}" for each in found.executed),
            *(f"  changed: {each}" for each in found.changed),
            sep="\n",
        )
        bad += len(found.executed) + len(found.changed)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
