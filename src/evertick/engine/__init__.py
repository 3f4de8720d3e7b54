"""The verbs. One file and one transaction each."""
