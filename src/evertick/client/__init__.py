"""How a command reaches Evertick: directly through the database, or through the HTTP API of a server."""
