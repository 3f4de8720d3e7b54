"""Leads shards: fires schedules and maintains runs."""
