"""Code rules that a program can check. A rule has an exception only by name and with its reason."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from tests.source_tree import ROOT, SOURCE, Place, modules, places

TESTS = ROOT / "tests"

# Lowest first: a package imports only packages before it. Nothing imports `examples`.
LAYERS = (
    *(
        "release",
        "domain",
        "extensions",
        "config",
        "processes",
        "db",
        "engine",
        "sdk",
        "observability",
        "runtime",
        "secrets",
        "storage",
        "bundles",
    ),
    *(
        "logs",
        "attempts",
        "airflow",
        "executors",
        "runner",
        "launcher",
        "agent",
        "notifications",
        "scheduler",
        "publisher",
        "supervisor",
        "doctor",
    ),
    *("operations", "api", "ui", "client", "cli"),
)
# DAG files import these; each of their imports costs every process that runs a task.
FRONTS = {
    "__main__": ("cli",),
    "sdk": ("sdk", "domain", "extensions"),
    "__init__": ("sdk", "domain"),
    "testing": ("sdk", "domain"),
    # Of applications: the text of one statement.
    "enqueue": ("db",),
    # Loaded by pytest, in every project: it imports everything late.
    "pytest_plugin": ("sdk", "domain", "testing", "bundles", "config", "publisher"),
}

# Written by a tool from the models of Airflow's client, so it has their names and their length.
GENERATED = {"api/airflow/models"}
LONGEST_MODULE = 500
MOST_MODULES = 25
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 7

# name of the function: why it takes more
MANY_PARAMETERS: dict[str, str] = {
    "engine/asks._trigger_for_attempt": "the arguments of its stored function",
    "engine/asks._put_variable_for_attempt": "the arguments of its stored function",
    "engine/asks._put_state_for_attempt": "the arguments of its stored function",
    "executors/local/executor.LocalExecutor.__init__": "what it needs of the runner; callers pass it by name",
    "engine/runs.trigger_run": "the arguments of its stored function",
    "engine/runs.trigger": "all that a caller may say about a run; most name two",
    "sdk/operators.http": "a request has as many parts, and authors pass them by name",
    "engine/shards.poll_work": "everything that an idle leader reads, in one statement",
    "engine/maintenance.reconcile_runs": "where the batch begins has two parts",
    "testing.simulate": "users' tests describe a whole scenario in one call",
}

# module (and function): why it may read the environment
ENVIRONMENT_READERS = {
    "config": "settings are read here, once",
    "cli": "passes its environment to the services that it supervises",
    "supervisor/postgres.environment": "PostgreSQL's programs get no variable that would change their behavior",
    "supervisor/fork_server._ForkServer._become": "a fork adopts the environment of its request, as a new process would",
    "bundles/zygote_forks._mark_setter": "the processes of a killed runner are found by it",
    "airflow/side_door.side_door": "Airflow's SDK names the descriptor to child interpreters by a variable",
    "processes/linux.forget_variable": "the first password is removed from it",
    "processes/portable.forget_variable": "the first password is removed from it",
    "processes/portable.first_environment": "that of another process",
    "processes/system": "tests force the portable calls, and every process must choose the same",
    "processes/thread_pools.without_pool_threads": "the sizes of thread pools are the user's, if they are set",
    "supervisor/fork_server._name": "the option of setproctitle that keeps the environment unchanged",
}

# module.function: why every exception must be caught there
CATCH_ALL = {
    "supervisor/fork_server.serve": "a fork must never return into the code of the process that forked it",
    "supervisor/fork_server._ForkServer._become": "a fork must never return into the code of the process that forked it",
    "bundles/zygote_forks._become": "a fork must never return into the code of the process that forked it",
    "secrets/backends.SecretProvider._ask": "a backend is third-party code, and its messages may quote secrets",
    "runner/launch.Launcher._prepare_and_start": "one task that cannot be prepared must not stop the others (V11)",
    "executors/local/executor.LocalExecutor._reply": "one question that cannot be answered must not stop the executor",
    "airflow/attempt.AirflowTask.__call__": "the attempt: every exception of the task is its outcome",
    "airflow/triggers.wait_for_event": "a trigger is user code, and its failure is passed to its task",
    "airflow/triggers._bounded": "the end of a trigger is user code, and must not change its event",
    "airflow/callbacks.DagCallback.__call__": "the attempt: every exception of the callbacks is its outcome",
    "airflow/callbacks.DagCallback._call": "a callback is user code, and must not keep the others from being called",
    "airflow/schedules._computed": "a timetable is user code, and need not be serializable",
    "airflow/tasks._custom_weight": "a strategy of weights is user code",
    "bundles/loader_process._computed": "a timetable is user code, and its failure is the file's error",
    "airflow/loader._check": "Airflow's checks of a DAG raise errors of many kinds",
    "runner/session.LocalSession._apply_events_meanwhile": "one event must not end a session and all of its attempts",
    "runner/remote/session.Observer._listen": "an executor may be user code, and nothing depends on its signals",
    "runner/remote/worker_pool.WorkerPool._work": "one attempt that cannot be submitted must not stop the others (V11)",
    "runner/http_results.HttpTransfers.upload": "an attempt whose end is never reported would hold its slot permanently",
    "storage/results.ResultTransfers.upload": "an attempt whose end is never reported would hold its slot permanently",
    "extensions.find_extension": "an extension is third-party code: an error in it is a distribution to correct",
    "notifications/delivery._send_by_plugin": "a notifier is third-party code: an error in it is a failed delivery",
    "attempts/typed_json._encoded": "a serializer is third-party code: an error in it is the result's",
    "attempts/typed_json._decoded": "a serializer is third-party code: an error in it is the result's",
    "executors/registry.open_executor": "an executor may be third-party code: an error in it is a setting to correct",
    "runtime/thread_runner.ThreadRunner.do": "every exception of the work in a thread is raised again in its caller",
    "runtime/loop.run_loop": "a failing tick must not end the loop",
    "scheduler/notification_sender.NotificationSender._deliver": "a notification that fails to prepare must not stop the others",
    "runtime/circuit_breaker.CircuitBreaker.attempt": "one step that fails must not stop the others (A12)",
    "observability/health_endpoint.HealthServer._answer": "the outermost handler: the client receives a 500, the port stays open",
    "api/app.FastReads.__call__": "an error of a fast read is raised again by the regular route, which reports it",
    "sdk/local_run._Run._try": "the attempt: every exception of the task is its outcome",
    "attempts/body.run_body": "the attempt: every exception of the task is its outcome",
    "attempts/body.await_body": "the attempt: every exception of the task is its outcome",
    "attempts/body.described": "the text of a user's exception is user code",
    "attempts/body.user_traceback": "the text of a user's exception is user code",
    "attempts/child.Child._run": "the attempt: an order that cannot be prepared is its outcome",
    "attempts/coroutines.run_alone": "the attempt: every exception of the task is its outcome",
    "attempts/coroutines._CoroutineServer._accept": "the attempt: an order that cannot be prepared is its outcome",
    "logs/capture.CapturedLogging.emit": "formatting a user's log record is user code; the logging module does the same",
    "executors/local/executor.LocalExecutor._fetch_bundle": "one bundle that cannot be fetched fails its own attempts only",
    "attempts/body.load": "importing a bundle is user code",
    "bundles/loader_process.load": "importing a file is user code",
    "cli/main.run": "the outermost handler: users get a message, never a traceback",
}

# module.function: why the import is not at the top of the module
LATE_IMPORTS = {
    "attempts/durable._Channel.commit": "few tasks commit, and each import costs every process that runs one",
    "domain/errors.did_you_mean": "difflib, only for an error that suggests a name",
    "config._parsed": "tomllib, only where there is a configuration file",
    "supervisor/fork_server._name": "setproctitle reads its options when it is imported",
    "engine/accounts._hasher": "argon2, only where a password is checked",
    "api/oidc/provider.ProviderClient._send": "httpx2 takes 46 ms and 16 MB, only in a process with a provider",
    "engine/accounts._verify": "argon2, only where a password is checked",
    "scheduler/notification_sender.NotificationSender._sending": "TLS and email, only where something is sent",
    "doctor/database.check_keys": "cryptography, only where keys are checked",
    "secrets/backends.SecretProvider._read": "cryptography, only where a stored value is read",
    "runner/asks.Asks._put_variable": "cryptography, only where a stored value is changed",
    "attempts/child.Child._run": "subprocess, only for commands with secrets; asyncio doubles what each fork copies",
    "attempts/child.Child._hide": "only for attempts with secrets; each fork would map it",
    "attempts/child.Child._mask_output": "only for attempts with secrets; each fork would map it",
    "attempts/child.Child.add": "only for attempts with secrets; each fork would map it",
    "pytest_plugin.pytest_collect_file": "pytest loads the plug-in in every project",
    "pytest_plugin._DagCheck.runtest": "pytest loads the plug-in in every project",
    "pytest_plugin.SimulateSchedule.__call__": "pytest loads the plug-in in every project",
    "pytest_plugin.evertick_server": "pytest loads the plug-in in every project",
    "sdk/options.check_names": "Airflow's names, only for an error",
    "sdk/task.Task._context_advice": "Airflow's names, only for an error",
    "sdk/runtime.TaskContext.__getitem__": "Airflow's names, only for an error",
    "sdk/templates._listed": "Airflow's names, only for an error",
    "sdk/decorators.TaskDecorator.__getattr__": "Airflow's names, only for an error",
    "bundles/loader_process._missing_airflow": "Airflow's names, only for an error",
    "sdk/runtime.CompiledDag.test": "asyncio and ssl, which each fork of a process that runs tasks would map",
    "sdk/templates.check_template": "jinja2, only for DAGs that have templates",
    "sdk/templates._rendering": "jinja2, only for DAGs that have templates",
    "sdk/templates.jinja_environment": "jinja2, only for DAGs that have templates",
    "sdk/task._check_shell": "jinja2 and the rules of the shell, only for commands that have templates",
    "attempts/body._perform": "http.client brings ssl and email, which each fork would map",
    "attempts/shell.prepare_shell": "the masking of secrets, only for commands that have templates",
    "extensions._entry_points": "importlib.metadata takes 20 ms, only where an extension is used",
    "attempts/body._typed": "decimal, uuid and zoneinfo, for values that JSON lacks; each fork would map them",
    "attempts/child.Child.live": "asyncio doubles what each fork copies",
    "attempts/fork_server.ForkServer._load": "asyncio doubles what each fork copies",
    "attempts/fork_server_main.run": "only the reaper needs it, and each fork would map three more libraries",
}


@cache
def all_places() -> list[Place]:
    """Read by the first test that needs them: every worker of a parallel run imports this module."""
    return [place for module in modules(SOURCE) for place in places(module)]


def functions() -> Iterator[tuple[Place, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for place in all_places():
        if isinstance(place.node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield place, place.node


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def is_allowed(importer: str, target: str) -> bool:
    """Whether a module of the package `importer` may import `target`, both without the package's name."""
    layer = target.split(".")[0]
    if importer in FRONTS:
        return layer in FRONTS[importer]
    return layer in LAYERS and importer in LAYERS and LAYERS.index(layer) <= LAYERS.index(importer)


