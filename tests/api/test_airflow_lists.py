"""Every filter and every order of every list that Airflow's client can ask for, each with two outcomes that differ."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from airflow_client.client import DagRunState

from evertick.config import Settings
from evertick.db.queries import dags
from evertick.domain.access import Actor
from evertick.domain.stored_values import ValueKind
from evertick.engine import secrets
from evertick.engine.gates import set_pool
from evertick.secrets.keyring import load_keyring
from tests.api.airflow_world import FEBRUARY, JANUARY, World, operations, people, served
from tests.databases import Cluster
from tests.engine.world import T0

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOUR = timedelta(hours=1)
EARLY, LATE = T0 - 10_000 * 24 * HOUR, T0 + 1000 * HOUR


class Listed(NamedTuple):
    """How a list is asked for, where its items are, and what each of them is told apart by."""

    arguments: tuple[Any, ...]
    field: str
    key: Callable[[Any], str]


LISTS = {
    "get_dags": Listed((), "dags", lambda each: each.dag_id),
    "get_dag_tags": Listed((), "tags", str),
    "get_dag_runs": Listed(("~",), "dag_runs", lambda each: each.dag_run_id),
    "get_task_instances": Listed(
        ("~", "~"), "task_instances", lambda each: f"{each.dag_run_id}.{each.task_id}[{each.map_index}]"
    ),
    "get_mapped_task_instances": Listed(("other", "o1", "t"), "task_instances", lambda each: str(each.map_index)),
    "get_xcom_entries": Listed(
        ("~", "~", "~"), "xcom_entries", lambda each: f"{each.run_id}.{each.task_id}.{each.key}"
    ),
    "get_dag_versions": Listed(("~",), "dag_versions", lambda each: f"{each.dag_id} {each.version_number}"),
    "get_import_errors": Listed((), "import_errors", lambda each: each.filename),
    "get_pools": Listed((), "pools", lambda each: each.name),
    "get_variables": Listed((), "variables", lambda each: each.key),
    "get_connections": Listed((), "connections", lambda each: each.connection_id),
    "get_assets": Listed((), "assets", lambda each: each.name),
    "get_asset_events": Listed((), "asset_events", lambda each: f"{each.name} {each.source_run_id}"),
    "get_event_logs": Listed((), "event_logs", lambda each: f"{each.event} {each.owner}"),
}

E1, L1, E2, L2 = "r1.extract[-1]", "r1.side.load[-1]", "r2.extract[-1]", "r2.side.load[-1]"
ETL, O0, O1 = [E1, L1, E2, L2], "o1.t[0]", "o1.t[1]"
X1, X2 = "r1.extract.return_value", "r2.extract.return_value"


def sides(
    name: str, at: Any, *, below: list[str], same: list[str], above: list[str]
) -> list[tuple[str, Any, list[str]]]:
    """The four ends of a range around one value."""
    everything = below + same + above
    early, late = (-1e9, 1e9) if isinstance(at, float) else (EARLY, LATE)
    return [
        (f"{name}_gte", at, same + above),
        (f"{name}_gt", at, above),
        (f"{name}_lte", at, below + same),
        (f"{name}_lt", at, below),
        *(
            (f"{name}_{side}", far, [])
            for far, pair in ((late, ("gte", "gt")), (early, ("lte", "lt")))
            for side in pair
        ),
        *((f"{name}_{side}", late, everything) for side in ("lte", "lt")),
    ]


def words(
    name: str, fitting: str, found: list[str], prefix: str, found_by_prefix: list[str]
) -> list[tuple[str, Any, list[str]]]:
    """A pattern and a prefix, and that neither takes what does not fit."""
    return [
        (f"{name}_pattern", fitting, found),
        (f"{name}_pattern", "zzz", []),
        (f"{name}_prefix_pattern", prefix, found_by_prefix),
        (f"{name}_prefix_pattern", prefix.upper(), []),
    ]


FILTERS: dict[str, list[tuple[str, Any, list[str]]]] = {
    "get_dags": [
        ("tags", ["finance"], ["etl"]),
        ("tags", ["daily", "finance"], ["etl", "other"]),
        ("owners", ["evertick"], ["etl", "taker"]),
        ("owners", ["ann", "bob"], ["other"]),
        *words("dag_id", "E_L", ["etl"], "o", ["other"]),
        ("dag_id_pattern", "TH|etl", ["etl", "other"]),
        *words("dag_display_name", "AK", ["taker"], "e", ["etl"]),
        ("paused", True, []),
        ("paused", False, ["etl", "other", "taker"]),
        ("has_import_errors", True, ["other"]),
        ("has_import_errors", False, ["etl", "taker"]),
        ("last_dag_run_state", DagRunState.SUCCESS, ["etl"]),
        ("last_dag_run_state", DagRunState.RUNNING, ["other"]),
        ("bundle_name", "dags-folder", ["etl", "other", "taker"]),
        ("bundle_name", "git", []),
        ("has_asset_schedule", True, ["taker"]),
        ("has_asset_schedule", False, ["etl", "other"]),
        ("asset_dependency", "rder", ["taker"]),
        ("asset_dependency", "none", []),
        *sides("dag_run_start_date", T0 + 2 * HOUR, below=[], same=["etl"], above=["other"]),
        *sides("dag_run_end_date", T0 + 4 * HOUR, below=[], same=["etl"], above=[]),
        ("dag_run_state", ["running", "success"], ["etl", "other"]),
        ("dag_run_state", ["failed"], []),
        ("is_favorite", True, []),
        ("is_favorite", False, ["etl", "other", "taker"]),
    ],
    "get_dag_tags": [*words("tag_name", "IN", ["finance"], "d", ["daily"])],
    "get_dag_runs": [
        *sides("run_after", T0 + 2 * HOUR, below=["r1"], same=["r2"], above=["o1"]),
        *sides("logical_date", FEBRUARY, below=["r1"], same=["r2"], above=[]),
        *sides("start_date", T0 + 2 * HOUR, below=["r1"], same=["r2"], above=["o1"]),
        *sides("end_date", T0 + 4 * HOUR, below=["r1"], same=["r2"], above=[]),
        *sides("updated_at", T0 + 4 * HOUR, below=["r1"], same=["r2"], above=["o1"]),
        *sides("duration", 1800.0, below=[], same=["r1"], above=["r2"]),
        ("conf_contains", "5", ["r1"]),
        ("conf_contains", "rows", ["r1", "r2"]),
        ("conf_contains", "r%s", []),
        ("run_type", ["manual"], ["r1", "r2", "o1"]),
        ("run_type", ["scheduled", "backfill"], []),
        ("state", ["failed"], ["r1"]),
        ("state", ["success", "running"], ["r2", "o1"]),
        ("dag_version", [1], ["r1", "r2", "o1"]),
        ("dag_version", [2], []),
        *words("run_id", "R", ["r1", "r2"], "o", ["o1"]),
        *words("triggering_user_name", "OO", ["r1"], "an", ["r2"]),
        *words("dag_id", "TL", ["r1", "r2"], "oth", ["o1"]),
    ],
    "get_task_instances": [
        ("task_id", "extract", [E1, E2]),
        ("task_id", "none", []),
        *sides("run_after", T0 + 2 * HOUR, below=[E1, L1], same=[E2, L2], above=[O0, O1]),
        *sides("logical_date", FEBRUARY, below=[E1, L1], same=[E2, L2], above=[]),
        *sides("start_date", T0 + 1.5 * HOUR, below=[E1], same=[L1], above=[E2, L2, O0]),
        *sides("end_date", T0 + 1.5 * HOUR, below=[E1], same=[L1], above=[E2, L2]),
        *sides("updated_at", T0 + 4 * HOUR, below=[E1, L1, E2], same=[L2], above=[O0, O1]),
        ("duration_gte", 0.0, ETL),
        ("duration_gte", 5.0, []),
        ("duration_gt", -1.0, ETL),
        ("duration_gt", 0.0, []),
        ("duration_lte", 0.0, ETL),
        ("duration_lte", -1.0, []),
        ("duration_lt", 1.0, ETL),
        ("duration_lt", 0.0, []),
        *words("task_display_name", "LOA", [L1, L2], "ex", [E1, E2]),
        ("task_group_id", "side", [L1, L2]),
        ("task_group_id", "sid", []),
        *words("dag_id", "TH", [O0, O1], "et", ETL),
        *words("run_id", "2", [E2, L2], "o", [O0, O1]),
        ("state", ["failed"], [L1]),
        ("state", ["queued", "running"], [O0, O1]),
        ("state", ["none"], []),
        ("pool", ["db"], [L1, L2]),
        ("pool", ["default_pool"], [E1, E2, O0, O1]),
        *words("pool_name", "DB", [L1, L2], "def", [E1, E2, O0, O1]),
        ("queue", ["gpu"], [L1, L2]),
        ("queue", ["default"], [E1, E2, O0, O1]),
        *words("queue_name", "GP", [L1, L2], "def", [E1, E2, O0, O1]),
        ("version_number", [1], [*ETL, O0, O1]),
        ("version_number", [2], []),
        ("try_number", [1], [*ETL, O0]),
        ("try_number", [0], [O1]),
        ("operator", ["BashOperator"], [E1, E2]),
        ("operator", ["PythonOperator"], [L1, L2, O0, O1]),
        *words("operator_name", "bash", [E1, E2], "Py", [L1, L2, O0, O1]),
        ("map_index", [-1], ETL),
        ("map_index", [0, 1], [O0, O1]),
    ],
    "get_mapped_task_instances": [
        *sides("run_after", T0 + 5 * HOUR, below=[], same=["0", "1"], above=[]),
        *sides("start_date", T0 + 5 * HOUR, below=[], same=["0"], above=[]),
        *sides("updated_at", T0 + 5 * HOUR, below=[], same=["0", "1"], above=[]),
        ("state", ["running"], ["0"]),
        ("state", ["queued"], ["1"]),
        ("pool", ["default_pool"], ["0", "1"]),
        ("pool", ["db"], []),
        *words("pool_name", "FAULT", ["0", "1"], "def", ["0", "1"]),
        ("queue", ["default"], ["0", "1"]),
        ("queue", ["gpu"], []),
        *words("queue_name", "FAULT", ["0", "1"], "def", ["0", "1"]),
        ("version_number", [1], ["0", "1"]),
        ("version_number", [2], []),
        ("try_number", [1], ["0"]),
        ("try_number", [0], ["1"]),
        ("operator", ["PythonOperator"], ["0", "1"]),
        ("operator", ["BashOperator"], []),
        *words("operator_name", "PYTH", ["0", "1"], "Py", ["0", "1"]),
        ("map_index", [1], ["1"]),
        ("map_index", [-1], []),
    ],
    "get_xcom_entries": [
        ("xcom_key", "return_value", [X1, X2]),
        ("xcom_key", "other", []),
        ("map_index", -1, [X1, X2]),
        ("map_index", 3, []),
        ("map_index_filter", -1, [X1, X2]),
        ("map_index_filter", 0, []),
        *words("xcom_key", "TURN", [X1, X2], "ret", [X1, X2]),
        *words("dag_display_name", "TL", [X1, X2], "et", [X1, X2]),
        *words("run_id", "1", [X1], "r2", [X2]),
        *words("task_id", "XTRA", [X1, X2], "ext", [X1, X2]),
        *sides("logical_date", FEBRUARY, below=[X1], same=[X2], above=[]),
        *sides("run_after", T0 + 2 * HOUR, below=[X1], same=[X2], above=[]),
    ],
    "get_dag_versions": [
        ("version_number", 1, ["etl 1", "other 1", "taker 1"]),
        ("version_number", 2, []),
        ("bundle_name", "dags-folder", ["etl 1", "other 1", "taker 1"]),
        ("bundle_name", "git", []),
    ],
    "get_import_errors": [
        *words("filename", "OTH", ["other.py"], "zz", ["zz.py"]),
        ("filename", "zz.py", ["zz.py"]),
        ("filename", "yy.py", []),
        ("bundle_name", "dags-folder", ["other.py", "zz.py"]),
        ("bundle_name", "git", []),
    ],
    "get_pools": [*words("pool_name", "AP", ["api"], "db", ["db"])],
    "get_variables": [*words("variable_key", "EGI", ["region"], "s", ["size"])],
    "get_connections": [*words("connection_id", "ARE", ["warehouse"], "ma", ["mail"])],
    "get_assets": [
        *words("name", "RDE", ["orders"], "ra", ["rates"]),
        *words("uri", "RDE", ["orders"], "ra", ["rates"]),
        ("dag_ids", ["etl"], ["orders"]),
        ("dag_ids", ["taker"], ["orders", "rates"]),
    ],
    "get_asset_events": [
        ("asset_id", zlib.crc32(b"orders"), ["orders r1", "orders r2"]),
        ("asset_id", zlib.crc32(b"rates"), []),
        ("source_dag_id", "etl", ["orders r1", "orders r2"]),
        ("source_dag_id", "other", []),
        ("source_task_id", "extract", ["orders r1", "orders r2"]),
        ("source_task_id", "none", []),
        ("source_run_id", "r1", ["orders r1"]),
        ("source_run_id", "r2", ["orders r2"]),
        ("source_map_index", -1, ["orders r1", "orders r2"]),
        ("source_map_index", 0, []),
        *words("name", "RDE", ["orders r1", "orders r2"], "ord", ["orders r1", "orders r2"]),
        *sides("timestamp", T0 + 2 * HOUR, below=["orders r1"], same=["orders r2"], above=[]),
    ],
    "get_event_logs": [
        ("dag_id", "etl", ["publish test"]),
        ("dag_id", "none", []),
        ("owner", "watcher", ["post_pool watcher"]),
        ("owner", "none", []),
        ("event", "publish", ["publish test"] * 3),
        ("event", "none", []),
        ("included_events", ["publish"], ["publish test"] * 3),
        ("included_events", ["none"], []),
        ("before", EARLY, []),
        ("after", LATE, []),
        *words("owner", "ATCH", ["post_pool watcher"], "watch", ["post_pool watcher"]),
        *words("event", "BLIS", ["publish test"] * 3, "publ", ["publish test"] * 3),
        *words("dag_id", "AKE", ["publish test"], "tak", ["publish test"]),
    ],
}
# The client's name of a filter: why it has no two outcomes here.
ELSEWHERE = {
    "limit": "test_pages_follow_each_other",
    "offset": "test_pages_follow_each_other",
    "cursor": "test_pages_follow_each_other",
    "order_by": "test_every_order_has_two_directions",
    "tags_match_mode": "test_tags_match_all_or_any",
}
# (operation, filter): what it asks for does not exist here; that it leaves nothing is tested.
LEAVES_NOTHING: dict[tuple[str, str], Any] = {
    ("get_dags", "bundle_version"): "1",
    ("get_dags", "timetable_type"): ["Cron"],
    ("get_dag_runs", "partition_date_gte"): T0,
    ("get_dag_runs", "partition_date_lte"): T0,
    ("get_dag_runs", "bundle_version"): "1",
    ("get_dag_runs", "partition_key_pattern"): "a",
    ("get_dag_runs", "partition_key_prefix_pattern"): "a",
    ("get_dag_runs", "consuming_asset_pattern"): "a",
    ("get_task_instances", "executor"): ["Local"],
    ("get_task_instances", "rendered_map_index_pattern"): "1",
    ("get_task_instances", "rendered_map_index_prefix_pattern"): "1",
    ("get_mapped_task_instances", "executor"): ["Local"],
    ("get_mapped_task_instances", "rendered_map_index_pattern"): "1",
    ("get_mapped_task_instances", "rendered_map_index_prefix_pattern"): "1",
    ("get_dag_versions", "bundle_version"): "1",
    ("get_event_logs", "try_number"): 1,
    ("get_event_logs", "task_id"): "extract",
    ("get_event_logs", "run_id"): "none",
    ("get_event_logs", "map_index"): 5,
    ("get_event_logs", "task_id_pattern"): "extract",
    ("get_event_logs", "run_id_pattern"): "none",
    ("get_event_logs", "task_id_prefix_pattern"): "extract",
    ("get_event_logs", "run_id_prefix_pattern"): "none",
    **{
        ("get_mapped_task_instances", f"{name}_{side}"): value
        for name, value in (("logical_date", T0), ("end_date", T0), ("duration", 1.0))
        for side in ("gte", "gt", "lte", "lt")
    },
}
# (operation, filter): it changes nothing, because nothing here is of that kind.
LEAVES_ALL: dict[tuple[str, str], Any] = {
    ("get_dags", "exclude_stale"): False,
    ("get_assets", "only_active"): False,
    ("get_event_logs", "excluded_events"): ["none"],
}
# (operation, attribute): all items have the same there.
EQUAL = {
    ("get_task_instances", "duration"),
    ("get_mapped_task_instances", "duration"),
    ("get_mapped_task_instances", "end_date"),
    ("get_mapped_task_instances", "start_date"),
    ("get_mapped_task_instances", "logical_date"),
    ("get_mapped_task_instances", "run_after"),
    ("get_mapped_task_instances", "data_interval_start"),
    ("get_mapped_task_instances", "data_interval_end"),
    ("get_mapped_task_instances", "operator"),
    ("get_dag_runs", "partition_date"),
    ("get_dag_versions", "version_number"),
    ("get_dag_versions", "bundle_name"),
    ("get_dag_versions", "bundle_version"),
    ("get_import_errors", "bundle_name"),
    ("get_variables", "is_encrypted"),
    ("get_variables", "team_name"),
    ("get_connections", "team_name"),
    ("get_xcom_entries", "key"),
    ("get_xcom_entries", "dag_id"),
    ("get_xcom_entries", "task_id"),
    ("get_xcom_entries", "map_index"),
    ("get_assets", "created_at"),
    ("get_asset_events", "source_task_id"),
    ("get_asset_events", "source_dag_id"),
    ("get_asset_events", "source_map_index"),
    ("get_assets", "updated_at"),
    # One has a value, and the others come after it either way.
    ("get_dags", "next_dagrun"),
    ("get_event_logs", "task_id"),
    ("get_event_logs", "run_id"),
    ("get_event_logs", "logical_date"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(cluster: Cluster, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    name = cluster.create(template)
    key_file = tmp_path_factory.mktemp("keys") / "secret.key"
    async with served(cluster.database_url(name), key_file) as made:
        await people(made)
        await surroundings(made, key_file)
        yield made
    cluster.drop(name)


async def surroundings(world: World, key_file: Path) -> None:
    conn, keyring = world.conn, load_keyring(Settings(secret_key_file=key_file))
    await set_pool(conn, name="api", slots=7, actor=Actor("watcher"))
    await dags.put_import_error(conn, file="zz.py", line=None, message="zz", detail="")
    for kind, name, value, about in (
        (ValueKind.VARIABLE, "region", "north", "where"),
        (ValueKind.VARIABLE, "size", "9", "how much"),
        (ValueKind.CONNECTION, "warehouse", "postgresql://anna:hunter22@db:5432/shop", "the big one"),
        (ValueKind.CONNECTION, "mail", "smtp://post:25/", "letters"),
    ):
        await secrets.put_value(
            conn, keyring, kind=kind, name=name, value=value, description=about, actor=Actor("test")
        )


async def ask(world: World, operation: str, **options: Any) -> list[str]:
    listed = LISTS[operation]
    answer = await world.client(operation, *listed.arguments, **{"limit": 100, **options})
    found = [listed.key(each) for each in getattr(answer, listed.field)]
    assert answer.total_entries == len(found), "a list that fits on a page is all that there is"
    return found


@pytest.mark.parametrize("operation", sorted(LISTS))
async def test_every_filter_has_two_outcomes(world: World, operation: str) -> None:
    outcomes: dict[str, list[list[str]]] = {}
    for name, wanted, expected in FILTERS[operation]:
        found = await ask(world, operation, **{name: wanted})
        assert sorted(found) == sorted(expected), (operation, name, wanted)
        outcomes.setdefault(name, []).append(sorted(expected))
    whole = sorted(await ask(world, operation))
    assert whole, "there is something to list"
    for (each, name), wanted in LEAVES_NOTHING.items():
        if each == operation:
            assert await ask(world, operation, **{name: wanted}) == [], name
            outcomes[name] = [[], whole]
    for (each, name), wanted in LEAVES_ALL.items():
        if each == operation:
            assert sorted(await ask(world, operation, **{name: wanted})) == whole, name
            outcomes[name] = [[], whole]
    (known,) = [each for each in operations() if each.name == operation]
    assert set(known.query) - ELSEWHERE.keys() == outcomes.keys(), "a filter without a row in the table"
    same = [name for name, found in outcomes.items() if all(each == found[0] for each in (*found, whole))]
    assert same == [], "filters that never filtered"


@pytest.mark.parametrize("operation", sorted(LISTS))
async def test_every_order_has_two_directions(world: World, operation: str) -> None:
    (known,) = [each for each in operations() if each.name == operation]
    listed = LISTS[operation]
    for attribute in known.order:
        up, down = [await ask(world, operation, order_by=[f"{sign}{attribute}"]) for sign in ("", "-")]
        assert sorted(up) == sorted(down), attribute
        is_equal = (operation, attribute) in EQUAL
        assert (up == down) is is_equal or len(set(up)) < len(up), (attribute, up, down)
    assert await world.client.status_of(operation, *listed.arguments, order_by=["secret"]) == 400


async def test_orders_are_right(world: World) -> None:
    for operation, attribute, expected in (
        ("get_dags", "-dag_id", ["taker", "other", "etl"]),
        ("get_dags", "last_run_start_date", ["etl", "other", "taker"]),
        ("get_dags", "next_dagrun", ["etl", "other", "taker"]),
        ("get_dag_runs", "-duration", ["r2", "r1", "o1"]),
        ("get_dag_runs", "state", ["r1", "o1", "r2"]),
        ("get_dag_runs", "-logical_date", ["r2", "r1", "o1"]),
        ("get_dag_runs", "-run_after", ["o1", "r2", "r1"]),
        ("get_dag_runs", "conf", ["o1", "r1", "r2"]),
        ("get_task_instances", "state", [L1, O1, O0, E1, E2, L2]),
        ("get_task_instances", "-start_date", [O0, L2, E2, L1, E1, O1]),
        ("get_task_instances", "-id", [O1, O0, L2, E2, L1, E1]),
        ("get_task_instances", "operator", [E1, E2, L1, L2, O0, O1]),
        ("get_xcom_entries", "-timestamp", [X2, X1]),
        ("get_pools", "-name", ["default_pool", "db", "api"]),
        ("get_connections", "-port", ["warehouse", "mail"]),
        ("get_assets", "-name", ["rates", "orders"]),
        ("get_dag_tags", "-name", ["finance", "daily"]),
    ):
        assert await ask(world, operation, order_by=[attribute]) == expected, (operation, attribute)
    both = await ask(world, "get_task_instances", order_by=["-map_index", "-state"])
    assert both == [O1, O0, *[E1, E2, L2], L1]


async def test_tags_match_all_or_any(world: World) -> None:
    for mode, expected in (("any", ["etl", "other"]), ("all", ["etl"])):
        assert await ask(world, "get_dags", tags=["daily", "finance"], tags_match_mode=mode) == expected


@pytest.mark.parametrize("operation", sorted(LISTS))
async def test_pages_follow_each_other(world: World, operation: str) -> None:
    listed = LISTS[operation]
    whole = await ask(world, operation)
    paged: list[str] = []
    for place in range(len(whole) + 1):
        answer = await world.client(operation, *listed.arguments, limit=1, offset=place)
        paged += [listed.key(each) for each in getattr(answer, listed.field)]
        assert answer.total_entries == len(whole), "also on a page behind the last one"
    assert paged == whole
    if operation in ("get_dag_runs", "get_task_instances"):
        # In this world, runs are due in the order of their ids.
        by_time = (("run_after", whole), ("-run_after", whole[::-1])) if operation == "get_dag_runs" else ()
        for order, expected in (("id", whole), ("-id", whole[::-1]), *by_time):
            by_cursor, cursor = list[str](), ""
            while cursor is not None:
                answer = await world.client(operation, *listed.arguments, limit=2, cursor=cursor, order_by=[order])
                by_cursor += [listed.key(each) for each in getattr(answer, listed.field)]
                cursor = answer.next_cursor
            assert by_cursor == expected


async def test_ranges_take_two_ends_and_patterns_two_words(world: World) -> None:
    middle = {"run_after_gt": T0 + HOUR, "run_after_lt": T0 + 5 * HOUR}
    assert await ask(world, "get_dag_runs", **middle) == ["r2"]
    assert await ask(world, "get_dag_runs", run_after_gt=T0 + 5 * HOUR, run_after_lt=T0) == []
    assert await ask(world, "get_dag_runs", logical_date_gte=JANUARY, logical_date_gt=JANUARY) == ["r2"]
    assert await ask(world, "get_dag_runs", run_id_pattern="1", run_id_prefix_pattern="o") == ["o1"]
    assert await ask(world, "get_dag_runs", run_id_pattern="~") == ["r1", "r2", "o1"]


async def test_one_dag_or_one_run_is_all_that_is_listed(world: World) -> None:
    client = world.client
    runs = await client("get_dag_runs", "etl")
    assert [run.dag_run_id for run in runs.dag_runs] == ["r1", "r2"]
    tasks = await client("get_task_instances", "etl", "r1")
    assert [task.task_id for task in tasks.task_instances] == ["extract", "side.load"]
    of_dag = await client("get_task_instances", "etl", "~")
    assert of_dag.total_entries == 4
    of_run = await client("get_task_instances", "~", "o1")
    assert of_run.total_entries == 2
    for arguments in (("none",), ("none", "~"), ("etl", "o1")):
        operation = "get_dag_runs" if len(arguments) == 1 else "get_task_instances"
        assert await client.status_of(operation, *arguments) == 404
