"""Work from outside: requests for runs, and events."""
