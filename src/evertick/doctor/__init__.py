"""The checks of `evertick doctor`."""
