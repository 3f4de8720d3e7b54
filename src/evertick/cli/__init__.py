"""The command line: noun verb. Parses, calls, prints; decides nothing."""
