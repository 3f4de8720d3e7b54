"""Publishes DAG files."""
