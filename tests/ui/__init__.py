"""The web UI: by plain HTTP where that proves it, in a real browser where only that does."""
