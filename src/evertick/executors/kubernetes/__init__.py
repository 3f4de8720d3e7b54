"""Attempts as pods."""
