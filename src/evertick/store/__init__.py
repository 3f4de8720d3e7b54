"""PostgreSQL and nothing else. Holds every SQL statement; takes no decisions."""
