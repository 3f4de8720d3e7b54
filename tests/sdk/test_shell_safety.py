"""Which commands with values are accepted, and which are refused because a value could run as code."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertick import dag, shell
from evertick.domain.errors import InvalidDag, InvalidTemplate
from evertick.sdk.shell_safety import check_command
from evertick.sdk.shell_syntax import Unproven
from evertick.sdk.shell_templates import check_shell_template, render_shell
from tests.sdk.shell_contexts import CANARY, SHELLS, commands, run, try_commands

# `@` is a value.
ACCEPTED = (
    "echo @",
    'echo "Dear @" | sort > out/@.txt',
    "echo 'a @ b'",
    "curl -s -H @ https://shop",
    "python load.py --day @",
    "python3.11 -m pkg.load @",
    "bash -c 'printf %s \"$1\"' _ @",
    "bash -euo pipefail -c 'printf %s \"$1\"' _ @",
    'x=@; echo "$x"',
    "[ @ = yes ] && echo a || echo b",
    'if [ "@" -gt 3 ]; then load "@"; else echo no; fi',
    "if [[ @ == a && -n $x ]]; then echo; fi".replace(" && -n $x ]]", " ]] && [[ -n $x ]]"),
    'for f in *.csv; do load "$f" @; done',
    "cat <<END\na @ b\nEND",
    "cat <<-END | sort\n\ta @ b\n\tEND\necho after",
    "case @ in\n  a|b) echo x;;\n  *) echo @ ;;\nesac",
    "export A=@; . ./env.sh; python load.py",
    "tar czf - -- @ | gzip > x.gz",
    "exit @",
    "sudo -u bob ./run.sh @",
    "timeout 5 python load.py @",
    "psql -f load.sql; echo @",
    'cd "$HOME" && git pull && echo @',
    '"$HOME"/bin/x @',
    "echo ${HOME:-x} @ ${#HOME}",
    'd=$(date -d @ +%F); echo "$d"',
    'echo "$(echo "@")"',
    "wc -l @ 2>/dev/null",
    "cut -d$'\\t' -f1 @",
    "mkdir -p /data/@ && cp in.csv /data/@/",
    "grep -c @ file || true # @ of it's",
    "docker run --rm img load @",
    "jq --arg x @ '.a==$x' f.json",
    'set -euo pipefail\nload() {\n  ./load "$1"\n}\nload @',
    "printf '%s' @ | sed s/a/b/",
    "awk '{print $1}' ./@",
    "perl -e 'print $ENV{A}' -- @",
    "trap 'rm -f x' EXIT; echo @",
)
REFUSED = (
    *("env x=$(printf %s @) true", "export x=$(printf %s @)", "tar cf ./$(printf %s @)", "sed s/a/b/ ./$(printf %s @)"),
    *(
        "bash -c 'echo @'",
        'sh -c "echo @"',
        'bash -c "$X @"',
        "bash -c -- @",
        "bash -oc pipefail @",
        "bash -s @",
        "$SHELL -c @",
    ),
    *(
        "eval echo @",
        'eval "x=@"',
        'x=@; eval "$x"',
        "case a in a) eval @;; esac",
        '( case x in a) :;; esac; eval "@" )',
    ),
    *("echo $(( @ + 1 ))", "echo $[ @ ]", "(( x = @ ))", "x=@; echo $((x))", "let x=@", "[[ @ -eq 1 ]]", "echo ${x:@}"),
    *("echo @ | while read x; do echo $((x)); done", "for (( i = @; i < 2; i++ )); do :; done"),
    *(
        "x=@; $x",
        "@",
        "@ a",
        "exec @",
        "command @",
        "nice -n 5 @",
        "sudo -u bob @",
        "env @ cmd",
        "env -S @",
        "timeout @ sh",
    ),
    *(
        "echo @ | sh",
        "( echo @ | sh )",
        "case a in a) echo;; esac | sh; echo @",
        "echo @ | bash -s",
        "cat <<END | sh\n@\nEND",
    ),
    *(
        "sh <<END\necho @\nEND",
        "sh <<< @",
        "python - <<END\n@\nEND",
        "cat <<'END'\n@\nEND",
        "psql <<END\n@\nEND",
        "echo @ | psql",
    ),
    *(
        "echo @ > f; sh f",
        "echo @ > f; . ./f",
        "echo @ > f; chmod +x f; ./f",
        "echo @ | tee f; bash f",
        "echo @ > a; cp a b; sh b",
    ),
    *(
        "ssh h @",
        "su -c @ bob",
        "watch @",
        "echo a | xargs -I{} sh -c 'echo @'",
        "find . -exec sh -c 'echo @' \\;",
        "make X=@",
    ),
    *("nohup sh -c '@' &", 'docker exec c sh -c "echo @"', "kubectl exec p -- bash -c 'echo @'", "busybox sh -c @"),
    *("gcloud compute ssh h --command @", "find . | xargs @"),
    *(
        "[[ -v @ ]]",
        "[ -v @ ]",
        "[ @ @ ]",
        "test @ -a @",
        "[ $x = @ ]",
        "a[@]=1",
        "a=([@]=1)",
        "unset @",
        "unset a[@]",
        "read @",
    ),
    *("declare -i x=@", "declare @", "printf -v @ x", "printf @ @", 'printf "$x" @', "mapfile -C @ a", "wait -p @"),
    *(
        "RANDOM=@",
        "PS4=@",
        "BASH_ENV=@ bash x.sh",
        "for RANDOM in @; do :; done",
        "export LD_PRELOAD=@",
        "PATH=@:$PATH",
    ),
    *(
        "trap @ EXIT",
        'trap "echo @" EXIT',
        "coproc @",
        "function f { eval @; }",
        'f() { eval "$1"; }; f @',
        "alias x=@",
    ),
    *("`echo @`", "echo `echo @`", 'echo "`@`"', "source <(echo @)", ". @", ". /dev/stdin <<< @"),
    *(
        "python -c \"print('@')\"",
        "python -c @",
        "python @",
        "python -E -c @",
        "perl -e 'print 1' @",
        'perl -e "@"',
        "node -e @",
    ),
    *(
        'awk "@"',
        'sed "s/a/@/"',
        "sed s/a/b/ @",
        "sed -e s/a/b/ -e @",
        "tar cf x @",
        "find @",
        "git @",
        "find . -exec rm @ +",
    ),
    *("echo ${!x} @", "echo ${a[$i]} @", "echo \\@ 'a'", "echo $@", "echo ${x^} @"),
    *("echo 'a", 'echo "a @', "echo $(a @", "cat <<END\n@", "cat <<END '\n@\nEND\n'"),
    *("bash -c 'eval \"$1\"' _ @", "bash -c 'echo $(( $1 ))' _ @", "bash -c '$1' _ @", 'bash -c "eval \\$1" _ @'),
)


def filled(command: str) -> str:
    return command.replace("@", "\0v\0")


@pytest.mark.parametrize("command", ACCEPTED)
def test_a_command_that_evaluates_no_value_is_accepted(command: str) -> None:
    assert len(check_command(filled(command))) == command.count("@")


@pytest.mark.parametrize("command", REFUSED)
def test_a_command_that_could_evaluate_a_value_is_refused(command: str) -> None:
    with pytest.raises(Unproven):
        check_command(filled(command))


@pytest.mark.parametrize("path", SHELLS)
def test_no_value_becomes_code_in_any_position_of_any_command(tmp_path: Path, path: str) -> None:
    """1,000 commands × 32 payloads; `python -m tests.sdk.shell_contexts --contexts 20000` runs more."""
    (directory := tmp_path / "work").mkdir()
    found = try_commands(path, list(commands(1000, seed=1)), directory)
    assert found.cases >= 10_000
    assert (found.executed, found.changed) == ((), ())
    assert found.contexts - found.refused > 100


@pytest.mark.parametrize(
    "command", ["bash -c 'echo '@", "x=@; echo $((x))", "eval echo @", "[[ -v @ ]]", "echo @ | sh"]
)
def test_the_same_payloads_run_in_commands_that_are_refused(tmp_path: Path, command: str) -> None:
    run("/bin/bash", command.replace("@", '"${EVERTICK_VALUE_0}"'), tmp_path)
    assert list(tmp_path.rglob(CANARY))


def test_a_refused_command_names_the_safe_form_unless_its_author_takes_the_risk() -> None:
    @dag(params={"who": "x"})
    def reports() -> None:
        shell("safe", "bash -c 'echo \"$1\"' _ {{ params.who }}")
        shell("risky", "bash -c 'echo {{ params.who }}'", unsafe_template=True)
        shell("flags", "ls {{ params.who | unquoted }}", unsafe_template=True)

    published = {task.name: task.unsafe_template for task in reports().spec.tasks}
    assert published == {"safe": False, "risky": True, "flags": True}

    def refused() -> None:
        shell("report", "bash -c 'echo {{ params.who }}'")

    with pytest.raises(InvalidDag, match="pass the value as an argument: bash -c") as caught:
        dag(params={"who": "x"})(refused)()
    assert caught.value.file == __file__ and caught.value.line is not None
    assert "unsafe_template=True" in caught.value.message


@pytest.mark.parametrize(
    "command",
    [
        "{% if params.x %}echo a{% else %}eval {{ params.x }}{% endif %}",
        "{% for each in params.x %}sh -c {{ each }}\n{% endfor %}",
        "{% if params.a %}echo '{% endif %}{{ params.x }}'",
        "echo {{ params.x | unquoted }}",
        "{% filter upper %}{{ params.x }}{% endfilter %}",
        "{% set y %}{{ params.x }}{% endset %}{{ y }}",
    ],
)
def test_each_branch_of_a_template_is_checked(command: str) -> None:
    with pytest.raises(InvalidDag, match="could run as code"):
        check_shell_template("task", command)


def test_a_branch_that_publishing_did_not_see_is_refused_before_it_runs() -> None:
    many = "".join(f"{{% if params.n == {number} %}} {number}{{% endif %}}" for number in range(7))
    command = "{% if params.n != 8 %}echo{% else %}eval{% endif %}" + many + " {{ params.x }}"
    check_shell_template("task", command)
    assert render_shell(command, {"params": {"x": "x", "n": 1}})
    with pytest.raises(InvalidTemplate, match="could run as code"):
        render_shell(command, {"params": {"x": "x", "n": 8}})
