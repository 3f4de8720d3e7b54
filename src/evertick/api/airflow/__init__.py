"""Airflow's REST API, version 2, as its official client calls it. The only place with Airflow's words."""
