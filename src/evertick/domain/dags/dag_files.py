"""Which Python files define DAGs, and whether they are written for Evertick or for Airflow. Their text decides, so that a
publisher and a runner agree without a note in between."""

from __future__ import annotations

import re

_IMPORTS_EVERTICK = re.compile(rb"^[ \t]*(?:from|import)[ \t]+evertick\b", re.MULTILINE)
_IMPORTS_AIRFLOW = re.compile(rb"^[ \t]*(?:from|import)[ \t]+airflow\b", re.MULTILINE)


def is_dag_file(text: bytes) -> bool:
    """It mentions both words, in any case, as `from evertick import DAG` does. A broken file counts, so that its error is
    shown."""
    lower = text.lower()
    return b"dag" in lower and b"evertick" in lower and not is_airflow_file(text)


def is_airflow_file(text: bytes) -> bool:
    """As Airflow chooses its files: by the words `dag` and `airflow`, in any case. A file that imports Evertick is
    Evertick's."""
    lower = text.lower()
    if b"dag" not in lower or b"airflow" not in lower or _IMPORTS_EVERTICK.search(text):
        return False
    return b"evertick" not in lower or bool(_IMPORTS_AIRFLOW.search(text))
