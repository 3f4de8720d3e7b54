"""Secret managers: AWS on moto's server, and Vault on a server with the answers of its documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from evertick.domain.errors import EvertickError, InvalidSettings
from evertick.secrets.backends import open_backends
from evertick.secrets.managers import CachedManager, ManagerUnavailable, open_manager


class FakeVault:
    """Answers as the HTTP API of Vault 1.17 and OpenBao 2 document it: KV version 2 and AppRole."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self.tokens, self.is_down, self.asked = {"root"}, False, 0
        vault = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                vault.asked += 1
                path = self.path.removeprefix("/v1/secret/data/")
                if vault.is_down:
                    self._tell(503, {"errors": ["Vault is sealed"]})
                elif self.headers.get("X-Vault-Token") not in vault.tokens:
                    self._tell(403, {"errors": ["permission denied"]})
                elif path not in vault.values:
                    self._tell(404, {"errors": []})
                else:
                    self._tell(200, {"data": {"data": vault.values[path], "metadata": {"version": 1}}})

            def do_POST(self) -> None:
                given = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path != "/v1/auth/approle/login" or given != {"role_id": "r", "secret_id": "s"}:
                    self._tell(400, {"errors": ["invalid role or secret ID"]})
                    return
                token = f"t{len(vault.tokens)}"
                vault.tokens = {token}
                self._tell(200, {"auth": {"client_token": token, "lease_duration": 60}})

            def _tell(self, status: int, found: Any) -> None:
                content = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"vault+http://127.0.0.1:{self.server.server_port}/secret/evertick"


@pytest.fixture
def vault() -> Iterator[FakeVault]:
    made = FakeVault()
    Thread(target=made.server.serve_forever, args=[0.01], daemon=True).start()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_vault_gives_values_and_connections_and_nothing_else(vault: FakeVault, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("root\n")
    vault.values["evertick/secret/db"] = {"value": "s3cret"}
    vault.values["evertick/connection/shop"] = {"conn_type": "postgres", "host": "db"}
    (backend,) = open_backends((f"{vault.url}?token_file={tmp_path}/token",))
    assert backend is not None and backend.get("secret", "db") == "s3cret"
    assert json.loads(backend.get("connection", "shop") or "")["host"] == "db"
    assert backend.get("secret", "none") is None and backend.get("secret", "../connection/shop") is None


def test_vault_signs_in_again_when_its_token_ends(vault: FakeVault, tmp_path: Path) -> None:
    (tmp_path / "id").write_text("s")
    vault.values["evertick/secret/db"] = {"value": "s3cret"}
    manager = open_manager(f"{vault.url}?role_id=r&secret_id_file={tmp_path}/id&keep=0")
    assert manager.get("secret", "db") == "s3cret"
    vault.tokens = {"other"}
    assert manager.get("secret", "db") == "s3cret"
    (tmp_path / "id").write_text("wrong")
    vault.tokens = {"other"}
    vault.values["evertick/secret/new"] = {"value": "x"}
    with pytest.raises(ManagerUnavailable) as refused:
        manager.get("secret", "new")
    assert "s3cret" not in str(refused.value)


def test_a_value_is_kept_for_a_minute_and_for_ten_while_the_manager_is_down(vault: FakeVault, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("root")
    vault.values["evertick/secret/db"] = {"value": "old"}
    now = [1000.0]
    manager = open_manager(f"{vault.url}?token_file={tmp_path}/token")
    cached = CachedManager(manager._manager, keep_seconds=60, stale_seconds=600, now=lambda: now[0])
    assert cached.get("secret", "db") == "old" and cached.get("secret", "db") == "old" and vault.asked == 1
    vault.values["evertick/secret/db"] = {"value": "new"}
    now[0] += 61
    assert cached.get("secret", "db") == "new"
    vault.is_down = True
    now[0] += 599
    assert cached.get("secret", "db") == "new"
    now[0] += 2
    with pytest.raises(ManagerUnavailable):
        cached.get("secret", "db")
    # A deleted value is gone at once, and not kept by an outage after it.
    vault.is_down = False
    del vault.values["evertick/secret/db"]
    assert cached.get("secret", "db") is None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("vault+https://vault:8200/secret", "one of token_file"),
        ("vault+https://vault:8200/?token_file=x", "needs the mount"),
        ("vault+https://vault:8200/secret?token=x", "unknown option 'token'"),
        ("vault+https://u:p@vault:8200/secret?token_file=x", "no password"),
        ("aws-ssm:///x", "needs a host or region"),
        ("aws-ssm://eu-central-1/x?keep=soon", "number of seconds"),
    ],
)
def test_a_url_that_cannot_work_is_refused_without_its_options(url: str, why: str) -> None:
    with pytest.raises(InvalidSettings, match=why):
        open_backends((url,))


@pytest.mark.parametrize("scheme", ["aws-secrets", "aws-ssm"])
def test_aws_gives_values(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moto = pytest.importorskip("moto.server", reason="needs the group dev")
    import boto3

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        if scheme == "aws-ssm":
            client = boto3.client("ssm", region_name="eu-central-1", endpoint_url=endpoint)
            client.put_parameter(Name="/etl/secret/db", Value="s3cret", Type="SecureString")
        else:
            client = boto3.client("secretsmanager", region_name="eu-central-1", endpoint_url=endpoint)
            client.create_secret(Name="etl/secret/db", SecretString="s3cret")
        manager = open_manager(f"{scheme}://eu-central-1/etl?endpoint={endpoint}")
        assert manager.get("secret", "db") == "s3cret" and manager.get("secret", "none") is None
    finally:
        server.stop()
    with pytest.raises((ManagerUnavailable, EvertickError)):
        manager.get("secret", "other")
    assert manager.get("secret", "db") == "s3cret"
