"""Rules for what arrives from outside: signatures of webhooks."""