def test_a_package_imports_only_packages_below_it() -> None:
    wrong = [
        f"{place}: {target}"
        for place in all_places()
        for target in imported(place.node)
        if target.startswith("evertick.")
        and place.module.layer != "examples"
        and not is_allowed(place.module.layer, target.removeprefix("evertick."))
    ]
    assert not wrong


def test_the_command_line_and_the_api_do_not_import_each_other() -> None:
    """Both use the packages below them. Only one command starts the API."""
    crossing = [
        place
        for place in all_places()
        for target in imported(place.node)
        if place.module.layer in ("client", "cli") and target.startswith(("evertick.api.", "evertick.ui."))
    ]
    assert {place.module.name for place in crossing} == {"cli/commands/services"}


def test_examples_import_only_what_authors_may() -> None:
    targets = [t for place in all_places() if place.module.layer == "examples" for t in imported(place.node)]
    assert targets
    assert [t for t in targets if t.startswith("evertick.") and t.count(".") > 1] == []


@pytest.mark.parametrize(
    ("importer", "target", "allowed"),
    [
        ("engine", "db.queries.tasks", True),
        ("db", "engine.runs", False),
        ("domain", "db.connect", False),
        ("cli", "domain.errors", True),
        ("sdk", "config.Settings", False),
        ("sdk", "domain.errors", True),
        ("runner", "config.Settings", True),
        ("runner", "scheduler.leadership", False),
        ("config", "domain.errors", True),
        ("config", "db.connect", False),
    ],
)
def test_the_rule_of_layers_allows_one_direction(importer: str, target: str, allowed: bool) -> None:
    assert is_allowed(importer, target) is allowed


