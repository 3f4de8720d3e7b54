"""Quantiles, the busiest names, and events of lineage."""
