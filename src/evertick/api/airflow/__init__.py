"""Airflow's REST API, version 2, compatible with its official client. Airflow's API terms are used only in this package."""
