-- Which sets of functions the database has (docs/decisions/0036-function-sets.md).

-- name: is_installed
-- A partial restore may have the row without the schema.
select to_regnamespace(%(schema)s) is not null
       and exists (select 1 from evertick.function_set f where f.hash = %(hash)s)

-- name: record
-- In the transaction that creates the schema.
insert into evertick.function_set (hash, release) values (%(hash)s, %(release)s)

-- name: superseded
-- The two newest stay, because behind a pooler no lock tells who uses them.
select f.hash
  from (select x.hash, row_number() over (order by x.created_at desc, x.hash) as place from evertick.function_set x) f
 where f.place > 2 and f.hash <> %(hash)s order by f.place limit 100

-- name: forget
delete from evertick.function_set where hash = %(hash)s
