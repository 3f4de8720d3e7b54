"""When a DAG runs."""
