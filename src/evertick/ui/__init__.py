"""The web UI: pages rendered on the server with the signed-in user's permissions. Reads use the store, changes the engine verbs."""
