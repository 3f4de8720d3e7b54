"""The invariants J1 to J16, a few to a module. Each check is a function of a case and the finding that it fills."""
