"""Figures, forecasts and check-ins."""
