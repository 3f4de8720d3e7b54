"""`evertick logout`, beside `login`, which it undoes."""

from __future__ import annotations

from evertick.cli.login import logout_app

app = logout_app
