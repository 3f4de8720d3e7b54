"""Runs one attempt next to its code; speaks HTTP only."""
