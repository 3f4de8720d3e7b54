"""Use cases that HTTP, the UI and the command line share."""
