"""The API of agents, under /api/agent/v1: one attempt each, authenticated by its token."""
