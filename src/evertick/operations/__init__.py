"""Use cases: one typed function for each, shared by the HTTP API, the pages and the command line."""
