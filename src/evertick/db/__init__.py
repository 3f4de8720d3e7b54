"""PostgreSQL: connections, statements and migrations."""
