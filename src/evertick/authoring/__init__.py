"""The API that users import to write a DAG, and its compilation to a spec."""
