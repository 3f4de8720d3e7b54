"""Writes `schema.sql`, the schema that the migrations create, for reading. `--check` only compares.

python tools/schema.py [--check]
"""

from __future__ import annotations

import asyncio
import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from evertick.services.postgres import EmbeddedPostgres
from evertick.services.postgres_cluster import environment, programs
from evertick.store.db import Purpose, connect
from evertick.store.migrate import migrate

SCHEMA = Path(__file__).parents[1] / "src" / "evertick" / "store" / "schema.sql"
HEADER = (
    "-- The schema that the migrations make. Written by `python tools/schema.py`: change a migration, not this file.\n"
)

# Output that depends on the version and settings of pg_dump. Settings are named one by one, because a line of a
# function's body may start with SET, too.
_SETTINGS = (
    "statement_timeout|lock_timeout|idle_in_transaction_session_timeout|transaction_timeout|client_encoding"
    "|standard_conforming_strings|check_function_bodies|xmloption|client_min_messages|row_security"
    "|default_tablespace|default_table_access_method"
)
_NOISE = re.compile(
    rf"^(--.*|\\(un)?restrict .*|SET ({_SETTINGS}) = .*;|SELECT pg_catalog\.set_config\('search_path'.*)\n",
    re.MULTILINE,
)


def dump(url: str) -> str:
    """The schema of the database at `url`, as text that is the same on every machine."""
    command: list[str | Path] = [
        programs() / "pg_dump",
        "--schema-only",
        "--no-owner",
        "--no-privileges",
        "--schema=evertick",
    ]
    done = subprocess.run([*command, f"--dbname={url}"], env=environment(), check=True, capture_output=True, text=True)
    return HEADER + "\n" + re.sub(r"\n{3,}", "\n\n", _NOISE.sub("", done.stdout)).strip() + "\n"


def difference(actual: str) -> str:
    """How `schema.sql` differs from the schema that the migrations make; empty if it does not."""
    written = SCHEMA.read_text(encoding="utf-8") if SCHEMA.exists() else ""
    lines = difflib.unified_diff(
        written.splitlines(), actual.splitlines(), "schema.sql", "migrations", lineterm="", n=1
    )
    return "\n".join(lines)


async def dump_migrations() -> str:
    """The schema of a freshly migrated database."""
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedPostgres(Path(directory) / "home", settings={"fsync": "off"})
        url = await server.start()
        try:
            async with await connect(url, purpose=Purpose.PLANNING) as conn:
                await migrate(conn)
            return await asyncio.to_thread(dump, url)
        finally:
            await server.stop()


def main(arguments: list[str]) -> int:
    actual = asyncio.run(dump_migrations())
    if "--check" not in arguments:
        SCHEMA.write_text(actual, encoding="utf-8")
        return 0
    if found := difference(actual):
        print(f"{found}\nschema.sql differs from the migrations. Run `python tools/schema.py`.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
