"""Delivers one notification."""
