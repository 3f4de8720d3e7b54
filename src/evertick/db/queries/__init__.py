"""Reads: each module declares the statements of its `.sql` file."""
