"""Keys, secret backends, masking and agent tokens."""
