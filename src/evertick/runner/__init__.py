"""Claims tasks and drives an executor."""
