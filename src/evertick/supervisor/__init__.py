"""`evertick up`: starts and restarts every service, and the embedded PostgreSQL."""
