"""Statements about figures and forecasts."""
