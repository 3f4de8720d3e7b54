"""The faults, by what they break. Each is one function that does it, holds it, ends it and waits for the recovery."""
