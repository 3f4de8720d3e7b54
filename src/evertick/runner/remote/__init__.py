"""The session of a runner whose attempts run elsewhere: it submits them, watches them, and records how they end."""
