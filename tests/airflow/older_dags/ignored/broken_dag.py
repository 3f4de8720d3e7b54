from airflow import DAG

raise RuntimeError("this file is ignored")
