"""One module per page: its router, the data it reads and the actions of its buttons."""
