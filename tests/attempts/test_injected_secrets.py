"""Attempts that were granted secrets: they have them, nobody else does, and nothing of them is seen."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from evertick.domain.attempt import Isolation, Outcome
from evertick.executors.local.child_process import ExecutorLimits
from tests.executors.local.executor_rig import dag_of, rig

SECRET = "canary-5f2d\"x'9"
PASSWORD = "pass/word+1"
GRANTED = json.dumps(
    {
        "secret": {"token": SECRET},
        "connection": {"db": f"postgresql://anna:{'pass%2Fword%2B1'}@host:5432/shop"},
        "variable": {"limits": '{"rows": 5}', "region": "eu"},
    }
)
FORMS = (
    SECRET,
    PASSWORD,
    "pass%2Fword",
    base64.b64encode(SECRET.encode()).decode()[:16],
    SECRET.encode().hex(),
    "canary-5f2d",
)

PRINTS = """def prints(context):
    s = context.secrets['token']
    print(s); print(s[:5], end=''); print(s[5:]); print(repr(context))
    context.logger.warning('it is %s', s); sys.stderr.write(s.encode().hex() + '\\n')
    subprocess.run(['echo', 'raw', s]); os.write(1, s[:7].encode()); os.write(1, s[7:].encode() + b'\\n')
    print('x' * 16380 + s); os.write(2, b'y' * 70000 + s.encode() + b'y' * 70000)
"""
RETURNS = """def returns(context):
    return {'t': context.secrets['token'], 'db': context.connections['db'].uri, 'ok': context.variables}
"""
WAITS = """async def waits(context):
    print(context.secrets['token'])
    push('p', context.secrets['token'].encode())
    return 1
"""
LOOKS = """def environment():
    return {k: v for k, v in os.environ.items() if 'EVERTICK_SECRET' in k}, open('/proc/self/cmdline').read()
"""
# Every process that it may look at: what it was called with, and the first environment of all others.
SPIES = """def spies(context):
    found = []
    for place in os.listdir('/proc'):
        if place.isdigit():
            for name in ('cmdline', 'environ'):
                try:
                    if context.secrets['token'].encode() in open(f'/proc/{place}/{name}', 'rb').read():
                        found.append(name)
                except OSError:
                    pass
    return found
"""
# Every file that it may read, in the places that attempts share, and every file that a neighbour holds open.
SEARCHES = """def searches():
    found, looked, needle = [], 0, 'canary-' + '5f2d'
    for root in (os.environ['TMPDIR'], os.environ['SHARED_PLACE'], '/proc/self/fd'):
        for folder, _, names in os.walk(root):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    if os.path.isfile(path) and os.stat(path).st_size < 10**6 and not path.endswith('d.py'):
                        looked += 1
                        if needle.encode() in open(path, 'rb').read():
                            found.append(path)
                except OSError:
                    pass
    return found, looked
"""
SOURCE = dag_of(
    RETURNS,
    PRINTS,
    WAITS,
    LOOKS,
    SPIES,
    SEARCHES,
    "def raises(context):\n    raise ValueError('z' * 990 + context.secrets['token'])",
    "def fails(context):\n    raise Fail(context.connections['db'].password)",
    "def exits(context):\n    sys.exit(context.secrets['token'])",
    "def unstorable(context):\n    return {context.secrets['token']: object()}",
)
TOOL = """
echo '{"evertick": "result", "value": 1}'
echo $EVERTICK_CONNECTION_DB
echo $EVERTICK_SECRET_TOKEN >&2
"""
SHELL = f"""
from evertick import *
@dag
def d():
    shell("say", "true", secrets=["token"])
    shell("template", "{{{{ secrets.token }}}}", secrets=["token"], connections=["db"], unsafe_template=True)
    program("tool", ["sh", "-c", {TOOL!r}], connections=["db"])
"""


def assert_hidden(outcome: Outcome) -> str:
    """None of it anywhere; gives what the attempt said."""
    for form in FORMS:
        assert form not in outcome.log.decode() + repr(outcome)
    return f"{outcome.log.decode()}{outcome.reason}{outcome.result_json}"


async def test_a_task_has_what_it_declared_and_shows_none_of_it(tmp_path: Path) -> None:
    async with rig(tmp_path, SOURCE, limits=ExecutorLimits(inline_log_bytes=10**6)) as made:
        returned = await made.run("returns", granted_json=GRANTED)
        assert_hidden(returned)
        value = json.loads(returned.result_json or "")
        assert value == {"t": "***", "db": "***", "ok": {"limits": {"rows": 5}, "region": "eu"}}
        printed = await made.run("prints", granted_json=GRANTED)
        assert printed.kind == "success", printed
        assert assert_hidden(printed).count("***") >= 8
        for name in ("raises", "fails", "exits", "unstorable"):
            failed = await made.run(name, granted_json=GRANTED)
            assert failed.kind == "failed"
            assert "***" in assert_hidden(failed)
        waited = await made.run("waits", granted_json=GRANTED)
        assert "***" in assert_hidden(waited)


async def test_the_next_attempt_knows_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path, SOURCE) as made:
        await made.run("returns", granted_json=GRANTED)
        seen: Any = await made.result("environment")
        assert seen[0] == {}
        assert SECRET not in seen[1]
        mine: Any = await made.result("environment", granted_json=GRANTED)
        assert mine[0] == {}, "a Python task's secrets are in its context alone"


async def test_commands_get_them_by_their_environment_and_never_as_arguments(tmp_path: Path) -> None:
    async with rig(tmp_path, SHELL) as made:
        command = 'echo $EVERTICK_SECRET_TOKEN; echo "$EVERTICK_CONNECTION_DB"; tr "\\0" " " < /proc/$$/cmdline; exit 3'
        said = await made.run("say", granted_json=GRANTED, command=command)
        assert (said.reason, said.exit_code) == ("exited with code 3", 3)
        assert assert_hidden(said).count("RAW ***") == 2
        command = '[ {{ secrets.token }} = "$EVERTICK_SECRET_TOKEN" ]; echo {{ connections.db.password }} {{ connections.db.host }}'
        rendered = await made.run("template", granted_json=GRANTED, command=command)
        assert rendered.kind == "success", rendered.log
        said = assert_hidden(rendered)
        assert "RAW *** host" in said
        assert 'RENDER EVERTICK_VALUE_0 = "***"' in said and 'RENDER EVERTICK_VALUE_2 = "host"' in said
        tool = await made.run("tool", granted_json=GRANTED)
        assert tool.result_json == "1"
        assert assert_hidden(tool).count("***") == 2


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_airflow_2026_49298_no_process_is_called_with_a_secret(tmp_path: Path, isolation: Isolation) -> None:
    """Whoever lists processes sees their arguments, and root their environment."""
    async with rig(tmp_path, SOURCE) as made:
        assert await made.result("spies", granted_json=GRANTED, isolation=isolation) == []


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_windmill_2026_47107_an_attempt_leaves_nothing_in_files_for_the_next_one(
    tmp_path: Path, isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the one before was granted, and what it printed of it, is in no file that the next one can read."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("SHARED_PLACE", str(tmp_path))
    # The byte code of the file has the canary in it because its text has.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.chdir(tmp_path)
    async with rig(tmp_path, SOURCE, slots=1) as made:
        printed = await made.run("prints", granted_json=GRANTED, isolation=isolation)
        assert printed.kind == "success"
        (tmp_path / "planted").write_text("canary-5f2d")
        found, looked = await made.result("searches", isolation=isolation)
        assert found == [str(tmp_path / "planted")], "it looks, and finds only what was put there to be found"
        assert looked > 1
