"""Claims tasks and drives an executor: one process, one session after the other."""
