"""The SQL of the store, as text and as the database holds it: statements prepared and used, facts never updated, locks
taken in order. That the hot ones use their index is in tests/db/test_plans.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import LiteralString

import pytest
from psycopg import AsyncConnection

from evertick.db.function_sets import own_set
from evertick.db.migrate import migrations
from evertick.db.statements import function_statement, nouns, sql, statements
from evertick.domain.proofs import Check
from tests.source_tree import SOURCE, modules, places

ALL = [(noun, name) for noun in nouns() for name in statements(noun)]


def decorators(function: ast.AsyncFunctionDef) -> set[str]:
    """`query` for `@query` and for `@query(…)`."""
    calls = (each.func if isinstance(each, ast.Call) else each for each in function.decorator_list)
    return {each.id for each in calls if isinstance(each, ast.Name)}


@cache
def declared() -> dict[str, LiteralString]:
    """The stored functions that the program declares, and how it calls them."""
    found: dict[str, LiteralString] = {}
    for module in modules(SOURCE):
        for node in module.tree.body if re.search("sql_function|leader_verb", module.text) else ():
            if isinstance(node, ast.AsyncFunctionDef) and decorators(node) & {"sql_function", "leader_verb"}:
                known = getattr(import_module(f"evertick.{module.name.replace('/', '.')}"), node.name)
                found[node.name.removeprefix("_")] = function_statement(known.__wrapped__).text
    return found


@pytest.mark.parametrize("noun", nouns())
async def test_every_statement_can_be_prepared(rollback_conn: AsyncConnection, noun: str) -> None:
    for name, text in statements(noun).items():
        await rollback_conn.execute(f"prepare {noun}_{name} as {numbered(text)}")


async def test_every_declared_function_can_be_called(rollback_conn: AsyncConnection) -> None:
    for name, text in declared().items():
        await rollback_conn.execute(f"prepare {name} as {numbered(text)}")


# why it writes without a stored function: the statements
WRITING = {
    "what it writes decides nothing about a task or a run": {
        *("logs.append", "dags.put_bundle", "dags.put_import_error", "dags.drop_import_errors", "gates.describe_pool"),
        "runner_tokens.append_logs",
        *("accounts.note_use", "accounts.forgive", "notifications.record"),
    },
    "one statement is the whole change, with its entry in the audit log": {
        *(
            "runner_tokens.add",
            "accounts.add_account",
            "accounts.add_credential",
            "accounts.take_link",
            "accounts.revoke",
            "accounts.use_once",
            "runners.ask_of",
        )
    },
    "a service writes its own row": {
        *(
            "runners.register",
            "runners.leave",
            "runners.note_agent_api",
            "runners.note_tries",
            "runners.note_submitted",
            "runners.note_troubles",
        ),
        "shards.announce_leave",
    },
    "it works before a set of functions is installed": {
        *(
            "migrate.record",
            "function_sets.record",
            "function_sets.forget",
            "failover.mark_server",
            "failover.report_loss",
        )
    },
}


def test_any_other_write_is_a_stored_function_that_the_engine_declares() -> None:
    writes = re.compile(r"\binsert into\b|\bdelete from\b|(?<!key )(?<!for )(?<!do )\bupdate \w")
    found = {f"{noun}.{name}" for noun, name in ALL if writes.search(sql(noun, name))}
    assert found == {name for names in WRITING.values() for name in names}


def numbered(text: str) -> str:
    """The statement with $1 where it says %(name)s, as psycopg sends it."""
    order: dict[str, int] = {}

    def place(match: re.Match[str]) -> str:
        return f"${order.setdefault(match[1], len(order) + 1)}"

    return re.sub(r"%\((\w+)\)s", place, text).replace("%%", "%")


def references() -> Iterator[tuple[str, str]]:
    """Every sql("noun", "name") in the program, whose name may be one of two, or any check of a guarantee; and every declaration
    of a statement."""
    for module in modules(SOURCE):
        for place in places(module) if re.search(r"\bquery\b|\bsql\(", module.text) else ():
            node = place.node
            if isinstance(node, ast.AsyncFunctionDef) and "query" in decorators(node):
                yield module.name.rpartition("/")[2], node.name
            if (
                not isinstance(node, ast.Call)
                or getattr(node.func, "id", "") != "sql"
                or module.name == "db/statements"
            ):
                continue
            noun, name = node.args
            if isinstance(name, ast.Name) and name.id == "check":
                yield from (("proofs", each) for each in Check)
                continue
            for choice in [name.body, name.orelse] if isinstance(name, ast.IfExp) else [name]:
                assert isinstance(noun, ast.Constant) and isinstance(choice, ast.Constant), (
                    f"{place}: write the names out"
                )
                yield str(noun.value), str(choice.value)


def test_every_statement_is_used_and_every_use_has_its_statement() -> None:
    assert sorted(set(references())) == sorted(ALL)


def test_every_list_has_a_limit() -> None:
    endless = [
        f"{noun}.{name}"
        for noun, name in ALL
        if re.search(r"\border by\b", sql(noun, name)) and not re.search(r"\blimit\b", sql(noun, name))
    ]
    assert endless == ["tasks.downstream"], "that one is bounded by the DAG's size; another needs a limit"


# Functions --------------------------------------------------------------------------------------------------

FUNCTIONS_QUERY = """select p.proname, p.prosrc from pg_proc p join pg_namespace n on n.oid = p.pronamespace
                      where n.nspname in ('evertick', %s)"""


@pytest.fixture
async def functions(rollback_conn: AsyncConnection) -> dict[str, str]:
    """The body of every stored function, in small letters and without comments."""
    rows = await (await rollback_conn.execute(FUNCTIONS_QUERY, [own_set().schema])).fetchall()
    return {name: re.sub(r"--[^\n]*", "", source).lower() for name, source in rows}


async def test_every_function_is_called(rollback_conn: AsyncConnection, functions: dict[str, str]) -> None:
    views = "select string_agg(definition, ';') from pg_views where schemaname = %s"
    (seen,) = await (await rollback_conn.execute(views, [own_set().schema])).fetchone() or ("",)
    outside = " ".join([str(seen), *declared().values(), *(sql(noun, name) for noun, name in ALL)])
    for name in functions:
        inside = " ".join(body for other, body in functions.items() if other != name)
        assert re.search(rf"\b{name}\(", f"{outside} {inside}"), f"nothing calls {name}"


async def test_there_are_no_triggers(rollback_conn: AsyncConnection) -> None:
    query = "select tgname from pg_trigger where not tgisinternal"
    assert await (await rollback_conn.execute(query)).fetchall() == []


# Between tables that change rarely, whose parents are never deleted in bulk: here a key costs nothing and catches a mistake.
FOREIGN_KEYS = {
    ("dag_version", "dag"),
    ("schedule", "dag"),
    ("schedule_state", "schedule"),
    ("schedule_version", "schedule"),
    ("backfill", "dag"),
    ("credential", "account"),
    ("oidc_identity", "account"),
}
# Every run and task writes to these, or retention deletes from them in small batches. A key would probe and lock the parent at
# each insert (one row of `dag` at thousands of runs per second), add to the lock order, and turn a bounded deletion into a cascade.
WITHOUT_FOREIGN_KEYS = {
    *(
        "run",
        "run_status",
        "run_group",
        "task",
        "ready_task",
        "lease",
        "task_timer",
        "attempt",
        "result",
        "log_chunk",
        "outbox",
    ),
    *(
        "gate",
        "gate_holder",
        "gate_order",
        "rate_slot",
        "gate_queue",
        "gate_waiter",
        "retry_queue",
        "retry_slot",
        "dispatch",
    ),
    *(
        "task_spec",
        "edge",
        "task_input",
        "task_gate",
        "task_mapping",
        "mapping_input",
        "trigger_dag_task",
        "wait_spec",
        "notification_rule",
    ),
    *(
        "retry_group",
        "map_item",
        "child_run",
        "deferral",
        "approval",
        "sensor_poll",
        "deadline",
        "task_deadline",
        "note",
    ),
}


async def test_foreign_keys_are_between_cold_tables_only(rollback_conn: AsyncConnection) -> None:
    query = """select conrelid::regclass::text, confrelid::regclass::text, confdeltype::text from pg_constraint
                where contype = 'f' and connamespace = 'evertick'::regnamespace"""
    found = await (await rollback_conn.execute(query)).fetchall()
    assert {(child, parent) for child, parent, _ in found} == FOREIGN_KEYS
    assert {action for _, _, action in found} == {"r"}, "on delete restrict: nothing disappears by itself"
    tables = "select tablename from pg_tables where schemaname = 'evertick'"
    known = {name for (name,) in await (await rollback_conn.execute(tables)).fetchall()}
    assert known >= WITHOUT_FOREIGN_KEYS
    assert not WITHOUT_FOREIGN_KEYS & {table for key in FOREIGN_KEYS for table in key}


@pytest.mark.parametrize(
    "table", ["task", "ready_task", "lease", "task_timer", "run", "run_status", "schedule_state", "runner"]
)
async def test_a_hot_table_has_at_most_three_indexes(rollback_conn: AsyncConnection, table: str) -> None:
    query = "select count(*) from pg_indexes where schemaname = 'evertick' and tablename = %s"
    (count,) = await (await rollback_conn.execute(query, [table])).fetchone() or (0,)
    # The fact of a run is written once, and each of its unique keys is an index; one of them is of hardly any run; clients order by
    # its text and by when it was due, which is one of two. Its state is in the fourth from its end on (docs/decisions/0032).
    assert count <= {"run": 8, "run_status": 4}.get(table, 3)


# Facts ------------------------------------------------------------------------------------------------------


def changes_a_run_fact(text: str) -> bool:
    """Whether an SQL text updates, replaces or deletes rows of `run`."""
    plain = re.sub(r"--[^\n]*", "", text).lower()
    if re.search(
        r"\b(update|delete\s+from|truncate(\s+table)?|merge\s+into)\s+(only\s+)?(evertick\.)?run\b(?!_)", plain
    ):
        return True
    return any(
        re.search(r"\bdo\s+update\b", statement)
        for statement in re.split(r";", plain)
        if re.search(r"\binsert\s+into\s+(evertick\.)?run\b", statement)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("update run r set params = null", True),
        ("with x as (update evertick.run set key = '1') select 1", True),
        ("insert into run values (1) on conflict (run_id) do update set key = ''", True),
        ("delete from run where run_id = 1", True),
        ("update run_status set state = 'failed'", False),
        ("insert into run values (1) on conflict do nothing; update dag set x = 1", False),
        ("-- update run\nselect 1", False),
    ],
)
def test_a_changed_fact_would_be_found(text: str, expected: bool) -> None:
    assert changes_a_run_fact(text) is expected


@pytest.mark.requirement("S1", "S2")
async def test_nothing_updates_the_fact_of_a_run(functions: dict[str, str]) -> None:
    texts = {**functions, **{f"{noun}.{name}": sql(noun, name) for noun, name in ALL}}
    texts |= {migration.label: migration.script for migration in migrations()}
    found = {name for name, text in texts.items() if changes_a_run_fact(text)}
    # Retention, or an operator, deletes the whole fact, and even that changes nothing of it.
    assert found == {"delete_runs"}
    assert not re.search(r"\bupdate\s+run\b(?!_)", functions["delete_runs"])


# Claims -----------------------------------------------------------------------------------------------------


def what_a_claim_does(text: str) -> list[str]:
    """The guards and writes of a claim: who may, which task moves and how, and its lease. Which rows it picks is left out."""
    plain = " ".join(text.split())
    parts = (
        r"perform 1 from runner where .*? end if;",
        r"update task k set .*? from picked p where .*? returning",
        r"insert into lease .*? from moved m",
        r"\(select jsonb_object_agg.*?i\.idx = m\.idx\)",
    )
    return [match[0] if (match := re.search(part, plain)) else f"lacks {part}" for part in parts]


@pytest.mark.requirement("V2")
async def test_whichever_way_rows_are_picked_a_claim_is_guarded_alike(functions: dict[str, str]) -> None:
    """Twice on purpose: a function that both call would cost the hot one a second plan and a materialised set."""
    by_line, by_place = what_a_claim_does(functions["claim_tasks"]), what_a_claim_does(functions["claim_selected"])
    assert by_line == by_place
    assert not any(part.startswith("lacks") for part in by_line)
    weaker = functions["claim_selected"].replace("and k.state = 'available'", "")
    assert what_a_claim_does(weaker) != by_line, "a guard that one of them lacks is seen"


# Locks ------------------------------------------------------------------------------------------------------

# claim, claim_rows and queue_rows take no run lock: they skip locked rows of the line and wait for nothing but the task that they
# were handed.
# let_in moves only tasks whose row of gate_wait it has taken, or whose run is locked: nobody else can want them.
WITHOUT_RUN_LOCK = {"claim_tasks", "claim_selected", "queue_selected", "admit_tasks"}
PRUNING = {"prune_runs", "prune_audit_log", "prune_versions", "prune_kind", "delete_pending_cleanup"}
GATES = {"admit_gated_tasks", "release_admissions", "reconcile_gates"}
LOGS = {
    "queue_log_archiving",
    "create_archive_object",
    "archive_logs",
    "finish_log_archiving",
    "orphaned_archive_objects",
    "delete_archive_objects",
}
PLANNING = {
    "fire_schedules",
    "promote_due_tasks",
    "advance_backfill",
    "fail_backfill",
    "reconcile_runs",
    *PRUNING,
    *GATES,
    *LOGS,
}

LOCKS_RUN = re.compile(
    r"\b(from|join)\s+run_status\b.*\bfor\s+no\s+key\s+update\b|\b(update|insert\s+into)\s+run_status\b", re.S
)
WRITES_TASK = re.compile(r"\b(update|insert\s+into|delete\s+from)\s+task\b")
CALLS = re.compile(r"\b(\w+)\s*\(")
CHECKS_FENCE = re.compile(r"\bpg_advisory_xact_lock(_shared)?\s*\(")


def events(name: str, functions: dict[str, str], seen: set[str] | None = None) -> Iterator[str]:
    """What a function does in the order of its text, and what the functions that it calls do: fence, lock, write. Each of them
    tells once, where it is called first: nothing that it does again could come before that."""
    seen = set() if seen is None else seen
    seen.add(name)
    for statement in functions[name].split(";"):
        if CHECKS_FENCE.search(statement):
            yield "fence"
        if LOCKS_RUN.search(statement):
            yield "lock"
        for other in dict.fromkeys(CALLS.findall(statement)):
            if other in functions and other not in seen and other not in WITHOUT_RUN_LOCK:
                yield from events(other, functions, seen)
        if WRITES_TASK.search(statement):
            yield "write"


def entrances(functions: dict[str, str]) -> set[str]:
    texts = [*declared().values(), *(sql(noun, name) for noun, name in ALL)]
    return {name for name in functions if any(re.search(rf"\b{name}\(", text) for text in texts)}


async def test_whatever_moves_a_task_has_locked_its_run_before(functions: dict[str, str]) -> None:
    for name in entrances(functions) - WITHOUT_RUN_LOCK:
        first = next((event for event in events(name, functions) if event in ("lock", "write")), None)
        assert first != "write", name


async def test_planning_passes_the_fence_before_anything_else(functions: dict[str, str]) -> None:
    assert entrances(functions) >= PLANNING
    assert [name for name in PLANNING if next(events(name, functions)) != "fence"] == []


def test_a_write_before_the_lock_would_be_found() -> None:
    functions = {
        "verb": "perform inner(x); perform 1 from run_status r where true order by 1 for no key update",
        "inner": "update task k set state = 'failed'",
    }
    assert list(events("verb", functions)) == ["write", "lock"]


# Effects ----------------------------------------------------------------------------------------------------

TAKES_EFFECTS_QUERY = """select p.proname from pg_proc p join pg_namespace n on n.oid = p.pronamespace
                          where n.nspname = %s and 'effects'::regtype = any(p.proargtypes::oid[])"""
APPLIES = re.compile(r"\b(apply_effects|process_gates)\(")
SESSION_SETTING = re.compile(r"\b(?:set_config|current_setting)\('evertick\.(\w+)'")


@pytest.fixture
async def takes_effects(rollback_conn: AsyncConnection) -> set[str]:
    """The functions that take the effects of their transaction, and return them."""
    rows = await (await rollback_conn.execute(TAKES_EFFECTS_QUERY, [own_set().schema])).fetchall()
    return {name for (name,) in rows}


def calls(names: set[str]) -> re.Pattern[str]:
    return re.compile(rf"\b({'|'.join(sorted(names))})\(")


def arguments(text: str, opening: int) -> str:
    """The text inside the bracket at `opening`."""
    depth = 0
    for place, sign in enumerate(text[opening:], opening):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if depth == 0:
            return text[opening + 1 : place]
    raise AssertionError(f"an unclosed bracket: {text[opening : opening + 80]}")


def lost_effects(body: str, names: set[str]) -> Iterator[str]:
    """Calls that do not pass the effects on, or drop what they return."""
    for statement in body.split(";"):
        for call in calls(names).finditer(statement):
            if not re.search(r"\bfx$", arguments(statement, call.end() - 1).rstrip()):
                yield f"{call[1]} does not get the effects"
            if not re.search(r"(\w+ :=|\breturn) \(?$", statement[: call.start()]):
                yield f"what {call[1]} returns is dropped"


def unapplied_ends(body: str, names: set[str]) -> Iterator[str]:
    """Ends of a function that starts with empty effects, and does not apply them once before."""
    has_begun = False
    for part in re.split(r"\breturn\b(?! (?:query|next)\b)", body):
        has_call = calls(names).search(part) is not None
        has_begun = has_begun or has_call
        is_handler = "exception when" in part and not has_call
        is_over = re.search(r"\b(?:perform|select|insert|update|delete)\b|:=", part) is None
        if has_begun and not is_handler and not is_over and len(APPLIES.findall(part)) != 1:
            yield part


def guarded_blocks(body: str) -> Iterator[tuple[str, str]]:
    """Each block with an exception clause, and that clause."""
    body = re.sub(r"'[^']*'", "''", body)
    openings: list[int] = []
    handlers: dict[int, int] = {}
    for word in re.finditer(r"\bend (?:if|loop)\b|\b(?:begin|case|end case|end|exception when)\b", body):
        if word[0] in ("begin", "case"):
            openings.append(word.end())
        elif word[0] == "exception when":
            handlers[openings[-1]] = word.start()
        elif word[0] in ("end", "end case"):
            opening = openings.pop()
            if opening in handlers:
                yield body[opening : handlers[opening]], body[handlers[opening] : word.start()]


def keeps_undone_effects(block: str, handler: str, names: set[str]) -> bool:
    """Whether effects could outlive their subtransaction: a variable is not rolled back with it."""
    changed = re.search(r"\bfx := [^;]*;", block)
    if changed is None or re.search(r"\breturn\b", handler):
        return False
    rest = [statement.strip() for statement in block[changed.end() :].split(";")]
    return any(not re.match(r"\w+ :=", each) or calls(names).search(each) for each in rest if each)


async def test_effects_are_passed_on_and_applied_once(functions: dict[str, str], takes_effects: set[str]) -> None:
    found = {}
    for name, body in functions.items():
        starts = re.search(r"\bfx effects;", body) is not None
        assert starts or name in takes_effects or not calls(takes_effects).search(body), f"{name} has no effects"
        ends = unapplied_ends(body, takes_effects) if starts else ()
        found[name] = [*lost_effects(body, takes_effects), *ends]
    assert {name: each for name, each in found.items() if each} == {}


async def test_no_effects_outlive_their_subtransaction(functions: dict[str, str], takes_effects: set[str]) -> None:
    blocks = [(name, *each) for name, body in functions.items() for each in guarded_blocks(body)]
    assert len([each for each in blocks if calls(takes_effects).search(each[1])]) >= 10
    assert [name for name, block, handler in blocks if keeps_undone_effects(block, handler, takes_effects)] == []


def test_wrong_uses_of_effects_would_be_found() -> None:
    names = {"move", "apply_effects"}
    assert list(lost_effects("fx := move(a, fx); fx := (move(b, done.fx)).fx; return move(c, fx)", names)) == []
    assert list(lost_effects("perform move(a, fx); fx := move(null)", names)) == [
        "what move returns is dropped",
        "move does not get the effects",
    ]
    good = "begin if x then return 0; end if; fx := move(a, fx); fx := apply_effects(fx); return 1; end"
    assert list(unapplied_ends(good, names)) == []
    assert len(list(unapplied_ends(good.replace("fx := apply_effects(fx);", ""), names))) == 1
    assert (
        len(list(unapplied_ends(good.replace("return 1", "if y then return 1; end if; perform z(); return 2"), names)))
        == 1
    )
    block = "begin begin fx := move(a, fx); n := 1; exception when others then raise; end; end"
    ((inside, handler),) = guarded_blocks(block)
    assert not keeps_undone_effects(inside, handler, names)
    assert keeps_undone_effects(inside + "delete from t;", handler, names)
    assert not keeps_undone_effects(inside + "delete from t;", handler + "return 0;", names)


def test_no_session_setting_passes_a_value() -> None:
    texts = [path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.sql")]
    assert {name for text in texts for name in SESSION_SETTING.findall(text)} == {"now"}, "the clock of tests"
