"""Attempts in containers of Docker or Podman."""
