"""HTTP: who asks, what they may, the native routes, and those of Airflow. Beside the command line: neither imports the other."""
