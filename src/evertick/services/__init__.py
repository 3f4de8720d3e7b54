"""What runs for long: the loop, the scheduler, the runner, the supervisor, the embedded PostgreSQL."""

import sys

# structlog looks for rich, to colour tracebacks that we never print; loading it takes 40 ms and 3 MB in every service. So
# while structlog is loaded, rich is not to be found, unless somebody has it already.
if "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog.dev  # noqa: F401
    finally:
        del sys.modules["rich"]
