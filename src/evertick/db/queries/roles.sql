-- The roles of services, and the objects on which they may have privileges.

-- name: list_things
-- Functions with their arguments as `alter function` needs them, tables, and views with their definition.
select 'function' as kind, n.nspname::text as schema, p.proname::text as name,
       pg_get_function_identity_arguments(p.oid) as arguments
  from pg_proc p join pg_namespace n on n.oid = p.pronamespace
 where n.nspname in ('evertick', %(functions)s) and p.prokind = 'f'
union all
select case c.relkind when 'v' then 'view' else 'table' end, n.nspname::text, c.relname::text,
       case c.relkind when 'v' then pg_get_viewdef(c.oid) else '' end
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where n.nspname in ('evertick', %(functions)s) and c.relkind in ('r', 'p', 'v') order by 1, 2, 3, 4 limit 10000

-- name: database
select quote_ident(current_database())

-- name: are_used
-- A server may have the roles for another database.
select coalesce((select has_schema_privilege(r.oid, 'evertick', 'usage') from pg_roles r where r.rolname = %(role)s),
                false)
