"""`evertick deploy` and the versions of DAGs: published at once, compared, rolled back."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings, read_settings
from evertick.db.queries import dags, runs
from evertick.domain.access import Actor
from evertick.domain.encryption import new_key
from evertick.domain.stored_values import ValueKind
from evertick.engine.secrets import put_value
from evertick.publisher.publisher import Publisher
from evertick.secrets.keyring import load_keyring
from tests.cli.conftest import Cli
from tests.engine.world import start, value
from tests.system.hosting import Said

FILE = """
from evertick import dag, task
from part import WORD

@task
def work() -> str:
    return WORD

@dag(schedule="0 6 * * *")
def shop():
    work()
"""


def write(folder: Path, word: str, text: str = FILE) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "shop.py").write_text(text)
    (folder / "part.py").write_text(f"WORD = {word!r}\n")
    return folder


async def test_a_schedule_that_begins_in_the_past_is_told_to_use_a_backfill(
    cli: Cli, conn: AsyncConnection, tmp_path: Path
) -> None:
    begins = FILE.replace('"0 6 * * *"', '"0 6 * * *", misfire="all", start_at="2020-01-01", catchup_window="30d"')
    folder = write(tmp_path / "code", "one", begins)
    hint = "evertick backfills create shop --from 2020-01-01T00:00:00+00:00"
    assert hint in " ".join((await cli("dags", "validate", folder)).out.split())
    (warning,) = (await cli.json("deploy", folder))["warnings"]
    assert "starts at 2020-01-01T00:00:00+00:00, in the past, and creates no runs for that time" in warning
    assert warning.endswith(hint)
    assert (await cli.json("deploy", folder))["warnings"] == [], "it is published already"
    write(folder, "one", FILE.replace('"0 6 * * *"', '"0 6 * * *", start_at="2020-01-01"'))
    assert "Note" not in (await cli("dags", "validate", folder)).out


async def test_a_folder_is_deployed_compared_and_rolled_back(cli: Cli, conn: AsyncConnection, tmp_path: Path) -> None:
    folder = write(tmp_path / "code", "one")
    (made,) = (await cli.json("deploy", folder))["dags"]
    assert (made["dag"], made["is_new"]) == ("shop", True)
    first = await start(conn, "shop")
    assert "unchanged" in (await cli("deploy", folder)).out
    write(folder, "two", FILE.replace("0 6", "0 7"))
    assert "new version" in (await cli("deploy", folder)).out
    second = await start(conn, "shop")
    listed = (await cli.json("dags", "versions", "shop"))["versions"]
    assert [(each["number"], each["is_current"]) for each in listed] == [(2, True), (1, False)]
    changed = await cli.json("dags", "diff", "shop")
    assert (changed["from"], changed["to"]) == (1, 2)
    assert "-WORD = 'one'" in changed["code"] and "+WORD = 'two'" in changed["code"]
    assert any("0 7 * * *" in line for line in changed["plan"] if line.startswith("+"))
    assert "They are the same." in (await cli("dags", "diff", "shop", 2, 2)).out
    assert "shop is at version 1; it was at 2." in (await cli("dags", "rollback", "shop", "--yes")).out
    third = await start(conn, "shop")
    versions = [(await runs.find(conn, run_id)).version for run_id in (first, second, third)]  # type: ignore[union-attr]
    assert versions == [1, 2, 1]
    assert "0 6 * * *" in str(await value(conn, "select spec::text from schedule"))
    journal = await value(conn, "select count(*) from audit_log where action = 'publish'")
    assert journal == 3, "a rollback is on record, too"
    assert "current" in (await cli("dags", "versions", "shop")).out


async def test_what_cannot_be_rolled_back_is_refused(cli: Cli, conn: AsyncConnection, tmp_path: Path) -> None:
    await cli("deploy", write(tmp_path / "code", "one"))
    assert "has no version before 1" in await cli.refused("dags", "rollback", "shop", "--yes")
    assert "is already at version 1" in await cli.refused("dags", "rollback", "shop", 1, "--yes", status=1)
    assert "has no version 7; it has: 1" in await cli.refused("dags", "diff", "shop", 7)
    assert "There is no DAG 'shp'. Did you mean 'shop'?" in await cli.refused("dags", "versions", "shp")


async def test_nothing_is_published_if_one_file_is_broken(cli: Cli, conn: AsyncConnection, tmp_path: Path) -> None:
    folder = write(tmp_path / "code", "one")
    (folder / "broken.py").write_text("from evertick import dag\nraise ValueError('no')\n")
    (folder / "worse.py").write_text("from evertick import dag\nraise ValueError('two\\nlines')\n")
    first, *others = (await cli.refused("deploy", folder)).splitlines()
    assert first == "Error: Nothing was published:"
    assert [each.split(":")[0] for each in others] == ["  broken.py", "  worse.py"], "one line per file"
    (folder / "worse.py").unlink()
    (folder / "broken.py").write_text("from evertick import DAG\n")
    assert "use the decorator @dag" in await cli.refused("deploy", folder)
    (folder / "broken.py").write_text(FILE)
    assert "defined in" in await cli.refused("deploy", folder)
    assert await value(conn, "select count(*) from dag") == 0
    assert "does not exist" in await cli.refused("deploy", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "contains no DAG file" in await cli.refused("deploy", tmp_path / "empty")
    (tmp_path / "empty/helper.py").write_text("from evertick import dag\n")
    assert "No DAG is defined: helper.py" in await cli.refused("deploy", tmp_path / "empty")
    assert "not a valid name for a deployment" in await cli.refused("deploy", folder, "--name", "a b")


async def test_a_deployment_owns_its_dags(cli: Cli, conn: AsyncConnection, database: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "code", "one")
    await cli("deploy", folder, "--name", "a")
    told = await cli.refused("deploy", folder, "--name", "b")
    assert "DAG 'shop' belongs to deployment 'a' (shop.py), so deployment 'b' cannot publish it." in told
    # Nor can a watched folder, which is a deployment, too. It leaves DAGs of others alone.
    settings = Settings(database_url=database, home=tmp_path / "home", dags_folder=folder, listen_notify=False)
    publisher = Publisher(settings, url=database, environment={}, log=Said().log)
    await publisher.tick()
    (error,) = await dags.import_errors(conn)
    assert (error.deployment, error.file) == ("default", "shop.py")
    assert "belongs to deployment 'a' (shop.py), so deployment 'default'" in error.message
    await cli("dags", "delete", "shop", "--yes")
    await publisher.tick()
    assert await dags.import_errors(conn) == [], "the name is free"
    await publisher._link.close()
    assert "come from a folder that a publisher watches" in await cli.refused(
        "deploy", folder, "--name", "default", status=1
    )


async def test_a_dag_that_is_gone_is_retired_and_comes_back_with_a_rollback(
    cli: Cli, conn: AsyncConnection, tmp_path: Path
) -> None:
    folder = write(tmp_path / "code", "one")
    await cli("deploy", folder, "--name", "a", "--commit", "abc123", "--author", "Ann", "--message", "First")
    write(folder, "one", FILE.replace("def shop", "def store"))
    preview = await cli.json("deploy", folder, "--name", "a", "--dry-run")
    assert (preview["retired"], preview["version"], preview["is_published"]) == (["shop"], 1, False)
    assert "Would retire 1 DAG" in (await cli("deploy", folder, "--name", "a", "--dry-run")).out
    assert await dags.names(conn) == ["shop"]
    assert "Retired 1 DAG no longer in the folder: shop" in (await cli("deploy", folder, "--name", "a")).out
    assert await dags.names(conn) == ["store"]
    assert "a is at version 2, as before." in (await cli("deploy", folder, "--name", "a")).out
    shown = await cli.json("deployments", "show", "a")
    assert (shown["dags"], shown["version"]) == (["store"], 2)
    assert [(each["number"], each["commit_hash"], each["author"]) for each in shown["versions"]] == [
        (2, None, None),
        (1, "abc123", "Ann"),
    ]
    assert "First" in (await cli("deployments", "show", "a")).out
    done = await cli.json("deployments", "rollback", "a", "--yes")
    assert done == {"version": 3, "restores": 1, "dags": ["shop"], "retired": ["store"]}
    assert await dags.names(conn) == ["shop"]
    assert "is already at version 3" in await cli.refused("deployments", "rollback", "a", 3, "--yes", status=1)
    assert "has the DAGs of version 1 already" in await cli.refused(
        "deployments", "rollback", "a", 1, "--yes", status=1
    )
    assert "has no version 9; it has: 3, 2, 1" in await cli.refused("deployments", "rollback", "a", 9, "--yes")
    (listed,) = (await cli.json("deployments", "list"))["deployments"]
    assert (listed["name"], listed["kind"], listed["version"], listed["dag_count"]) == ("a", "upload", 3, 1)
    (version,) = (await cli.json("dags", "versions", "shop"))["versions"]
    assert (version["commit_hash"], version["author"]) == ("abc123", "Ann")
    assert "not at version 1" in (told := await cli.refused("deploy", folder, "--expect-version", 1, status=1)) or told
    assert "There is no deployment 'b'" in await cli.refused("deployments", "show", "b")
    (shop, store) = (await cli.json("deployments", "diff", "a"))["dags"]
    assert (shop, store) == (
        {"name": "shop", "before": None, "after": 1},
        {"name": "store", "before": 1, "after": None},
    )
    assert "They have the same DAGs" in (await cli("deployments", "diff", "a", 1, 3)).out
    deleted = (await cli("deployments", "delete", "a", "--yes")).out
    assert "Deleted a." in deleted and "evertick deployments rollback a" in deleted
    assert "is deleted already" in await cli.refused("deployments", "delete", "a", "--yes")
    assert await dags.names(conn) == []
    assert "No deployments yet" in (await cli("deployments", "list")).out
    shown = (await cli("deployments", "show", "a")).out
    assert "Deleted" in shown and "4 (current)" in shown
    assert "a is at version 5, which has the DAGs of version 3" in (await cli("deployments", "rollback", "a", "-y")).out


async def test_a_webhook_to_which_nothing_is_sent_is_a_warning(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = ("http://127.0.0.1:9/x", "http://localhost:9/x", "http://10.1.2.3/x", "http://8.8.8.8/x", "http://intern/x")
    sent = f"on_failure=[notify.webhook(url) for url in {sinks!r}]"
    text = FILE.replace("import dag, task", "import dag, notify, task").replace("@task\n", f"@task({sent})\n")
    folder = write(tmp_path / "code", "one", text)
    warnings = (await cli.json("deploy", folder))["warnings"]
    assert {each.split()[1] for each in warnings} == {f"webhook:{url}" for url in sinks[:3]}
    assert all("is not a public address; EVERTICK_WEBHOOK_ALLOWED_NETWORKS" in each for each in warnings)
    monkeypatch.setenv("EVERTICK_WEBHOOK_ALLOWED_NETWORKS", "127.0.0.0/8,::1/128,10.0.0.0/8")
    assert (await cli.json("deploy", folder))["warnings"] == []


async def test_what_tasks_and_sinks_need_and_nobody_has_set_is_a_warning(
    cli: Cli, conn: AsyncConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FILE.replace("import dag, task", "import dag, notify, task").replace(
        "@task\n", '@task(secrets=["token"], variables=["region"], on_failure=notify.slack(secret="slack_url"))\n'
    )
    folder = write(tmp_path / "code", "one", text)
    monkeypatch.setenv("EVERTICK_SECRET_KEYS", new_key())
    ring = load_keyring(read_settings())
    await put_value(conn, ring, kind=ValueKind.VARIABLE, name="region", value="eu", actor=Actor("ann"))
    assert (await cli.json("deploy", folder))["warnings"] == [
        "sink slack:secret/slack_url of shop needs secret 'slack_url', which is not set: evertick secrets set slack_url",
        "task work of shop needs secret 'token', which is not set: evertick secrets set token",
    ]
    assert "Warning: task work of shop needs secret 'token'" in (await cli("deploy", folder)).out
    # They may come from elsewhere: then nobody here can know.
    monkeypatch.setenv("EVERTICK_SECRETS_BACKENDS", "store,env")
    assert (await cli.json("deploy", folder))["warnings"] == []
