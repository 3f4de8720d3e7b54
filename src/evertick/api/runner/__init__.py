"""The runner API, under /api/runner/v1: what a runner over HTTPS needs instead of a database connection."""
