"""The verbs: every change to the database's state, one file and one transaction each."""
