"""The Model Context Protocol: a small set of tools over the operations. Reads only, unless more is allowed."""