def test_decisions_are_pure() -> None:
    """The domain has no I/O and no clock."""
    impure = {"asyncio", "os", "socket", "subprocess", "threading", "time", "psycopg", "structlog", "random"}
    wrong = [
        f"{place}: {target}"
        for place in all_places()
        for target in imported(place.node)
        if place.module.layer == "domain" and target.split(".")[0] in impure
    ]
    assert not wrong


def test_only_the_database_package_has_sql() -> None:
    statement = re.compile(r"\s*(select|insert into \w+|update \w+ set|delete from \w+|with \w+ as|listen|notify) \S")
    wrong = [
        str(place)
        for place in all_places()
        if place.module.layer != "db"
        and isinstance(place.node, ast.Constant)
        and isinstance(place.node.value, str)
        and statement.match(place.node.value)
    ]
    assert not wrong


def test_no_import_hides_inside_a_function() -> None:
    """Except in the command line: its commands import late, for a quick start."""
    hidden = [
        place
        for place in all_places()
        if isinstance(place.node, ast.Import | ast.ImportFrom)
        and place.function != place.module.name
        and place.module.layer != "cli"
    ]
    assert [str(place) for place in hidden if place.function not in LATE_IMPORTS] == []


def test_only_the_settings_read_the_environment() -> None:
    wrong = []
    for place in all_places():
        node = place.node
        reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb")
        named = {place.module.layer, place.function}
        if reads and not named & ENVIRONMENT_READERS.keys():
            wrong.append(str(place))
    assert not wrong


