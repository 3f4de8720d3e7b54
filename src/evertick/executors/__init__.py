"""How an attempt runs, as the runner sees it."""
