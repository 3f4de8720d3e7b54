"""The agent API, under /api/agent/v1. Each agent runs one attempt and authenticates with that attempt's token."""