def test_every_module_says_what_it_is_for() -> None:
    bare = [
        str(m.path.relative_to(ROOT))
        for m in [*modules(SOURCE), *modules(TESTS)]
        if m.text.strip() and not m.text.startswith('"""')
    ]
    assert not bare
    long = [m.name for m in modules(SOURCE) if len((ast.get_docstring(m.tree) or "").splitlines()) > 5]
    assert [name for name in long if name != "domain/errors"] == [], (
        "errors.py shows its tree; every other module needs at most five lines"
    )


def test_modules_and_functions_fit_on_a_screen() -> None:
    modules_too_long = [
        m.name for m in modules(SOURCE) if len(m.text.splitlines()) > LONGEST_MODULE and m.name not in GENERATED
    ]
    assert not modules_too_long
    assert [
        str(place)
        for place, function in functions()
        if (function.end_lineno or function.lineno) - function.lineno >= LONGEST_FUNCTION
    ] == []


def test_functions_take_few_parameters() -> None:
    """Except in the command line and the API, where each parameter is an option of the user."""
    wrong = []
    for place, function in functions():
        arguments = function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if (
            count > MOST_PARAMETERS
            and place.module.layer not in ("cli", "api", "ui", "operations")
            and place.function not in MANY_PARAMETERS
        ):
            wrong.append(f"{place}: {count}")
    assert not wrong


def test_a_directory_has_few_modules() -> None:
    count = Counter(m.path.parent for m in modules(SOURCE) if m.path.name != "__init__.py" and m.layer != "examples")
    assert {str(folder): n for folder, n in count.items() if n > MOST_MODULES} == {}


def test_nothing_is_left_for_later() -> None:
    mark = re.compile("|".join(("TO" + "DO", "FIX" + "ME")))
    places_of_it = [
        m.name for m in [*modules(SOURCE), *modules(TESTS), *modules(ROOT / "tools")] if mark.search(m.text)
    ]
    sql = [path.name for path in SOURCE.rglob("*.sql") if mark.search(path.read_text(encoding="utf-8"))]
    assert places_of_it + sql == []


