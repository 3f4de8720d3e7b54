"""HashiCorp Vault and OpenBao: the second version of the key-value engine, by its HTTP API.

Signs in with a token from a file, with AppRole, or with the service account of a Kubernetes pod. The file is read again after a
refusal, so an agent may renew it.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

from evertick.domain.errors import InvalidSettings
from evertick.secrets.managers import ManagerUnavailable, Place

TIMEOUT_SECONDS = 4.0
_POD_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
_OPTIONS = ("token_file", "role_id", "secret_id_file", "kubernetes_role", "auth_path", "namespace", "ca_file")


class Vault:
    def __init__(self, place: Place) -> None:
        place.refuse_unknown(*_OPTIONS)
        self._options = place.options
        self._mount, _, prefix = place.path.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        ways = [name for name in ("token_file", "role_id", "kubernetes_role") if name in self._options]
        if not self._mount or len(ways) != 1 or ("role_id" in self._options) != ("secret_id_file" in self._options):
            raise InvalidSettings(
                "EVERTICK_SECRETS_BACKENDS: Vault needs the mount of its engine as path, and one of token_file,"
                " kubernetes_role, or role_id with secret_id_file."
            )
        headers = {"X-Vault-Request": "true"}
        if "namespace" in self._options:
            headers["X-Vault-Namespace"] = self._options["namespace"]
        self._http = httpx2.Client(
            base_url=f"{place.scheme.removeprefix('vault+')}://{place.netloc}/v1/",
            headers=headers,
            timeout=TIMEOUT_SECONDS,
            trust_env=False,
            verify=_tls(self._options.get("ca_file")),
        )
        self._token: str | None = None
        self._lock = threading.Lock()

    def read(self, path: str) -> str | None:
        where = f"{quote(self._mount)}/data/{quote(self._prefix + path)}"
        status, found = self._ask("GET", where, token=self._sign_in(refused=None))
        if status == 403:
            # The token may have expired.
            status, found = self._ask("GET", where, token=self._sign_in(refused=self._token))
        if status == 404:
            return None
        data = (found.get("data") or {}).get("data")
        if status != 200 or not isinstance(data, dict):
            raise ManagerUnavailable(f"Vault answered {status} for {path}")
        # One value, or the fields of a connection.
        value = data["value"] if data.keys() == {"value"} else data
        return value if isinstance(value, str) else json.dumps(value)

    def _sign_in(self, *, refused: str | None) -> str:
        """The token; a new one if this one was refused."""
        with self._lock:
            if self._token is None or self._token == refused:
                self._token = self._new_token()
            return self._token

    def _new_token(self) -> str:
        options = self._options
        if "token_file" in options:
            return _content(options["token_file"])
        if "role_id" in options:
            way, given = "approle", {"role_id": options["role_id"], "secret_id": _content(options["secret_id_file"])}
        else:
            way, given = "kubernetes", {"role": options["kubernetes_role"], "jwt": _content(_POD_TOKEN)}
        status, found = self._ask("POST", f"auth/{quote(options.get('auth_path', way))}/login", body=given)
        token = (found.get("auth") or {}).get("client_token")
        if status != 200 or not isinstance(token, str):
            raise ManagerUnavailable(f"Vault refused the sign-in with {way}: {status}")
        return token

    def _ask(
        self, method: str, path: str, *, token: str | None = None, body: object = None
    ) -> tuple[int, Mapping[str, Any]]:
        headers = {} if token is None else {"X-Vault-Token": token}
        try:
            answer = self._http.request(method, path, headers=headers, json=body)
        except httpx2.HTTPError as error:
            raise ManagerUnavailable(f"Vault does not answer: {type(error).__name__}") from None
        try:
            found = answer.json()
        except ValueError:
            found = {}
        return answer.status_code, found if isinstance(found, dict) else {}


def open_manager(place: Place) -> Vault:
    return Vault(place)


def _tls(ca_file: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)


def _content(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise ManagerUnavailable(f"{file} cannot be read") from None
