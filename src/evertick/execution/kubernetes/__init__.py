"""Tasks as pods. Needs `pip install evertick[kubernetes]`, and is imported only by runners with this executor."""
