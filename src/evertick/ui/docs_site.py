"""The documentation site under `/docs`. `make docs` builds it into one archive, which is part of the package.

A clone has no archive until then: the pages say how to build it.
"""

from __future__ import annotations

import mimetypes
import zipfile
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path as FilePath
from typing import Annotated
from urllib.parse import quote

from fastapi import Path, Request, Response
from fastapi.responses import RedirectResponse

from evertick.api.context import Who
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound
from evertick.ui.layout import page_router

ARCHIVE = FilePath(__file__).parent / "docs.zip"
# The site's theme has inline scripts, and starts its search from a worker. Its pages contain no data of users.
_SAFETY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
    " connect-src 'self'; worker-src 'self' blob:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)

router = page_router()


@lru_cache(maxsize=64)
def read_file(name: str) -> tuple[bytes, str] | None:
    """The content and type of a file of the site, or None if there is no such file."""
    try:
        with zipfile.ZipFile(ARCHIVE) as site:
            content = site.read(name)
    except FileNotFoundError:
        raise NotFound("This installation has no documentation site. Build it with `make docs`.") from None
    except KeyError:
        return None
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return content, f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


@router.get("/docs", Permission.OPEN)
async def index(request: Request, caller: Who) -> Response:
    return RedirectResponse("/docs/", status_code=HTTPStatus.PERMANENT_REDIRECT)


@router.get("/docs/{name:path}", Permission.OPEN)
async def file(name: Annotated[str, Path(max_length=200)], request: Request, caller: Who) -> Response:
    """Serve a file of the site. The page of a directory is its `index.html`."""
    is_directory = not name or name.endswith("/")
    found = read_file(name + "index.html" if is_directory else name)
    if found is not None:
        headers = {"Content-Security-Policy": _SAFETY, "Cache-Control": "max-age=600"}
        return Response(found[0], headers=headers, media_type=found[1])
    if not is_directory and read_file(name + "/index.html") is not None:
        return RedirectResponse(f"/docs/{quote(name)}/", status_code=HTTPStatus.PERMANENT_REDIRECT)
    raise NotFound(f"The documentation has no page {name[:200]!r}. Start at /docs/.")
