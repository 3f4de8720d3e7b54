"""What DAG files import, and what they compile to."""
