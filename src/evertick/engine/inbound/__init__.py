"""What comes in from outside: requests for runs, events, and what watchers find."""
