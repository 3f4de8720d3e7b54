"""Everything that talks to PostgreSQL: connections, migrations and all SQL statements. Makes no decisions."""
