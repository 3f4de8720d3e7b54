"""The process of `evertick dags test` for a DAG file with dependencies of its own: runs the DAG in its environment, and
returns how it ended as JSON."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path

from evertick.domain.errors import UserError
from evertick.sdk.dag import load_dags


def main(folder: Path, file: str, dag: str, options_json: str, answer_fd: int) -> None:
    os.set_inheritable(answer_fd, False)  # processes that tasks start must not hold the answer open
    options = json.loads(options_json)
    if "fire_at" in options:
        options["fire_at"] = datetime.fromisoformat(options["fire_at"])
    try:
        ran = load_dags(folder, file)[dag].test(**options)
        answer = {"state": ran.state, "states": dict(ran.states), "reasons": dict(ran.reasons)}
    except UserError as error:
        answer = {"error": str(error)}
    with os.fdopen(answer_fd, "w", encoding="utf-8") as writer:
        json.dump(answer, writer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
