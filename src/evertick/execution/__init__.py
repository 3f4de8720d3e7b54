"""Running user code: the fork server, its child processes, logs and results."""
