"""`/auth` for providers and programs: back-channel logout, and the exchange of a platform's token."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field

from evertick.api.auth import GuardedRouter
from evertick.api.context import Who
from evertick.api.oidc.provider import LONGEST_TOKEN
from evertick.api.oidc.service import WORKLOAD_SECONDS
from evertick.domain.access import Permission
from evertick.domain.errors import Unauthenticated

router = GuardedRouter(prefix="/auth", tags=["auth"])


class WorkloadToken(BaseModel):
    """A token of the platform that runs the program: of GitHub Actions, or of a service account of Kubernetes."""

    model_config = ConfigDict(extra="forbid")
    token: Annotated[str, Field(min_length=1, max_length=LONGEST_TOKEN)]


class ExchangedToken(BaseModel):
    access_token: str
    expires_in: int


@router.post("/workload", Permission.OPEN, status_code=201)
async def exchange_workload(given: WorkloadToken, caller: Who) -> ExchangedToken:
    """Exchange a platform's token for a token of the user that its workload is mapped to. It expires after 15 minutes."""
    issued = await caller.context.oidc.exchange_workload(given.token, caller.actor)
    return ExchangedToken(access_token=issued.secret, expires_in=int(WORKLOAD_SECONDS))


@router.post("/oidc/{provider}/logout", Permission.OPEN)
async def log_out(provider: str, request: Request, caller: Who) -> Response:
    """Back-channel logout: the provider says that a user signed out there, and the user's sessions here end."""
    form = parse_qs((await request.body()).decode("utf-8", "replace"))
    tokens = form.get("logout_token", [])
    if len(tokens) != 1:
        raise Unauthenticated("A logout needs one logout_token, sent as a form.")
    await caller.context.oidc.log_out(provider, tokens[0], caller.actor)
    return Response(headers={"Cache-Control": "no-store"})
