"""A runner whose attempts run elsewhere."""
