"""Tests of the HTTP API, on a real database and the whole application, without a socket where none is needed."""
