"""Signing in with OpenID Connect: what a provider says is verified here, and nothing of it is believed before."""
