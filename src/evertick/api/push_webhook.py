"""The push webhook of a git repository: wakes the publisher that follows it.

The caller is verified by the signature or the token that GitHub, GitLab, Gitea, Forgejo or Bitbucket send. The content is not
read: the publisher looks at the repository itself, so a webhook that is sent again changes nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated

from fastapi import Header, Request, Response
from psycopg import AsyncConnection

from evertick.api.auth import GuardedRouter, NativeRoute
from evertick.api.context import ApiCaller, Who
from evertick.api.openapi import errors_of
from evertick.db.notify import Channel
from evertick.db.queries import deployments
from evertick.domain.access import Permission
from evertick.domain.errors import EvertickError, Unauthenticated
from evertick.domain.stored_values import ValueKind
from evertick.operations.deployments import Name

SHORTEST_SECRET = 16
_PATH = "/deployments/{name}/push"
_REFUSED = (
    "The webhook is refused: the signature or the token is missing or wrong, or this deployment has no webhook. Start its"
    " publisher with --webhook-secret, and give the repository the same secret."
)
_Given = Annotated[str | None, Header(max_length=1000)]

router = GuardedRouter(NativeRoute)


@router.post(
    _PATH,
    Permission.OPEN,
    tags=["deployments"],
    operation_id="receive_push",
    summary="Receive the push webhook of a git repository",
    status_code=202,
    response_class=Response,
    responses=errors_of(lambda: None, method="POST", path=_PATH),
)
async def receive_push(
    name: Name,
    request: Request,
    caller: Who,
    x_hub_signature_256: _Given = None,
    x_hub_signature: _Given = None,
    x_gitea_signature: _Given = None,
    x_gitlab_token: _Given = None,
) -> Response:
    """Receive the push webhook of a git repository, and publish its newest commit now. The webhook's secret signs the request
    (`X-Hub-Signature-256`, `X-Gitea-Signature`) or is sent with it (`X-Gitlab-Token`)."""
    secret = await _secret_of(caller, name)
    given = x_hub_signature_256 or x_hub_signature or x_gitea_signature
    if given is not None:
        signed = hmac.new(secret or b"", digestmod=hashlib.sha256)
        async for chunk in request.stream():
            signed.update(chunk)
        is_valid = hmac.compare_digest(given.removeprefix("sha256=").encode(), signed.hexdigest().encode())
    else:
        is_valid = hmac.compare_digest((x_gitlab_token or "").encode(), secret or b"-")
    if secret is None or not is_valid:
        raise Unauthenticated(_REFUSED)
    async with caller.write(Channel.DEPLOY):
        pass
    return Response(status_code=202)


async def _secret_of(caller: ApiCaller, name: str) -> bytes | None:
    """None for an unknown deployment, too: the answer must not tell which ones there are."""
    async with caller.read() as conn:
        row = await deployments.find(conn, name)
    secret = (row.source or {}).get("webhook_secret") if row is not None else None
    return await stored_secret(caller, secret, deployment=name) if isinstance(secret, str) else None


async def stored_secret(caller: ApiCaller, secret: str, **where: str) -> bytes | None:
    """The stored secret of that name. None if there is none, or a short one; the log says so, and where."""
    context = caller.context
    wanted = (ValueKind.SECRET.value, secret)
    try:
        async with caller.read() as conn:

            async def connect() -> AsyncConnection:
                return conn

            value = (await context.secret_provider.values(context.secret_provider.stored(connect), [wanted]))[wanted]
    except EvertickError as error:
        context.log.error("webhook_secret_missing", **where, error=error)
        return None
    if len(value) < SHORTEST_SECRET:
        context.log.error(
            "webhook_secret_missing", **where, error=f"the secret is shorter than {SHORTEST_SECRET} characters"
        )
        return None
    return value.encode()
