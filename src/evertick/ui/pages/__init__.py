"""One module per page: a router, what it reads, and what its buttons do."""
