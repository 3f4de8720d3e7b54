"""Not loaded: the folder is ignored."""

import airflow.models.dag  # noqa: F401

raise RuntimeError("this file is ignored")
