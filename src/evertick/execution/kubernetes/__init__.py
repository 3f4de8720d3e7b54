"""Tasks as pods. Needs `pip install evertick[kubernetes]`, and is loaded only by runners that have this executor."""
