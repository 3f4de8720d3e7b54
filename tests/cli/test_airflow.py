"""`evertick airflow`: what needs no Airflow."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.bundles.airflow_setup import make_environment
from evertick.cli.main import main
from evertick.domain.access import Actor
from evertick.domain.encryption import Keyring, new_key
from evertick.domain.errors import UserError
from evertick.domain.stored_values import ValueKind, read_connection, read_extra
from evertick.engine.secrets import read_value
from evertick.operations.airflow_import import Imported, import_item, read_export

CONNECTIONS = {
    "shop": {
        "conn_type": "postgres",
        "description": "the shop",
        "login": "anna",
        "password": "p@ss",
        "host": "db.example",
        "port": 5432,
        "schema": "shop",
        "extra": '{"nested": {"a": [1]}, "sslmode": "require"}',
    },
    "bare": {"conn_type": "fs", "host": None, "login": None, "port": None, "extra": None},
}
VARIABLES = {"region": "eu", "limits": {"rows": 5}, "told": {"value": "x", "description": "why"}, "bad name": "x"}
POOLS = {"default_pool": {"slots": 128, "description": "Default pool"}, "warehouse": {"slots": 2}, "none": {"slots": 0}}


async def test_an_export_is_stored_once_and_told_name_by_name(conn: AsyncConnection) -> None:
    ring = Keyring([new_key()])
    texts = [json.dumps(CONNECTIONS), json.dumps(VARIABLES), json.dumps(POOLS), "env_db=mysql://u:p@h:1/d?x=1\n"]
    items = [item for text in texts for item in read_export(text, "f")]

    async def run(*, dry_run: bool) -> dict[str, str]:
        done: list[Imported] = [
            await import_item(conn, ring, item, actor=Actor("t"), dry_run=dry_run) for item in items
        ]
        return {each.name: each.result for each in done}

    first = {**dict.fromkeys(("shop", "bare", "env_db", "region", "limits", "told", "warehouse"), "new")}
    refused = {"bad name": "refused", "none": "refused", "default_pool": "equal"}
    assert await run(dry_run=True) == first | refused
    assert await run(dry_run=False) == first | refused
    assert await run(dry_run=False) == dict.fromkeys(first, "equal") | refused
    _, shop = await read_value(conn, ring, kind=ValueKind.CONNECTION, name="shop")
    found = read_connection(shop)
    assert (found.type, found.host, found.port, found.login, found.password) == (
        "postgres",
        "db.example",
        5432,
        "anna",
        "p@ss",
    )
    assert read_extra(shop) == {"nested": {"a": [1]}, "sslmode": "require"}
    row, limits = await read_value(conn, ring, kind=ValueKind.VARIABLE, name="limits")
    assert json.loads(limits) == {"rows": 5}
    row, _ = await read_value(conn, ring, kind=ValueKind.VARIABLE, name="told")
    assert row.description == "why"


def test_a_file_that_is_no_export_is_refused_with_its_line() -> None:
    with pytest.raises(UserError, match=r"v\.yaml, line 1 is neither JSON nor a connection"):
        read_export("region: eu\n", "v.yaml")
    with pytest.raises(UserError, match="must be a JSON object"):
        read_export("[1]", "v.json")


def test_check_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("EVERTICK_AIRFLOW_PYTHON", raising=False)
    assert main(["airflow", "check", str(tmp_path)]) != 0
    assert "evertick airflow setup" in capsys.readouterr().err
    assert main(["airflow", "check", str(tmp_path), "--python", sys.executable]) != 0
    assert "no Airflow" in capsys.readouterr().err
    assert main(["airflow", "check", str(tmp_path), "--python", str(tmp_path / "none")]) != 0
    assert "is not a Python that works" in capsys.readouterr().err


def test_setup_refuses_what_it_cannot_make(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()

    def make(folder: str, version: str = "3.3", providers: tuple[str, ...] = ()) -> None:
        make_environment(tmp_path / folder, version=version, providers=providers, constraints="none", say=print)

    with pytest.raises(UserError, match=r"'2\.10' is not a version of Airflow 3"):
        make("new", "2.10")
    with pytest.raises(UserError, match="'a b' is not a provider's name"):
        make("new", providers=("a b",))
    with pytest.raises(UserError, match="is not empty, and no Python environment"):
        make("full")
    assert not (tmp_path / "new").exists()
