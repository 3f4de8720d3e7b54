"""What an error means over HTTP: one table from our codes to a status, told as problem+json. Never with a traceback."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import psycopg
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from evertick.domain.errors import AnswerLost, EvertickError, TooMany

PROBLEM = "application/problem+json"
# How long a restart or a failover usually takes.
RETRY_AFTER_SECONDS = 5
_MOST_ERRORS = 20

STATUS: Mapping[str, HTTPStatus] = {
    "error": HTTPStatus.INTERNAL_SERVER_ERROR,
    "invalid": HTTPStatus.BAD_REQUEST,
    "invalid_dag": HTTPStatus.BAD_REQUEST,
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
    "delivery_failed": HTTPStatus.BAD_GATEWAY,
    "unanswered": HTTPStatus.BAD_GATEWAY,
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


def status_of(error: Exception) -> tuple[HTTPStatus, str, str]:
    """The status, our code, and what people are told."""
    match error:
        case EvertickError():
            status = STATUS[error.code]
            # The place of the database is nobody's business out there.
            is_private = status is HTTPStatus.SERVICE_UNAVAILABLE and not isinstance(error, AnswerLost)
            return status, error.code, "The database cannot be reached now." if is_private else str(error)
        case psycopg.errors.QueryCanceled():
            detail = "This took too long and was stopped. Ask for less at once: with a filter, or a smaller page."
            return HTTPStatus.SERVICE_UNAVAILABLE, "postgres_unavailable", detail
        case psycopg.errors.LockNotAvailable():
            detail = "Something else is changing this just now, and it takes long. Try again in a moment."
            return HTTPStatus.SERVICE_UNAVAILABLE, "postgres_unavailable", detail
        case psycopg.errors.InsufficientPrivilege():
            detail = (
                "The API's own login lacks a right in the database. Its log says which; `evertick db roles` gives it."
            )
            return HTTPStatus.SERVICE_UNAVAILABLE, "postgres_unavailable", detail
        case psycopg.OperationalError() | psycopg.InterfaceError():
            return HTTPStatus.SERVICE_UNAVAILABLE, "postgres_unavailable", "The database cannot be reached now."
        # JSON can write half a character, which no database takes.
        case psycopg.DataError() | UnicodeEncodeError():
            return HTTPStatus.BAD_REQUEST, "invalid", "A value cannot be stored: it is out of range or no text."
        case HTTPException():
            status = HTTPStatus(error.status_code)
            code = next((code for code, known in STATUS.items() if known is status), status.name.lower())
            return status, code, str(error.detail)
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR, "error", "This is a fault of the program. Its log says more."


def headers_of(error: Exception, status: HTTPStatus) -> dict[str, str]:
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, TooMany):
        headers["Retry-After"] = str(max(1, round(error.retry_after_seconds)))
    elif status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    elif status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def problem(request: Request, error: Exception) -> JSONResponse:
    """The answer of the native API."""
    status, code, detail = status_of(error)
    return _answer(request, status, code, detail, headers_of(error, status))


def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    """What does not fit the schema, each with its place. The value itself is not repeated: it may be a secret."""
    places = [{"at": ".".join(map(str, each["loc"])), "message": each["msg"]} for each in error.errors()]
    detail = "; ".join(f"{each['at']}: {each['message']}" for each in places[:3])
    return _answer(request, HTTPStatus.UNPROCESSABLE_ENTITY, "invalid", detail, {}, errors=places[:_MOST_ERRORS])


def _answer(
    request: Request, status: HTTPStatus, code: str, detail: str, headers: dict[str, str], **more: object
) -> JSONResponse:
    document = {"type": "about:blank", "title": status.phrase, "status": status.value, "code": code, "detail": detail}
    document |= {"request_id": getattr(request.state, "request_id", None), **more}  # type: ignore[dict-item]
    return JSONResponse(document, status.value, headers=headers, media_type=PROBLEM)
