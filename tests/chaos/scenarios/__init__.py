"""The scenarios N01 to N35, grouped by what they break."""