def catches_everything(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    if isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None:
        return False  # cleans up and raises it again
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(kind is None or getattr(kind, "id", "") in ("Exception", "BaseException") for kind in kinds)


def test_every_exception_is_caught_only_where_that_is_intended() -> None:
    found = [place for place in all_places() if catches_everything(place.node)]
    assert [str(place) for place in found if place.function not in CATCH_ALL] == []


def test_every_exception_from_a_rule_is_needed() -> None:
    """An entry of a list above that is not needed any more must be removed, unless its package does not exist."""
    catching = {place.function for place in all_places() if catches_everything(place.node)}
    late = {place.function for place in all_places() if isinstance(place.node, ast.Import | ast.ImportFrom)}
    present = {module.name for module in modules(SOURCE)}
    stale = [name for name in CATCH_ALL if name not in catching] + [name for name in LATE_IMPORTS if name not in late]
    assert [name for name in stale if name.split(".")[0] in present] == []


def test_the_program_prints_only_through_its_command_line() -> None:
    assert [
        str(place)
        for place in all_places()
        if isinstance(place.node, ast.Call)
        and isinstance(place.node.func, ast.Name)
        and place.node.func.id == "print"
        and place.module.layer != "examples"
    ] == []


_DAG_FILES = ("airflow/dags/", "airflow/features/")


def test_no_test_sleeps() -> None:
    """Tests wait for a condition, with a deadline: tests/waiting.py. sleep(0) only yields."""
    wrong = [
        str(place)
        for module in modules(TESTS)
        if "sleep(" in module.text and module.name != "waiting" and not module.name.startswith(_DAG_FILES)
        for place in places(module)
        if isinstance(place.node, ast.Call) and is_sleep(place.node)
    ]
    assert not wrong


def is_sleep(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    first = call.args[0] if call.args else None
    is_yield = isinstance(first, ast.Constant) and first.value == 0
    return name == "sleep" and not is_yield


# These use their own servers, which have no other clients.
_OWN_SERVERS = ("chaos/", "api/fuzz", "system/test_failover", "system/test_tls", "system/two_servers", "test_tidy")


def test_tests_read_sessions_and_locks_of_their_own_database_only() -> None:
    """They share a server. Locks of other tests would make a test fail, or pass, by chance."""
    wrong = [
        str(place)
        for module in modules(TESTS)
        if re.search("pg_locks|pg_stat_activity", module.text) and not module.name.startswith(_OWN_SERVERS)
        for place in places(module)
        if isinstance(place.node, ast.Constant) and reads_whole_server(str(place.node.value))
    ]
    assert not wrong, "filter by `datname = current_database()`, or use OWN_LOCKS of tests/engine/world.py"


def reads_whole_server(text: str) -> bool:
    is_of_the_server = re.search(r"\b(from|join) (pg_locks|pg_stat_activity)\b", text)
    return bool(is_of_the_server) and not re.search(r"\b(datname|database|pid) = ", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("select count(*) from pg_locks where not granted", True),
        ("select 1 from pg_stat_activity where wait_event_type = 'Lock'", True),
        ("select 1 from pg_stat_activity where datname = current_database()", False),
        ("select 1 from pg_stat_activity where pid = %s", False),
    ],
)
def test_a_read_of_the_whole_server_is_found(text: str, expected: bool) -> None:
    assert reads_whole_server(text) is expected


# Secrets that were committed: private keys, and tokens of Evertick, AWS, GitHub, GitLab and Slack.
COMMITTED = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=\s]{64}|\bev[trsal]_[\w-]{40,}|\bAKIA(?!IOSFODNN7EXAMPLE)[0-9A-Z]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{36}|\bglpat-[\w-]{20}|\bxox[abprs]-[\w-]{20}"
)


def test_no_file_contains_a_secret() -> None:
    places = ("src", "docs", "tests", "tools", "bench", "deploy", "examples", ".github", "clients")
    kinds = {
        ".py",
        ".md",
        ".toml",
        ".yaml",
        ".yml",
        ".sql",
        ".html",
        ".js",
        ".ts",
        ".json",
        ".sh",
        ".txt",
        ".cfg",
        ".env",
        "",
    }
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0][:20]}"
        for place in places
        for path in (ROOT / place).rglob("*")
        if path.suffix in kinds and path.is_file() and "__pycache__" not in path.parts
        for found in COMMITTED.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert not wrong, "remove it, and revoke it where it is from"


def test_a_committed_secret_is_found() -> None:
    for text in ("AKIA" + "A" * 16, "evt_" + "x" * 43, "ghp_" + "a" * 36, "-----BEGIN PRIVATE KEY-----\n" + "A" * 80):
        assert COMMITTED.search(text)
