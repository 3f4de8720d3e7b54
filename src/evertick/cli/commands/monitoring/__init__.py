"""Commands that show figures, forecasts and check-ins."""
