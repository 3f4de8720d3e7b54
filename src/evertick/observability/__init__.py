"""Logs, metrics and health."""

import sys

# structlog imports rich to colour tracebacks, which Evertick never prints. Loading rich takes 40 ms and 3 MB in every
# service, so it is hidden while structlog loads, unless it is loaded already.
if "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog.dev  # noqa: F401
    finally:
        del sys.modules["rich"]
