"""A DAG as it is published."""
