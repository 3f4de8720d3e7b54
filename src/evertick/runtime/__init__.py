"""What long-running processes share: the loop, connections, circuit breakers."""
