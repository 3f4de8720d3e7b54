"""Variables, connections and secrets over HTTP: set, changed by compare-and-set, and what is secret is never told."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.domain.access import Role
from evertick.domain.encryption import new_key
from tests.api.conftest import Client, Signed
from tests.engine.world import value

V1 = "/api/v1"
CONNECTION = "postgresql://anna:canary-password@db.test:5432/shop?token=canary-token"


@pytest.fixture
def settings() -> Settings:
    return Settings(api_rate_limit=0, secret_keys=(new_key(),))


async def test_a_variable_is_made_read_changed_and_deleted(admin: Client, conn: AsyncConnection) -> None:
    path = f"{V1}/variables/region"
    await admin.refused("GET", path, 404)
    assert await admin.ok("PUT", path, status=201, json={"value": "north", "description": "Where"}) == {"is_new": True}
    first = await admin.get(path)
    assert first.json()["value"] == "north" and first.json()["description"] == "Where"
    assert first.json()["changed_by"] == "user:root"
    etag = first.headers["etag"]
    changed = await admin.put(path, json={"value": "south"}, headers={"If-Match": etag})
    assert changed.json() == {"is_new": False} and changed.headers["etag"] != etag
    await admin.refused("PUT", path, 412, json={"value": "west"}, headers={"If-Match": etag})
    assert (await admin.ok("GET", path))["value"] == "south"
    listed = (await admin.ok("GET", f"{V1}/variables"))["items"]
    assert [each["name"] for each in listed] == ["region"] and "value" not in listed[0]
    await admin.ok("DELETE", path, status=204)
    await admin.refused("DELETE", path, 404)
    await admin.refused("PUT", path, 404, json={"value": "x"}, headers={"If-Match": etag})
    assert "north" not in str(await value(conn, "select string_agg(j::text, ' ') from audit_log j"))


async def test_what_is_secret_is_in_no_answer(admin: Client) -> None:
    await admin.ok("PUT", f"{V1}/connections/warehouse", status=201, json={"value": CONNECTION})
    await admin.ok("PUT", f"{V1}/secrets/token", status=201, json={"value": "canary-secret"})
    for path in ("/connections", "/connections/warehouse", "/secrets", "/secrets/token", "/audit"):
        answer = await admin.get(V1 + path)
        assert answer.status_code == 200 and "canary" not in answer.text, path
    shown = (await admin.ok("GET", f"{V1}/connections/warehouse"))["value"]
    assert shown.startswith("postgresql://anna:***@db.test:5432/shop")
    assert (await admin.ok("GET", f"{V1}/secrets/token"))["value"] is None


async def test_bad_input_is_refused_without_repeating_it(admin: Client) -> None:
    for path, body, status in (
        ("/connections/x", {"value": "canary no address"}, 400),
        ("/variables/a b", {"value": "canary"}, 400),
        ("/variables/x", {"value": "canary" * 20_000}, 422),
        ("/variables/x", {"value": "canary\x00"}, 400),
        ("/variables/x", {"value": ["canary"]}, 422),
        ("/variables/x", {"value": "canary", "owner": "canary"}, 422),
    ):
        told = await admin.refused("PUT", V1 + path, status, json=body)
        assert "canary" not in str(told), path


async def test_who_may_only_look_sees_no_value_and_changes_none(signed: Signed) -> None:
    viewer, operator = await signed(Role.VIEWER), await signed(Role.OPERATOR)
    await viewer.refused("GET", f"{V1}/variables", 403)
    assert await operator.ok("GET", f"{V1}/secrets") == {"items": [], "next_cursor": None}
    await operator.refused("PUT", f"{V1}/variables/x", 403, json={"value": "x"})


class TestWithoutAKey:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> Settings:
        return Settings(api_rate_limit=0, home=tmp_path / "inside")

    async def test_it_is_said_without_telling_where_the_key_should_be(self, admin: Client) -> None:
        told = await admin.refused("PUT", f"{V1}/secrets/x", 409, json={"value": "y"})
        assert "evertick doctor" in told["detail"] and "inside" not in str(told)


async def test_a_value_is_deleted_only_as_it_was_read(admin: Client) -> None:
    variable = f"{V1}/variables/region"
    first = await admin.put(variable, json={"value": "north"})
    second = await admin.put(variable, json={"value": "south"})
    assert (first.status_code, second.status_code) == (201, 200)
    await admin.refused("DELETE", variable, 412, headers={"If-Match": first.headers["etag"]})
    await admin.ok("DELETE", variable, status=204, headers={"If-Match": second.headers["etag"]})
