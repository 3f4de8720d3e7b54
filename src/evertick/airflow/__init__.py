"""Runs DAG files of Apache Airflow. These modules import `airflow` and run only in an interpreter that has it: never in
Evertick's own processes. They import nothing of Evertick that needs a third-party package."""
