"""The path of a log line: capture, spool, shipper, database, archive, reader."""
