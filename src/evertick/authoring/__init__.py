"""What users import to write a DAG, and the spec it compiles to."""
