"""A file that cannot be loaded, with a dag of airflow."""

raise RuntimeError("the probe's broken file")
