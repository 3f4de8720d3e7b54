"""What runs for long: the loop, the scheduler, the runner, the supervisor, the embedded PostgreSQL."""
