"""AWS Secrets Manager and the Parameter Store of Systems Manager, with boto3 (the extra `aws`) and its usual credentials."""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from evertick.secrets.managers import Manager, ManagerUnavailable, Place

_MISSING = {"ResourceNotFoundException", "ParameterNotFound"}
# Within the ten seconds that a task waits for all of its values.
_CONFIG = Config(connect_timeout=2, read_timeout=3, retries={"max_attempts": 2, "mode": "standard"})


class SecretsManager:
    def __init__(self, client: Any, prefix: str) -> None:
        self._client, self._prefix = client, prefix

    def read(self, path: str) -> str | None:
        found = _asked(lambda: self._client.get_secret_value(SecretId=f"{self._prefix}{path}"))
        text: str | None = None if found is None else found.get("SecretString")
        return text


class ParameterStore:
    def __init__(self, client: Any, prefix: str) -> None:
        self._client, self._prefix = client, prefix

    def read(self, path: str) -> str | None:
        found = _asked(lambda: self._client.get_parameter(Name=f"/{self._prefix}{path}", WithDecryption=True))
        return None if found is None else str(found["Parameter"]["Value"])


def open_manager(place: Place) -> Manager:
    place.refuse_unknown("endpoint", "profile")
    session = boto3.session.Session(profile_name=place.options.get("profile"), region_name=place.netloc)
    prefix = f"{place.path}/" if place.path else ""
    service, kind = ("ssm", ParameterStore) if place.scheme == "aws-ssm" else ("secretsmanager", SecretsManager)
    client = session.client(service, endpoint_url=place.options.get("endpoint"), config=_CONFIG)
    made: Manager = kind(client, prefix)
    return made


def _asked(call: Any) -> dict[str, Any] | None:
    """The answer; None if there is no such value. Messages of errors could contain names, but no values."""
    try:
        found: dict[str, Any] = call()
        return found
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code in _MISSING:
            return None
        raise ManagerUnavailable(f"AWS answered {code}") from None
    except BotoCoreError as error:
        raise ManagerUnavailable(f"AWS cannot be asked: {type(error).__name__}") from None
