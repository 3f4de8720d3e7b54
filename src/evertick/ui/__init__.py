"""The web UI: pages made on the server, with the rights of whoever looks. Reads the store, changes through the engine's verbs."""
