"""The code of a DAG file: pack, cache and import."""
