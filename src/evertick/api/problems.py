"""Errors as HTTP responses: one table from error codes to statuses, sent as problem+json. Never contains a traceback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus

import psycopg
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from evertick.domain.errors import BrokenFiles, EvertickError, OutcomeUnknown, RateLimited
from evertick.publisher.deployment import FileVerdict

PROBLEM = "application/problem+json"
# The usual duration of a restart or a failover.
RETRY_AFTER_SECONDS = 5
_MOST_ERRORS = 20
# docs/reference/errors.md has a section per code (decision 0047).
_TYPE = "urn:evertick:error:"

STATUS: Mapping[str, HTTPStatus] = {
    "error": HTTPStatus.INTERNAL_SERVER_ERROR,
    "invalid": HTTPStatus.BAD_REQUEST,
    "invalid_dag": HTTPStatus.BAD_REQUEST,
    "broken_files": HTTPStatus.BAD_REQUEST,
    "invalid_params": HTTPStatus.BAD_REQUEST,
    "invalid_schedule": HTTPStatus.BAD_REQUEST,
    "invalid_routing": HTTPStatus.BAD_REQUEST,
    "invalid_settings": HTTPStatus.BAD_REQUEST,
    "invalid_template": HTTPStatus.BAD_REQUEST,
    "bad_choice": HTTPStatus.BAD_REQUEST,
    "secret_locked": HTTPStatus.CONFLICT,
    "result_lost": HTTPStatus.GONE,
    "refused": HTTPStatus.UNAUTHORIZED,
    "forbidden": HTTPStatus.FORBIDDEN,
    "not_found": HTTPStatus.NOT_FOUND,
    "conflict": HTTPStatus.CONFLICT,
    "stale": HTTPStatus.PRECONDITION_FAILED,
    "too_many": HTTPStatus.TOO_MANY_REQUESTS,
    "too_large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "lease_lost": HTTPStatus.CONFLICT,
    "report_refused": HTTPStatus.CONFLICT,
    "delivery_failed": HTTPStatus.BAD_GATEWAY,
    "provider_unavailable": HTTPStatus.BAD_GATEWAY,
    "unanswered": HTTPStatus.BAD_GATEWAY,
    "environment_failed": HTTPStatus.BAD_GATEWAY,
    "executor_busy": HTTPStatus.BAD_GATEWAY,
    "executor_unavailable": HTTPStatus.BAD_GATEWAY,
    "submission_refused": HTTPStatus.BAD_REQUEST,
    "storage_unavailable": HTTPStatus.BAD_GATEWAY,
    "not_leader": HTTPStatus.SERVICE_UNAVAILABLE,
    "schema_mismatch": HTTPStatus.SERVICE_UNAVAILABLE,
    "migration_blocked": HTTPStatus.SERVICE_UNAVAILABLE,
    "postgres_unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
    "wrong_server": HTTPStatus.SERVICE_UNAVAILABLE,
    "answer_lost": HTTPStatus.SERVICE_UNAVAILABLE,
}

# Errors that are not raised by an operation.
SERVER_STATUS: Mapping[str, HTTPStatus] = {
    "method_not_allowed": HTTPStatus.METHOD_NOT_ALLOWED,
    "overloaded": HTTPStatus.SERVICE_UNAVAILABLE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidField:
    """`at` is the place in the request, such as `body.slots` or `query.limit`."""

    at: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error. `type` identifies its kind and never changes; `code` is the last part of it. `errors` is set for a request
    that does not match this document, `files` for a deployment with broken files."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    request_id: str | None
    errors: list[InvalidField] | None = None
    files: list[FileVerdict] | None = None


def type_of(code: str) -> str:
    """The URI that identifies a kind of error."""
    return _TYPE + code


def document_of(status: HTTPStatus, code: str, detail: str, request_id: str | None) -> dict[str, object]:
    return {
        "type": type_of(code),
        "title": status.phrase,
        "status": status.value,
        "code": code,
        "detail": detail,
        "request_id": request_id,
    }


def bare_response(status: HTTPStatus, code: str, detail: str) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of an error of the server itself, which happens before there is a request."""
    body = json.dumps(document_of(status, code, detail, None)).encode()
    headers = {"Content-Type": PROBLEM, "Content-Length": str(len(body)), "Connection": "close"}
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return body, headers


def status_of(error: Exception) -> tuple[HTTPStatus, str, str]:
    """The status, the error code and the message of an error."""
    match error:
        case EvertickError():
            status = STATUS[error.code]
            # Do not disclose the database's address to clients.
            is_private = status is HTTPStatus.SERVICE_UNAVAILABLE and not isinstance(error, OutcomeUnknown)
            return status, error.code, "The database is unreachable. Retry later." if is_private else str(error)
        case psycopg.errors.QueryCanceled():
            detail = "The query took too long and was canceled. Use a filter or a smaller page."
            return HTTPStatus.SERVICE_UNAVAILABLE, "postgres_unavailable", detail
        case psycopg.errors.LockNotAvailable():
            detail = "Timed out waiting for another change of the same data. Retry in a moment."
            return HTTPStatus.SERVICE_UNAVAILABLE, "postgres_unavailable", detail
        case psycopg.errors.InsufficientPrivilege():
            detail = "The API's database user lacks a privilege. See the API's log; `evertick db roles` grants it."
            return HTTPStatus.SERVICE_UNAVAILABLE, "postgres_unavailable", detail
        case psycopg.OperationalError() | psycopg.InterfaceError():
            return HTTPStatus.SERVICE_UNAVAILABLE, "postgres_unavailable", "The database is unreachable. Retry later."
        # JSON can contain lone surrogates, which PostgreSQL rejects.
        case psycopg.DataError() | UnicodeEncodeError():
            return HTTPStatus.BAD_REQUEST, "invalid", "A value cannot be stored: it is out of range or not valid text."
        case HTTPException():
            status = HTTPStatus(error.status_code)
            code = next((code for code, known in STATUS.items() if known is status), status.name.lower())
            return status, code, str(error.detail)
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR, "error", "Internal error. See the server's log."


def headers_of(error: Exception, status: HTTPStatus) -> dict[str, str]:
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, RateLimited):
        headers["Retry-After"] = str(max(1, round(error.retry_after_seconds or 1)))
    elif status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    elif status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def problem(request: Request, error: Exception) -> JSONResponse:
    """The error response of the native API."""
    status, code, detail = status_of(error)
    more = {"files": [asdict(each) for each in error.verdicts]} if isinstance(error, BrokenFiles) else {}
    return _answer(request, status, code, detail, headers_of(error, status), **more)


async def invalid(request: Request, error: Exception) -> JSONResponse:
    """The response to a request that violates the schema, with the location of each error. Values may be secret and are omitted."""
    assert isinstance(error, RequestValidationError)
    places = [{"at": ".".join(map(str, each["loc"])), "message": each["msg"]} for each in error.errors()]
    detail = "; ".join(f"{each['at']}: {each['message']}" for each in places[:3])
    return _answer(request, HTTPStatus.UNPROCESSABLE_ENTITY, "invalid", detail, {}, errors=places[:_MOST_ERRORS])


def _answer(
    request: Request, status: HTTPStatus, code: str, detail: str, headers: dict[str, str], **more: object
) -> JSONResponse:
    document = document_of(status, code, detail, getattr(request.state, "request_id", None)) | more
    return JSONResponse(document, status.value, headers=headers, media_type=PROBLEM)
