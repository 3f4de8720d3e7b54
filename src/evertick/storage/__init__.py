"""Object storage for large results."""
