-- Routing, specialised runners and fairness between priorities.

-- The rules changed and the code did not: from now on the version's tasks go where the rules say. What is in line already
-- stays there. Returns how many tasks were routed anew.
create function reroute(p_dag_id int, p_version_id int, p_tasks jsonb, p_actor text) returns int language plpgsql as $$
declare
    moved jsonb;
begin
    with changed as (
        update task_spec s set queue = x.queue
        from jsonb_to_recordset(p_tasks) as x(idx int, queue text), task_spec o
        where s.version_id = p_version_id and s.idx = x.idx and s.queue <> x.queue
          and o.version_id = s.version_id and o.idx = s.idx
        returning s.name, o.queue as old, s.queue as new
    )
    select jsonb_object_agg(c.name, jsonb_build_array(c.old, c.new)) into moved from changed c;
    if moved is null then
        return 0;
    end if;
    insert into journal (occurred_at, verb, actor, dag_id, detail)
    values (clock(), 'route', p_actor, p_dag_id, jsonb_build_object('version_id', p_version_id, 'tasks', moved));
    return (select count(*) from jsonb_object_keys(moved));
end $$;
