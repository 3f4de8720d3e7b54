"""Large values: object storage and result files."""
