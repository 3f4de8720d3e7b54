"""Pure decisions and records. Never touches a clock, a socket, a file or the database."""
