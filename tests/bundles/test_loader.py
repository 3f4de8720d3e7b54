"""Loading DAG files in a process of their own: what is found, and everything that a file can do wrong."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import evertick
from evertick.bundles import loader_process
from evertick.bundles.loader import ImportProblem, LoadedFile, find_duplicates, load_file
from evertick.domain.dags.spec import from_json, structural_hash
from evertick.sdk.runtime import find_task
from tests.waiting import eventually

EXAMPLES = Path(evertick.__file__).parent / "examples"
HEAD = "from evertick import dag, task, shell, task_group, Param\n@task\ndef work(*given): ...\n"
ONE_DAG = HEAD + "@dag\ndef one(): work()\n"

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, source: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))

    return write


def names(loaded: LoadedFile) -> list[str]:
    assert loaded.error is None, loaded.error
    return [dag.name for dag in loaded.dags]


async def problem(folder: Path, file: str = "x.py", timeout_seconds: float = 30) -> ImportProblem:
    loaded = await load_file(folder, file, timeout_seconds=timeout_seconds)
    assert loaded.error is not None, loaded
    assert loaded.dags == ()
    return loaded.error


# --- what is found ---


async def test_a_dag_is_found_whether_or_not_its_file_calls_it(tmp_path: Path, write: Write) -> None:
    write("x.py", HEAD + "@dag\ndef called(): work()\n@dag\ndef uncalled(): work()\ncalled()\n")
    assert names(await load_file(tmp_path, "x.py")) == ["called", "uncalled"]


async def test_dags_made_by_functions_are_found(tmp_path: Path, write: Write) -> None:
    write("lib/factory.py", HEAD + "def make(name):\n    @dag(name=name)\n    def inner(): work()\n")
    write("x.py", "from lib.factory import make\nfor name in ('a', 'b'):\n    make(name)\n")
    loaded = await load_file(tmp_path, "x.py")
    assert names(loaded) == ["a", "b"]
    assert loaded.closure == ("lib/factory.py", "x.py")


async def test_dags_of_an_imported_file_stay_with_that_file(tmp_path: Path, write: Write) -> None:
    write("other.py", HEAD + "@dag\ndef theirs(): work()\n")
    write("x.py", "from other import theirs, work\nfrom evertick import dag\n@dag\ndef mine(): work()\n")
    assert names(await load_file(tmp_path, "x.py")) == ["mine"]
    assert names(await load_file(tmp_path, "other.py")) == ["theirs"]


async def test_calling_an_imported_dag_makes_it_belong_here(tmp_path: Path, write: Write) -> None:
    write("other.py", HEAD + "@dag\ndef theirs(): work()\n")
    write("x.py", "from other import theirs\ntheirs()\n")
    assert names(await load_file(tmp_path, "x.py")) == ["theirs"]


async def test_a_file_without_dags_is_not_an_error(tmp_path: Path, write: Write) -> None:
    write("x.py", "VALUE = 3\n")
    assert names(await load_file(tmp_path, "x.py")) == []


@pytest.mark.parametrize("file", ["json.py", "my-dag.py", "sub/logging.py", "evertick.py", "deep/er/x.py", "a b/ü.py"])
async def test_a_file_may_have_any_name(tmp_path: Path, write: Write, file: str) -> None:
    write(file, ONE_DAG)
    assert names(await load_file(tmp_path, file)) == ["one"]


async def test_a_package_may_use_relative_imports(tmp_path: Path, write: Write) -> None:
    write("pack/__init__.py", "LOADED = True\n")
    write("pack/tasks.py", HEAD)
    write("pack/x.py", "from .tasks import work\nfrom evertick import dag\n@dag\ndef one(): work()\n")
    loaded = await load_file(tmp_path, "pack/x.py")
    assert names(loaded) == ["one"]
    assert loaded.closure == ("pack/__init__.py", "pack/tasks.py", "pack/x.py")


async def test_what_a_file_prints_disturbs_nothing(tmp_path: Path, write: Write) -> None:
    noise = "import os, sys\nprint('{}' * 100_000)\nsys.stderr.write('x' * 1_000_000)\nos.write(1, b'\\n')\n"
    write("x.py", noise + ONE_DAG)
    assert names(await load_file(tmp_path, "x.py")) == ["one"]


async def test_closing_every_stream_disturbs_nothing(tmp_path: Path, write: Write) -> None:
    write("x.py", "import os\nfor fd in (0, 1, 2): os.close(fd)\n" + ONE_DAG)
    assert names(await load_file(tmp_path, "x.py")) == ["one"]


async def test_loading_writes_nothing_beside_the_file(tmp_path: Path, write: Write) -> None:
    write("helper.py", "X = 1\n")
    write("x.py", "import helper\n" + ONE_DAG)
    await load_file(tmp_path, "x.py")
    assert {str(path) for path in files_in(tmp_path)} == {"helper.py", "x.py"}


def files_in(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in folder.rglob("*")]


async def test_user_code_is_never_imported_here(tmp_path: Path, write: Write) -> None:
    write("x.py", f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n" + ONE_DAG)
    await load_file(tmp_path, "x.py")
    assert int((tmp_path / "pid").read_text()) != os.getpid()


async def test_threads_that_importing_starts_are_named(tmp_path: Path, write: Write) -> None:
    write(
        "x.py",
        "import threading\nthreading.Thread(target=threading.Event().wait, name='poller', daemon=True).start()\n"
        + ONE_DAG,
    )
    loaded = await load_file(tmp_path, "x.py")
    assert names(loaded) == ["one"]
    assert loaded.uses_threads == ("poller",)


def test_a_thread_that_ends_while_it_is_looked_up_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the name of a thread that has ended is ESRCH; it once failed the file."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()

    def ended(path: Path) -> str:
        raise ProcessLookupError(path)

    monkeypatch.setattr(threading, "enumerate", list)
    monkeypatch.setattr(Path, "read_text", ended)
    try:
        assert loader_process._threads() == []
    finally:
        stop.set()
        thread.join()


async def test_a_large_dag_is_loaded_whole(tmp_path: Path, write: Write) -> None:
    write("x.py", HEAD + "@dag\ndef wide():\n    start = work()\n    work([work(start) for _ in range(5_000)])\n")
    loaded = await load_file(tmp_path, "x.py")
    assert names(loaded) == ["wide"]
    assert len(loaded.dags[0].spec.tasks) == 5_002


async def test_the_examples_load(tmp_path: Path) -> None:
    for file, tasks in (("heartbeat.py", 3), ("etl.py", 10), ("report.py", 6)):
        loaded = await load_file(EXAMPLES, file)
        assert names(loaded) == [file.removesuffix(".py")]
        assert len(loaded.dags[0].spec.tasks) == tasks
        assert loaded.uses_threads == ()


# --- one hash ---

UNORDERED = HEAD + textwrap.dedent(
    """
    NAMES = {"alpha", "beta", "gamma", "delta", "epsilon"}

    @dag(tags=NAMES, params={name: 1 for name in NAMES}, schedules={name: "@daily" for name in NAMES})
    def unordered():
        start, end = work.override(name="start")(), work.override(name="end")()
        for name in NAMES:
            start >> work.override(name=name)() >> end
        work([work.override(name=f"{name}_2")() for name in NAMES])
    """
)


async def test_processes_with_different_hash_seeds_give_one_hash(tmp_path: Path, write: Write) -> None:
    write("x.py", UNORDERED)
    answers = await asyncio.gather(*(load_with_seed(tmp_path, seed) for seed in (0, 1, 2, 12_345)))
    assert len({each["spec"] for each in answers}) > 1, "the source is not unordered enough to prove anything"
    assert len({each["hash"] for each in answers}) == 1


async def load_with_seed(folder: Path, seed: int) -> dict[str, str]:
    """What the loading process would answer if its interpreter walked sets in another order."""
    script = (
        "import json, sys, pathlib, evertick.bundles.loader_process as m;"
        " print(json.dumps(m.load(pathlib.Path(sys.argv[1]), 'x.py')))"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(folder)), env={"PYTHONHASHSEED": str(seed)}, stdout=subprocess.PIPE
    )
    answer, _ = await process.communicate()
    (found,) = json.loads(answer)["dags"]
    assert isinstance(found, dict)
    return found


async def test_every_load_walks_sets_in_the_same_order(tmp_path: Path, write: Write) -> None:
    """Otherwise `work__1` could stand for one thing when it is published and for another when it runs."""
    write("x.py", UNORDERED)
    loads = [load_file(tmp_path, "x.py", environment={"PYTHONHASHSEED": seed}) for seed in ("1", "random")]
    assert len({loaded.dags[0].spec_json for loaded in await asyncio.gather(*loads)}) == 1


async def test_the_hash_is_that_of_the_spec(tmp_path: Path, write: Write) -> None:
    write("x.py", ONE_DAG)
    (found,) = (await load_file(tmp_path, "x.py")).dags
    assert found.hash == structural_hash(from_json(found.spec_json)) == structural_hash(found.spec)


def test_a_thousand_builds_in_one_process_give_one_hash() -> None:
    definitions: dict[str, object] = {}
    exec(compile(UNORDERED, "x.py", "exec"), definitions)
    build = definitions["unordered"]
    assert callable(build)
    assert len({structural_hash(build().spec) for _ in range(1_000)}) == 1


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        ("x = 1\ny = = 2\n", 2, "SyntaxError: invalid syntax: y = = 2"),
        ("from airflow import DAG\n", 1, "for DAG, use the decorator @dag"),
        ("import nothing_like_this\n", 1, "ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("\n\nraise RuntimeError('first line\\nsecond')\n", 3, "RuntimeError: first line\nsecond"),
        ("import sys\nsys.exit(3)\n", 2, "sys.exit(3)"),
        ("def f():\n    return 1 / 0\nf()\n", 2, "ZeroDivisionError: division by zero"),
        (HEAD + "work()\n", 4, "'work' was used outside a DAG"),
        (HEAD + "@task(retris=1)\ndef other(): ...\n", 4, "did you mean 'retries'?"),
        (HEAD + "@dag(schedule='0 25 * * *')\ndef one(): work()\n", 4, "25"),
        (HEAD + "@dag\ndef one():\n    a = work()\n    b = work(a)\n    b >> a\n", 4, "work >> work__1 >> work"),
        (HEAD + "@dag\ndef one(): ...\n", 4, "has no tasks"),
        (HEAD + "@dag\ndef one(region): work()\n", 4, "missing a required argument: 'region'"),
        (ONE_DAG + "@dag(name='one')\ndef other(): work()\n", 1, "two DAGs are named 'one'"),
        (HEAD + "@dag\ndef one():\n    work()\n    raise KeyError('k')\n", 7, "KeyError: 'k'"),
        (HEAD + "@dag(params={'p': object()})\ndef one(): work()\n", 4, "param 'p'"),
        ("raise ValueError('nul \\0 and \\ud800')\n", 1, "nul \ufffd and \ufffd"),
    ],
)
async def test_a_broken_file_is_told_by_file_line_and_message(
    tmp_path: Path, write: Write, source: str, line: int, expected: str
) -> None:
    write("x.py", source)
    found = await problem(tmp_path)
    assert (found.file, found.line) == ("x.py", line)
    assert expected in found.message


async def test_a_fault_in_an_imported_module_is_told_at_its_own_line(tmp_path: Path, write: Write) -> None:
    write("lib/helper.py", "def f():\n    raise OSError('from the helper')\n")
    write("x.py", "from lib.helper import f\nf()\n")
    found = await problem(tmp_path)
    assert (found.file, found.line) == ("lib/helper.py", 2)
    assert "x.py" in found.traceback
    assert "evertick" not in found.traceback
    loaded = await load_file(tmp_path, "x.py")
    assert loaded.closure == ("lib/helper.py", "x.py"), "a change of the helper must load the file again"


async def test_an_import_that_hangs_is_stopped_with_everything_it_started(tmp_path: Path, write: Write) -> None:
    write(
        "x.py",
        f"""
        import os, signal, subprocess
        child = subprocess.Popen(["sleep", "1000"])
        stray = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}} {{stray.pid}} ")
        signal.pause()
        """,
    )
    pids = tmp_path / "pids"
    for seconds in (1, 4, 16):  # on a busy machine the first second may pass before the file gets that far
        found = await problem(tmp_path, timeout_seconds=seconds)
        assert f"importing took longer than {seconds} s" in found.message
        if pids.exists():
            break
    for pid in map(int, pids.read_text().split()):
        await eventually(lambda pid=pid: not is_running(pid))  # type: ignore[misc]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_an_import_that_hangs_names_its_line(tmp_path: Path, write: Write) -> None:
    (tmp_path / "lib").mkdir()
    write("lib/slow.py", "def spin():\n    while True:\n        pass\n")
    write("x.py", "from lib.slow import spin\nspin()\n")
    for seconds in (1, 4, 16):  # on a busy machine the first second may pass before the file gets that far
        found = await problem(tmp_path, timeout_seconds=seconds)
        if found.line is not None:
            break
    assert (found.file, found.line) in (("lib/slow.py", 2), ("lib/slow.py", 3))
    place = f"was stopped in lib/slow.py, line {found.line}. Move slow work into tasks."
    assert place in found.message and "x.py" in found.traceback


async def test_cancelling_a_load_kills_the_import(tmp_path: Path, write: Write) -> None:
    os.mkfifo(tmp_path / "pid")
    write("x.py", f"import os, signal\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nsignal.pause()\n")
    loading = asyncio.ensure_future(load_file(tmp_path, "x.py"))
    pid = int(await asyncio.to_thread((tmp_path / "pid").read_text))
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert not is_running(pid)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os\nos._exit(7)\n", "exited with code 7"),
        ("import os\nos._exit(0)\n", "exited with code 0"),
        ("import os\nos.kill(os.getpid(), 9)\n", "was killed by SIGKILL"),
        ("import ctypes\nctypes.string_at(0)\n", "was killed by SIGSEGV"),
    ],
)
async def test_a_crash_is_told_by_exit_code_or_signal(tmp_path: Path, write: Write, source: str, expected: str) -> None:
    write("x.py", source)
    assert expected in (await problem(tmp_path)).message


async def test_the_last_words_of_a_crash_are_kept(tmp_path: Path, write: Write) -> None:
    write("x.py", "import ctypes\nctypes.string_at(0)\n")
    assert "x.py" in (await problem(tmp_path)).traceback


async def test_a_child_that_outlives_the_import_does_not_delay_the_answer(tmp_path: Path, write: Write) -> None:
    write("x.py", "import os, signal\nif os.fork() == 0:\n    signal.pause()\n" + ONE_DAG)
    assert names(await load_file(tmp_path, "x.py")) == ["one"]


@pytest.mark.parametrize("junk", ["junk", "{}", "[1]", '{"dags": [{"name": "x", "spec": "{}", "hash": ""}]}'])
async def test_an_answer_that_user_code_forged_is_refused(tmp_path: Path, write: Write, junk: str) -> None:
    write(
        "x.py",
        f"""
        import os
        for fd in range(3, 100):
            try:
                os.write(fd, {junk + chr(10)!r}.encode())
            except OSError:
                pass
        os._exit(0)
        """,
    )
    assert "returned an invalid answer" in (await problem(tmp_path)).message


async def test_a_file_that_is_gone_is_a_problem(tmp_path: Path) -> None:
    assert "there is no file x.py" in (await problem(tmp_path)).message


async def test_the_environment_is_what_the_caller_gives(tmp_path: Path, write: Write) -> None:
    write("x.py", "import os\nassert 'SECRET_URL' not in os.environ and os.environ['SHOWN'] == '1'\n" + ONE_DAG)
    assert names(await load_file(tmp_path, "x.py", environment={"SHOWN": "1"})) == ["one"]


async def test_loading_leaves_no_descriptor_open(tmp_path: Path, write: Write) -> None:
    write("x.py", ONE_DAG)
    await load_file(tmp_path, "x.py")
    before = open_descriptors()
    await load_file(tmp_path, "x.py")
    assert open_descriptors() <= before, "what earlier tests left may be cleared away meanwhile"


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_a_dag_that_two_files_have_is_found(tmp_path: Path, write: Write) -> None:
    write("x.py", ONE_DAG)
    write("y.py", ONE_DAG + "@dag\ndef own(): work()\n")
    files = [await load_file(tmp_path, file) for file in ("y.py", "x.py")]
    assert find_duplicates(files) == {"one": ("x.py", "y.py")}


async def test_a_compiled_task_is_found_again_by_name(tmp_path: Path) -> None:
    """What publishing wrote down leads an attempt back to the code."""
    from evertick.sdk.dag import load_dags

    loaded = await load_file(EXAMPLES, "heartbeat.py")
    dags = load_dags(EXAMPLES, "heartbeat.py")
    for spec in loaded.dags[0].spec.tasks:
        assert find_task(dags, "heartbeat", spec.name).name == spec.name


async def test_a_function_computes_the_instants_of_a_schedule(tmp_path: Path, write: Write) -> None:
    """They are not part of the DAG's version, and a function that fails or goes back is the file's error."""
    body = "def odd(after):\n    day = after.replace(hour=6, minute=0, second=0, microsecond=0) + timedelta(days=1)\n"
    body += "    return day if day.day % 2 else day + timedelta(days=1)\n"
    text = "from datetime import timedelta\n" + HEAD + body + "@dag(schedule=odd)\ndef late(): work()\n"
    write("x.py", text)
    (first,) = (await load_file(tmp_path, "x.py")).dags
    (again,) = (await load_file(tmp_path, "x.py")).dags
    spec = first.spec.schedules[0].spec
    assert len(spec.instants) == 500 and {(at.hour, at.day % 2) for at in spec.instants} == {(6, 1)}
    assert again.hash == first.hash and "times" not in first.spec_json
    write("x.py", text.replace("hour=6", "hour=7"))
    (changed,) = (await load_file(tmp_path, "x.py")).dags
    assert changed.hash != first.hash
    write("x.py", text.replace("return day", "return 1 / 0"))
    assert "timetable of schedule 'default': ZeroDivisionError" in (await problem(tmp_path)).message
    write("x.py", text.replace("return day", "return after"))
    assert "it must be a later instant, or None" in (await problem(tmp_path)).message
