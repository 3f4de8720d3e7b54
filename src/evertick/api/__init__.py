"""The HTTP APIs: authentication, permissions, native routes and Airflow's. This package and the CLI do not import each other."""
