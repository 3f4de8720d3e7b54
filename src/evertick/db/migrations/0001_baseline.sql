-- The tables of Evertick: what every release shares. Functions and views are in ../functions; a set of them belongs to
-- one release. Why the tables are laid out like this: docs/decisions/0001-table-layout.md.
--
-- `task` holds the state of every task in one row, found by its key alone, so that claims and ends are HOT updates.
-- `ready_task`, `lease` and `task_timer` are small companions with the order, the owner and the due time: a task has a
-- row in the first while it is available, in the second while it runs, in the third while it waits for a time.
--
-- There are no triggers, and foreign keys only between tables that change rarely: on a hot table each insert would
-- probe and lock the parent, and a bounded deletion would become a cascade (tests/test_sql.py lists both sets).

-- Types ---------------------------------------------------------------------------------------------------------------

create type task_state as enum (
    'waiting', 'pending', 'available', 'queued', 'running', 'deferred',
    'success', 'failed', 'skipped', 'canceled', 'upstream_failed');
create type run_state as enum ('queued', 'running', 'success', 'failed', 'canceled');
create type run_kind as enum ('scheduled', 'manual', 'backfill');
create type trigger_rule as enum (
    'all_success', 'all_failed', 'all_done', 'all_done_min_one_success', 'all_done_setup_success', 'one_success',
    'one_failed', 'one_done', 'none_failed', 'none_skipped', 'none_failed_min_one_success', 'all_skipped', 'always');
create type rule_decision as enum ('wait', 'run', 'skip', 'upstream_failed');
create type stop_request as enum ('cancel', 'clear', 'mark_success', 'mark_failed', 'mark_skipped');
-- A task holds slots of most gates from its admission until it ends. The last three are only checked at admission
-- (`checks`): a task passes if its need is no larger than the room there (free_slots).
create type gate_kind as enum ('pool', 'mutex', 'key', 'group', 'task', 'dag', 'order', 'rate', 'past');
create type map_mode as enum ('product', 'zip', 'kwargs');
create type edge_scope as enum ('same_index', 'each_index', 'list');
-- What a task waits for: a DAG to start, its run, an instant, a time of day, an event, a decision, the next poll.
create type wait_kind as enum ('start', 'run', 'time', 'clock', 'event', 'approval', 'poll', 'trigger');

-- Functions that tables need ------------------------------------------------------------------------------------------

-- The database's clock decides. Only tests set evertick.now. Stable, so that it can be compared with an index.
create function clock() returns timestamptz language sql stable as $$
    select coalesce(nullif(current_setting('evertick.now', true), '')::timestamptz, clock_timestamp())
$$;

-- The display id of a run: its key, or a text that ends with its number. Made of immutable parts, so that PostgreSQL
-- inlines it: an index on it costs a new run 2.3 us this way, and 6 us with to_char.
create function run_display_id(p_key text, p_kind run_kind, p_at timestamptz, p_run_id bigint)
returns text language sql immutable as $$
    select coalesce(p_key,
        case p_kind when 'manual' then 'manual__' when 'scheduled' then 'scheduled__' else 'backfill__' end
        || overlay(overlay(overlay(overlay(overlay(
               lpad((date_part('year', p_at at time zone 'UTC') * 1e10
                     + date_part('month', p_at at time zone 'UTC') * 1e8
                     + date_part('day', p_at at time zone 'UTC') * 1e6
                         + date_part('hour', p_at at time zone 'UTC') * 1e4
                     + date_part('minute', p_at at time zone 'UTC') * 1e2
                         + floor(date_part('second', p_at at time zone 'UTC')))::bigint::text, 14, '0')
               placing ':' from 13 for 0) placing ':' from 11 for 0) placing 'T' from 9 for 0) placing '-' from 7 for 0)
                   placing '-' from 5 for 0)
        || '+00:00__' || p_run_id::text)
$$;

-- DAGs as published ---------------------------------------------------------------------------------------------------

create table bundle (
    hash         text primary key,
    file         text not null,
    archive      bytea not null,
    uses_threads text,
    created_at   timestamptz not null
);

create table dag (
    dag_id            int generated always as identity primary key,
    name              text not null unique,
    shard             smallint not null default 0,
    is_paused         boolean not null default false,
    version_id        int,
    max_active_runs   int check (max_active_runs > 0),
    has_run_timeout   boolean not null default false,  -- whether some version of it limits how long a run may take
    has_dependents    boolean not null default false,     -- whether some schedule waits for its runs
    serializes_runs   boolean not null default false,  -- whether runs of some schedule start one after the other
    depends_on_past   boolean not null default false,     -- whether some task of it waits for the run before
    has_notifications boolean not null default false,          -- whether its runs cause notifications
    has_run_retries   boolean not null default false,  -- whether failed runs of some version begin again as a whole
    deployment        text not null default 'default',  -- the owner: no other deployment can publish a DAG of this name
    file              text not null,
    deleted_at        timestamptz
);
create index dag_timed on dag (dag_id) where has_run_timeout;

create table dag_version (
    version_id   int generated always as identity primary key,
    dag_id       int not null references dag on delete restrict,
    number       int not null,
    hash text not null, bundle_hash text not null,
    spec         jsonb not null,
    task_count   int not null,
    run_timeout  double precision check (run_timeout > 0),
    run_retries  int not null default 0 check (run_retries >= 0),
    created_at   timestamptz not null,
    -- When another version replaced it, and the newest run then: none of its runs is newer. Null while current.
    retired_at timestamptz, final_run_id bigint,
    unique (dag_id, number),
    unique (dag_id, hash, bundle_hash)
);

create table task_spec (
    version_id int not null, idx int not null,
    name           text not null,
    queue          text not null,
    priority       smallint not null check (priority between 0 and 9),
    trigger_rule   trigger_rule not null,
    upstream_total int not null, setup_total int not null,
    is_setup boolean not null, is_leaf boolean not null, is_root boolean not null,
    max_attempts   int not null check (max_attempts > 0),
    rerun_on_loss  boolean not null,
    queue_timeout  double precision check (queue_timeout > 0),
    outlets        text[],   -- the assets that it updates; null for none
    is_gated       boolean not null default false,   -- it has rows in task_gate
    has_order_key  boolean not null default false,      -- of them, one of an ordered key
    awaits_past    boolean not null default false,   -- of them, the one of the run before; or another version has it
    is_wait        boolean not null default false,   -- it waits without a slot, see deferral
    is_mapped      boolean not null default false,   -- it is replaced by its instances when it may start
    notifies       boolean not null default false,   -- it has rows in notification_rule
    group_id       int,                                   -- the group with retries that it belongs to
    decides_group  boolean not null default false,     -- its failure is that of the group
    map_head       int,   -- the first task of the mapped group that it belongs to, whose row expands the whole group
    lists_total    int,   -- of those: for how many tasks the row of the whole waits; never satisfied but at the head
    feeds_instances boolean not null default false,   -- a task of a mapped group waits for it with each instance
    primary key (version_id, idx)
);

-- Groups of tasks that run again as a whole when they fail.
create table retry_group (
    version_id int not null, group_id int not null,
    name text not null, retries int not null check (retries > 0), members int[] not null,
    primary key (version_id, group_id)
);

create table edge (
    version_id int not null, src int not null, dst int not null,
    leaves_group int,   -- the group with retries that it leads out of: src counts when all of the group has ended
    -- Into a mapped group: from a task of it, by index; from outside, to each instance; from a task that returns a list
    -- to the head, which reads it. Null for other tasks.
    scope edge_scope,
    primary key (version_id, src, dst) include (leaves_group, scope)
);
create index edge_upstream on edge (version_id, dst, src) include (leaves_group, scope);

-- The upstream results that a task takes as arguments, under the names of the upstream tasks. Its own name stands for
-- the facts about its run.
create table task_input (
    version_id int not null, idx int not null, src int not null,
    primary key (version_id, idx, src)
);

-- What a task needs. The name is the same for all runs, or made of parts: texts, and paths into the run's parameters.
create table task_gate (
    version_id int not null, idx int not null, place int not null,
    kind       gate_kind not null,
    name       text,
    parts      jsonb,
    weight     int not null check (weight > 0),
    capacity   int check (capacity > 0),
    version    jsonb,   -- of an ordered key: a number, or a path into the run's parameters
    period     double precision check (period > 0),   -- of a rate
    primary key (version_id, idx, place),
    check ((name is null) <> (parts is null)),
    check ((kind = 'order') = (version is not null)),
    check ((kind = 'rate') = (period is not null))
);
create index task_gate_pool on task_gate (name) where kind = 'pool';

create table task_mapping (
    version_id int not null, idx int not null,
    how        map_mode not null,
    most       int not null check (most > 0),
    primary key (version_id, idx)
);

-- The lists of a mapped task, in the order of its arguments: what a task returned (src), one in the code (length), or
-- one that its code makes of results of tasks (size), of which only the length follows from theirs.
create table mapping_input (
    version_id int not null, idx int not null, place int not null,
    src        int,
    length     int,
    size       jsonb,
    primary key (version_id, idx, place),
    check (num_nonnulls(src, length, size) = 1)
);

create table trigger_dag_task (
    version_id int not null, idx int not null,
    dag        text not null,
    params     jsonb not null,
    given      jsonb,   -- params that are results of tasks, or parameters of its own run; null for none
    waits      boolean not null,
    timeout    double precision check (timeout > 0),
    primary key (version_id, idx)
);

-- What a task of a version waits for. Names are made of parts, as those of gates.
create table wait_spec (
    version_id int not null, idx int not null,
    kind       wait_kind not null check (kind not in ('start', 'run', 'trigger')),
    until      timestamptz,                              -- of a time: the instant,
    seconds    double precision check (seconds >= 0),    -- or how long; of a poll: how long between two
    at         text,                                     -- of a clock: the time of day there
    timezone   text,
    parts      jsonb,                                    -- of an event its name, of an approval its title
    lookback   double precision not null default 0,      -- of an event: how long before its run it may have been sent
    timeout    double precision check (timeout > 0),
    on_timeout task_state not null default 'failed' check (on_timeout in ('failed', 'skipped')),
    on_reject  task_state not null default 'failed' check (on_reject in ('failed', 'skipped')),
    backoff    double precision not null default 1 check (backoff >= 1),
    longest    double precision,                         -- of a poll that backs off: the longest wait between two
    primary key (version_id, idx)
);

-- The notifications that the version asks for: of a task, or of the run as a whole (idx -1).
create table notification_rule (
    version_id int not null, idx int not null,
    event      text not null check (event in ('success', 'failure', 'retry', 'skipped', 'deadline')),
    sink       text not null,   -- refers to secrets by their names
    every_time boolean not null,
    primary key (version_id, idx, event, sink)
);

-- The notifications for the runs of all DAGs: the settings of the leader.
create table default_notification_rule (
    event      text not null check (event in ('failure', 'deadline')),
    sink       text not null,
    every_time boolean not null,
    primary key (event, sink)
);

create table import_error (
    deployment  text not null default 'default',
    file        text not null,
    line int, message text not null, detail text not null default '',
    occurred_at timestamptz not null,
    primary key (deployment, file)
);

-- The origin of DAGs: a folder that a publisher watches, uploads, or a git repository. It owns the DAGs that it has.
create table deployment (
    name             text primary key,
    kind             text not null check (kind in ('folder', 'upload', 'git')),
    version          int not null default 0,  -- the number of the current version; a folder has none
    source           jsonb,                   -- of git: url, ref, path, and the name of the webhook's secret
    published_commit text,                    -- of git: the last commit that was published, before any rollback
    problem          text,                    -- why the newest commit is not published
    created_at       timestamptz not null,
    deleted_at       timestamptz              -- the row stays, so that the number of a version never returns
);

-- A version is complete: the versions of all DAGs that the deployment has.
create table deployment_version (
    deployment text not null, number int not null,
    content_hash text,
    commit_hash text, author text, message text,
    restores     int,  -- the version that a rollback published again
    deployed_by  text not null,
    deployed_at  timestamptz not null,
    primary key (deployment, number)
);

create table deployment_dag (
    deployment text not null, number int not null, version_id int not null,
    primary key (deployment, number, version_id)
);
create index deployment_dag_of on deployment_dag (version_id);

-- An archive that is being uploaded, in pieces, so that a client can continue. Kept for a day.
create table upload_piece (
    hash text not null, owner text not null, start int not null,
    content     bytea not null,
    received_at timestamptz not null,
    primary key (hash, owner, start)
);

-- Schedules -----------------------------------------------------------------------------------------------------------

create table schedule (
    schedule_id    int generated always as identity primary key,
    dag_id         int not null references dag on delete restrict,
    name           text not null,
    version        int not null check (version > 0),
    spec           jsonb not null,
    params         jsonb not null,
    misfire        text not null,
    window_seconds double precision not null, catchup_limit int check (catchup_limit > 0),
    overlap        text not null default 'allow'
        check (overlap in ('allow', 'skip', 'queue_one', 'queue_all', 'cancel')),
    start_within   double precision check (start_within > 0),  -- deadlines of its runs, from when they are due
    finish_within  double precision check (finish_within > 0),
    delay_seconds  double precision not null default 0,  -- its jitter: how much later than its instants it is due
    origin         text not null default 'code' check (origin in ('code', 'user')),
    request        text,
    changed_by text not null, changed_at timestamptz not null,
    deleted_at     timestamptz,
    unique (dag_id, name)
);
create index schedule_of_events on schedule (schedule_id) where spec->>'kind' = 'event' and deleted_at is null;

create table schedule_state (
    schedule_id        int primary key references schedule on delete restrict,
    shard              smallint not null,
    version            int not null,
    next_due           timestamptz,
    last_fired         timestamptz,
    is_paused          boolean not null default false,  -- its own pause or the DAG's
    is_paused_directly boolean not null default false,       -- its own
    error              text
) with (fillfactor = 70);
-- The due scan reads exactly the rows that are due: paused, finished and quarantined schedules are not in the index.
create index schedule_due on schedule_state (shard, next_due)
    where next_due is not null and not is_paused and error is null;

-- Every version that a schedule had, with its author and the reason. Grows with changes, not with fires.
create table schedule_version (
    schedule_id int not null references schedule on delete restrict, version int not null,
    change             text not null check (change in ('publish', 'put', 'pause', 'unpause', 'delete')),
    changed_by text not null, changed_at timestamptz not null,
    origin             text not null,
    is_paused_directly boolean not null,
    settings           jsonb not null,  -- spec, params and rules
    primary key (schedule_id, version)
);

create table skip_record (
    schedule_id int not null,
    first_at timestamptz not null, last_at timestamptz not null, count bigint not null check (count > 0),
    reason      text not null,
    recorded_at timestamptz not null,
    primary key (schedule_id, first_at)
);

-- Dependencies: what schedules wait for, undelivered events, events since the last run, and the causes of fires.
create table schedule_dependency (
    kind text not null check (kind in ('dag', 'end', 'asset', 'alias')), name text not null,
    schedule_id int not null,
    updates     text not null default 'all' check (updates in ('all', 'unkeyed', 'keyed')),   -- which of an asset
    primary key (kind, name, schedule_id)
);
create index schedule_dependency_of on schedule_dependency (schedule_id);

-- What DAG files say about assets besides their names. An asset without a row has its name as its URI.
create table asset (
    name        text primary key,
    uri         text not null,
    asset_group text not null,
    extra       jsonb not null,
    partitions  jsonb,   -- which it has, if its DAG file says so
    changed_at  timestamptz not null
);
create index asset_uri on asset (uri);

-- Which assets were updated through an alias. A schedule that waits for the alias waits for all of them.
create table asset_alias (
    alias text not null, asset text not null,
    primary key (alias, asset)
);

-- Updates of assets, by tasks and from outside. One of an attempt that has not succeeded yet has no time.
create table asset_update (
    update_id   bigint generated always as identity primary key,
    asset       text not null,
    extra       jsonb not null,
    updated_by text not null, occurred_at timestamptz,
    run_id bigint, idx int, map_index int, epoch int,   -- the attempt that made it; null: from outside
    alias       text,                                   -- through which the task made it
    partition_key text,                                 -- the partition that it is of; null: of the whole
    check ((run_id is not null and num_nonnulls(idx, map_index, epoch) = 3)
           or (run_id is null and num_nonnulls(idx, map_index, epoch, alias) = 0 and occurred_at is not null))
);
create index asset_update_of_asset on asset_update (asset, occurred_at);
create index asset_update_of_alias on asset_update (alias, occurred_at) where alias is not null;
create index asset_update_of_partition on asset_update (asset, partition_key, occurred_at)
    where partition_key is not null;
create index asset_update_of_task on asset_update (run_id, idx, map_index) where run_id is not null;

-- Each of a run that ended or has updated it, or of an asset_update.
create table dependency_event (
    event_id  bigint generated always as identity primary key,
    kind text not null, name text not null,
    run_id      bigint,
    occurred_at timestamptz not null,
    update_id   bigint,
    partition_key text,   -- of an update of a partition, which also has its task's run
    check (num_nonnulls(run_id, update_id) = 1 or (partition_key is not null and update_id is not null))
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

create table dependency_state (
    schedule_id int not null,
    kind text not null, name text not null,
    run_id      bigint,
    occurred_at timestamptz not null,
    update_id   bigint,
    check (num_nonnulls(run_id, update_id) = 1),
    primary key (schedule_id, kind, name)
);

create table run_trigger (
    schedule_id int not null,
    fire_at     timestamptz not null,
    kind text not null, name text not null,
    run_id      bigint,
    occurred_at timestamptz not null,
    update_id   bigint,
    check (num_nonnulls(run_id, update_id) = 1),
    primary key (schedule_id, fire_at, kind, name)
);

-- Partitions: updates that schedules have still to map to partitions of theirs, those that count for a partition, which
-- has a fire once it is complete, and the complete ones whose fires are due.
create table partition_arrival (
    arrival_id  bigint generated always as identity primary key,
    schedule_id int not null, update_id bigint not null,
    asset text not null, key text not null,
    occurred_at timestamptz not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

create table partition_update (
    schedule_id int not null, key text not null, update_id bigint not null,
    asset text not null, source_key text not null,
    source_date timestamptz,   -- what the run that made it was for
    occurred_at timestamptz not null,
    fire_at     timestamptz,   -- of the run that it has started; null while its partition waits for others
    primary key (schedule_id, key, update_id)
);
create index partition_update_pending on partition_update (schedule_id, key) where fire_at is null;
create index partition_update_fired on partition_update (schedule_id, fire_at) where fire_at is not null;

create table partition_ready (
    schedule_id int not null, fire_at timestamptz not null,
    key         text not null,
    date        timestamptz,
    primary key (schedule_id, fire_at)
);

-- The partition that a run is for, and the instant that the key stands for.
create table run_partition (
    run_id bigint primary key, dag_id int not null,
    key    text not null,
    date   timestamptz
);
create index run_partition_of_dag on run_partition (dag_id, key, run_id);
create index run_partition_dated on run_partition (dag_id, date) where date is not null;

create table backfill (
    backfill_id  int generated always as identity primary key,
    shard        smallint not null,
    dag_id       int not null references dag on delete restrict,
    schedule_id  int,                  -- null: of an expression of its own
    spec         jsonb not null,       -- as it was when the backfill was made
    params       jsonb not null,
    first_at     timestamptz not null, -- both ends belong to it
    last_at      timestamptz not null,
    reprocess    text not null check (reprocess in ('none', 'failed', 'all')),
    newest_first boolean not null,
    parallel     int not null check (parallel between 1 and 1000),
    request      text not null unique, -- the same request twice is one backfill
    state        text not null check (state in ('running', 'paused', 'done', 'canceled', 'failed')),
    reason       text,
    position     timestamptz,          -- the last instant that was dealt with
    is_planned   boolean not null default false,   -- no instant is left
    total        bigint not null check (total > 0),
    skipped bigint not null default 0, created bigint not null default 0,
    open_runs    int not null default 0 check (open_runs >= 0),
    succeeded bigint not null default 0, failed bigint not null default 0, canceled bigint not null default 0,
    created_by text not null, created_at timestamptz not null,
    finished_at  timestamptz,
    check (first_at <= last_at),
    check ((finished_at is not null) = (state in ('done', 'canceled', 'failed')))
);
create index backfill_live on backfill (shard, backfill_id) where state = 'running' or open_runs > 0;

-- Which run is for which instant of which backfill. Open: not counted yet.
create table backfill_run (
    run_id bigint primary key, backfill_id int not null,
    dag_id      int not null,
    schedule_id int not null,          -- 0: of no schedule
    fire_at     timestamptz not null,
    is_open     boolean not null default true
);
create index backfill_run_open on backfill_run (backfill_id, run_id) where is_open;
create index backfill_run_instant on backfill_run (dag_id, schedule_id, fire_at, run_id);

-- Runs and tasks ------------------------------------------------------------------------------------------------------

-- The fact: inserted once, never updated.
create table run (
    run_id       bigint generated always as identity primary key,
    dag_id int not null, version_id int not null,
    kind         run_kind not null,
    key          text,
    schedule_id  int,
    fire_at      timestamptz,
    params       jsonb not null,
    triggered_by text not null,
    created_at   timestamptz not null
) with (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_freeze_min_age = 0, vacuum_truncate = off);
create index run_of_dag on run (dag_id, run_id);
create unique index run_fire on run (schedule_id, fire_at) where schedule_id is not null;
create unique index run_key on run (dag_id, key) where key is not null;
-- Runs with an explicit instant. There are hardly any, so the index is almost empty and costs the other runs nothing.
create unique index run_instant on run (dag_id, fire_at) where kind = 'manual' and fire_at is not null;
-- Clients of other schedulers order by this text: of a DAG with a million runs that took 1.8 s to sort.
create index run_of_display_id on run (dag_id, (run_display_id(key, kind, coalesce(fire_at, created_at), run_id)));
-- Runs in the order of time (docs/decisions/0031-lists-in-order.md, with the costs). Scheduled ones are in run_fire
-- already, so that they are in none of the first two; all are in the third from their end on.
create index run_filled on run (dag_id, fire_at) where kind = 'backfill';
create index run_made on run (dag_id, created_at) where kind = 'manual';

-- Where it stands. Every verb that moves a run's tasks, but claim, locks this row first.
create table run_status (
    run_id           bigint primary key,
    dag_id int not null, version_id int not null,
    state            run_state not null,
    open_tasks       int not null check (open_tasks >= 0),
    failed_leaves    int not null default 0 check (failed_leaves >= 0),
    extra_tasks      int not null default 0,   -- how many more than its version names, by mapping
    cancel_requested boolean not null default false,
    retried          smallint not null default 0,   -- how often it has begun again as a whole
    started_at timestamptz, finished_at timestamptz,
    reason           text,
    check (state not in ('success', 'failed', 'canceled') or (open_tasks = 0 and finished_at is not null)),
    check (state <> 'running' or open_tasks > 0)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_freeze_min_age = 0, vacuum_truncate = off);
-- The state in the index keeps changes of state from being HOT, which costs less than a companion table (95 bytes of
-- WAL per run). Statistics usually know of no open run, so a scan of all looks cheaper than a lookup by id: a query for
-- a batch of run ids excludes the closed states instead of naming the open ones, and the planner ignores this index.
create index run_active on run_status (dag_id, state, run_id) where state in ('queued', 'running');
-- Runs that did not succeed, which people search among a million that did. Only they are in it.
create index run_unwell on run_status (dag_id, run_id) where state in ('failed', 'canceled');
create index run_ended on run_status (dag_id, finished_at) where finished_at is not null;

-- A task without a row is waiting. The n_* counters are of ended upstream tasks, kept while it waits.
create table task (
    run_id            bigint not null,
    idx               int not null,
    map_index         int not null default -1,
    version_id        int not null,
    state             task_state not null,
    epoch             int not null default 0,
    attempt           smallint not null default 0 check (attempt >= 0),
    lost_attempts     smallint not null default 0,
    session           bigint,
    request           stop_request,
    not_before        timestamptz,
    admitted_at       timestamptz,   -- by its gates; null without gates. This and the next two are for display only
    queued_at         timestamptz,   -- when a runner took it for an executor elsewhere; its agent starts it
    started_at        timestamptz,
    startup_seconds   real,   -- how long after that its body began, if longer than a moment; known at its end
    cpu_seconds       real,   -- what the attempt and its processes used, if it had a process of its own
    peak_memory_bytes bigint,
    finished_at       timestamptz,
    n_success int, n_failed int, n_upstream_failed int, n_skipped int, n_setup_success int, n_setup_skipped int,
    n_extra           int,   -- how many upstream tasks there are in addition to those of the version, by mapping
    exit_code         int,
    reason            text,
    map_name          text,   -- what an instance is called, in addition to its number
    primary key (run_id, idx, map_index),
    check (state <> 'running' or (session is not null and epoch > 0 and started_at is not null)),
    check (state <> 'queued' or (session is not null and epoch > 0 and started_at is null)),
    check (request is null or state in ('queued', 'running')),
    check (not_before is null or state = 'pending'),
    check (finished_at is not null or state not in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed'))
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.05,
        autovacuum_freeze_min_age = 0, vacuum_truncate = off);

-- How far a run's groups with retries are; none of a group means that nothing of it has ended.
create table run_group (
    run_id  bigint not null,
    group_id     int not null,
    ended   int not null default 0,        -- how many of its tasks have ended
    more    int not null default 0,        -- how many more there are than the version names, by mapping
    retried smallint not null default 0,   -- how often it has begun again
    primary key (run_id, group_id)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_freeze_min_age = 0, vacuum_truncate = off);

-- Available tasks in the order in which they are claimed.
create table ready_task (
    queue text not null, rank smallint not null,
    seq         bigint generated always as identity,
    run_id bigint not null, idx int not null, map_index int not null,
    expires_at  timestamptz,  -- of a task with a queue_timeout
    enqueued_at timestamptz not null default clock(),   -- since when it is queued
    primary key (queue, rank, seq)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000, vacuum_truncate = off);
create index ready_task_expiry on ready_task (expires_at) where expires_at is not null;

-- Running tasks by the session that owns them.
create table lease (
    session   bigint not null,
    run_id bigint not null, idx int not null, map_index int not null, epoch int not null,
    primary key (session, run_id, idx, map_index)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000, vacuum_truncate = off);

-- Pending tasks that time alone makes available.
create table task_timer (
    shard smallint not null, due_at timestamptz not null,
    run_id bigint not null, idx int not null, map_index int not null,
    primary key (shard, due_at, run_id, idx, map_index)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

-- Attempts that were superseded by a retry, a loss or a clear. The latest one is in the task's own row.
create table attempt (
    run_id bigint not null, idx int not null, map_index int not null, epoch int not null,
    attempt         smallint not null,
    session         bigint,
    outcome         text not null,
    reason text, exit_code int,
    admitted_at timestamptz, queued_at timestamptz, started_at timestamptz, startup_seconds real,
    cpu_seconds real, peak_memory_bytes bigint,
    finished_at     timestamptz not null,
    retry_at        timestamptz,  -- from when the next one might begin; null where a person had to ask for it
    primary key (run_id, idx, map_index, epoch)
) with (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_freeze_min_age = 0, vacuum_truncate = off);

create table result (
    run_id bigint not null, idx int not null, map_index int not null, epoch int not null,
    value     jsonb not null,
    primary key (run_id, idx, map_index)
) with (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_freeze_min_age = 0, vacuum_truncate = off,
        toast.autovacuum_vacuum_insert_scale_factor = 0.05, toast.autovacuum_freeze_min_age = 0);

-- The results of finished steps: a retry of the task takes them instead of running the steps again.
create table step_result (
    run_id bigint not null, idx int not null, map_index int not null,
    name        text not null,
    epoch       int not null,
    value       jsonb not null,
    finished_at timestamptz not null,
    primary key (run_id, idx, map_index, name)
) with (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_freeze_min_age = 0, vacuum_truncate = off,
        toast.autovacuum_vacuum_insert_scale_factor = 0.05, toast.autovacuum_freeze_min_age = 0);

create table log_chunk (
    run_id bigint not null, idx int not null, map_index int not null, epoch int not null,
    seq           bigint not null,  -- where the chunk starts in the attempt's spool file, and where it ends
    end_offset    bigint not null,
    is_late       boolean not null default false,
    content       text,
    -- Where the lines are that are not here any more: a part of an object in the storage, and what it must be.
    object_id uuid, object_offset int, bytes int, digest bytea,
    primary key (run_id, idx, map_index, epoch, seq),
    check ((content is null) = (object_id is not null and object_offset is not null and bytes is not null
        and digest is not null))
) with (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_freeze_min_age = 0, vacuum_truncate = off,
        toast.autovacuum_vacuum_insert_scale_factor = 0.05, toast.autovacuum_freeze_min_age = 0);

-- Due retries that wait for room: at most max_active_retries of each queue are active at once, so that a storm of
-- retries leaves room for new work (H5). The task stays pending with the instant that it waited for.
create table retry_queue (
    shard smallint not null, queue text not null, due_at timestamptz not null,
    run_id bigint not null, idx int not null, map_index int not null,
    primary key (shard, queue, due_at, run_id, idx, map_index)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

-- Admitted retries, with the epoch that they had then: active while they are available with it or run with the next.
create table retry_slot (
    shard smallint not null, queue text not null,
    run_id bigint not null, idx int not null, map_index int not null, epoch int not null,
    primary key (shard, queue, run_id, idx, map_index)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

-- Runs that were moved to a later version than they began with: only this row shows that the version is still needed.
create table run_version_override (
    run_id     bigint primary key,
    version_id int not null
);
create index run_version_override_version on run_version_override (version_id);

-- What an instance was given of each list: the element of a result, the place in a list that is in the code. A copy,
-- because taking one element out of a stored list reads all of it, and so would each of ten thousand claims.
create table map_item (
    run_id bigint not null, idx int not null, map_index int not null,
    item      jsonb not null,
    primary key (run_id, idx, map_index)
) with (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_freeze_min_age = 0, vacuum_truncate = off,
        toast.autovacuum_vacuum_insert_scale_factor = 0.05, toast.autovacuum_freeze_min_age = 0);

-- Which run was started by which task, and how many stand above it.
create table child_run (
    run_id bigint primary key, parent_run_id bigint not null,
    idx int not null, map_index int not null,
    depth         int not null check (depth > 0)
);

-- The epoch is the task's while it waits: a row whose task waits with another epoch, or not at all, is a leftover.
create table deferral (
    run_id bigint not null, idx int not null, map_index int not null, epoch int not null,
    shard     smallint not null,
    kind wait_kind not null, key text,
    wake_at timestamptz not null, deadline timestamptz,
    primary key (run_id, idx, map_index)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
create index deferral_due on deferral (shard, wake_at);
create index deferral_key on deferral (key) where key is not null;

-- Events that were sent from outside. They stay for as long as runs do, so a wait that begins later finds them.
create table event (
    event_id     bigint generated always as identity primary key,
    name text not null, key text,
    payload      jsonb not null,
    sent_at timestamptz not null, sent_by text not null,
    is_delivered boolean not null default false   -- whether the waits that existed when it arrived have received it
) with (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.05, vacuum_truncate = off);
create index event_of_name on event (name, sent_at);
create unique index event_key on event (name, key) where key is not null;
create index event_new on event (event_id) where not is_delivered;

-- Events that the leader has not yet given to the schedules that run for events; none if there are no such schedules.
create table event_arrival (
    event_id bigint primary key
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
        vacuum_truncate = off);

-- Events of such a schedule that are not a run yet: a group that is open, or of an ordered key those that wait for the
-- run of the event before.
create table event_window (
    schedule_id int not null, group_key text not null,
    event_ids   bigint[] not null,
    first_at timestamptz, last_at timestamptz,
    due_at      timestamptz not null,
    run_id      bigint,
    primary key (schedule_id, group_key)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
create index event_window_due on event_window (due_at);
create index event_window_run on event_window (run_id) where run_id is not null;

-- Webhooks from outside: how each is signed, with the name of its secret, and the events that it becomes.
create table webhook (
    name              text primary key,
    kind              text not null,
    secret            text not null,
    event             text not null,
    tolerance_seconds double precision not null,
    headers           jsonb,                     -- of the kind hmac: which headers have the signature, time and id
    changed_by text not null, changed_at timestamptz not null
);

-- A question to people, and its answer. Each epoch of the task asks again. `request`: of an attempt that asked, with
-- its options; `chosen` are those of the answer, and another attempt goes on with it.
create table approval (
    run_id bigint not null, idx int not null, map_index int not null, epoch int not null,
    title       text not null,
    asked_at    timestamptz not null,
    decided_at timestamptz, decided_by text,
    is_approved boolean, note text, fields jsonb, request jsonb, chosen jsonb,
    primary key (run_id, idx, map_index, epoch),
    check ((decided_at is null) = (decided_by is null) and (decided_at is null) = (is_approved is null))
);
create index approval_open on approval (asked_at) where decided_at is null;

-- A condition that is polled: since when, until when at most, and how often so far. Its polls leave no history.
create table sensor_poll (
    run_id bigint not null, idx int not null, map_index int not null,
    since timestamptz not null, deadline timestamptz, polls int not null,
    primary key (run_id, idx, map_index)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

-- The trigger of a deferred task, the session that runs it, and its event: what the task then resumes with. `given` has
-- the trigger's arguments, which may be secrets, until its event; and the method and the arguments that the task
-- resumes with.
create table task_trigger (
    run_id bigint not null, idx int not null, map_index int not null, epoch int not null,
    attempt    smallint not null,
    queue      text not null,
    classpath  text not null,
    given      jsonb not null,
    since timestamptz not null, deadline timestamptz,
    session    bigint,
    event      jsonb,
    trigger_id bigint generated always as identity,   -- for display; a new one for each deferral
    primary key (run_id, idx, map_index),
    check (session is null or event is null)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
create index task_trigger_free on task_trigger (queue, since) where session is null and event is null;
create index task_trigger_held on task_trigger (session) where session is not null;

-- By when a run or one of its tasks must have started or finished, where declared; deleted when the time has come.
create table deadline (
    shard smallint not null, due_at timestamptz not null,
    run_id bigint not null,
    kind   text not null check (kind in ('start', 'finish', 'task')),
    idx    int not null default -1,   -- of a task: which one
    primary key (shard, due_at, run_id, kind, idx)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

-- Within how many seconds of when its run was due a task must have ended.
create table task_deadline (
    version_id int not null, idx int not null,
    seconds    double precision not null check (seconds > 0),
    primary key (version_id, idx)
);

-- Attempts that an executor may have, under the name that follows from key, epoch and session. A work list for that
-- executor's runners: only they delete a row, when nothing is left there. Rows outlive the attempt, and even the run.
create table dispatch (
    run_id bigint not null, idx int not null, map_index int not null, epoch int not null,
    session      bigint not null unique,   -- of the attempt alone: after a lost failover an epoch can be given twice
    executor     text not null,
    owner        bigint not null,          -- the session of the runner that observes it
    queue        text not null,
    queued_at    timestamptz not null,
    tries        int not null default 0,
    tried_at     timestamptz,              -- when it was last handed over; written before that is done
    submitted_at timestamptz,              -- when the executor said that it has it
    started_at   timestamptz,              -- when its agent began
    nonce        text,                     -- what the agent that began drew: another one of the same name is refused
    last_error   text,                        -- the last error, for `explain_task`
    retry_at     timestamptz,              -- when it is handed over again
    primary key (run_id, idx, map_index, epoch)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
create index dispatch_of on dispatch (owner);

-- One note per run (idx and map_index -1) or task. It is deleted with the run, see delete_pending_cleanup.
create table note (
    run_id bigint not null, idx int not null, map_index int not null,
    content    text not null,
    written_by text not null, written_at timestamptz not null,
    primary key (run_id, idx, map_index)
);

-- Requests for runs ---------------------------------------------------------------------------------------------------

-- What applications ask for in their own transactions, with `enqueue`; the leader of shard 0 takes what is committed.
-- No unique index: an application with an open transaction must not make another one wait.
create table inbox (
    inbox_id   bigint generated always as identity primary key,
    dag text not null, params jsonb not null,
    key        text,
    run_at     timestamptz,
    unique_for interval,
    sent_at timestamptz not null, sent_by text not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
        vacuum_truncate = off);

-- Requests that could not become a run, with the reason. A replay puts one back into the inbox.
create table dead_letter (
    letter_id   bigint generated always as identity primary key,
    dag text not null, params jsonb not null,
    key         text,
    run_at      timestamptz,
    unique_for  interval,
    sent_at timestamptz not null, sent_by text not null,
    reason      text not null,
    failed_at   timestamptz not null,
    replayed_at timestamptz, replayed_by text
);
create index dead_letter_open on dead_letter (letter_id) where replayed_at is null;

-- Queued runs that must not begin before a time.
create table delayed_run (
    run_id   bigint primary key,
    start_at timestamptz not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
create index delayed_run_due on delayed_run (start_at);

-- The run that a key stands for until a time: a request that is unique for a period returns it.
create table unique_period (
    dag_id int not null, key text not null,
    until  timestamptz not null,
    run_id bigint not null,
    primary key (dag_id, key)
);
create index unique_period_until on unique_period (until);

-- The door of the inbox for every language, with the role evertick_enqueue: part of the tables, because applications
-- call it by this name in each release. It writes one row and reads none, so it waits for nothing. The notification is
-- sent with the commit, and only shortens the wait.
create function enqueue(dag text, params jsonb default '{}', key text default null, run_at timestamptz default null,
                        unique_for interval default null)
returns bigint language plpgsql security definer set search_path = evertick, pg_temp as $$
declare
    made bigint;
begin
    if enqueue.dag is null or length(enqueue.dag) not between 1 and 250 then
        raise exception 'enqueue: dag is %, but must be the name of a DAG', quote_nullable(left(enqueue.dag, 300))
            using errcode = '22023';
    elsif enqueue.params is null or jsonb_typeof(enqueue.params) <> 'object' then
        raise exception 'enqueue: params is %, but must be a JSON object', left(quote_nullable(enqueue.params), 300)
            using errcode = '22023';
    elsif length(enqueue.params::text) > 262144 then
        raise exception 'enqueue: params takes % characters; at most 262144 are allowed', length(enqueue.params::text)
            using errcode = '22023', hint = 'Store the data elsewhere, and pass its address.';
    elsif length(enqueue.key) not between 1 and 200 then
        raise exception 'enqueue: key has % characters, but must have 1 to 200', length(enqueue.key)
            using errcode = '22023';
    elsif enqueue.unique_for not between interval '1 millisecond' and interval '10 years' then
        raise exception 'enqueue: unique_for is %, but must be more than 0 and at most 10 years', enqueue.unique_for
            using errcode = '22023';
    elsif not isfinite(enqueue.run_at) or enqueue.run_at >= '9999-01-01' then
        raise exception 'enqueue: run_at is %, but must be before the year 9999', enqueue.run_at
            using errcode = '22023';
    end if;
    insert into inbox (dag, params, key, run_at, unique_for, sent_at, sent_by)
    values (enqueue.dag, enqueue.params, enqueue.key, enqueue.run_at, enqueue.unique_for, clock(), session_user)
    returning inbox_id into made;
    perform pg_notify('evertick_plan', '');
    return made;
end $$;

-- Gates ---------------------------------------------------------------------------------------------------------------

-- Operators create pools. The first task that needs another gate creates it, with the newest version's capacity.
create table gate (
    gate_id         int generated always as identity primary key,
    kind gate_kind not null, name text not null,
    capacity int not null check (capacity >= 0), used int not null default 0,
    needs_admission boolean not null default false,    -- a verb could not process all of its queues: the leader does
    version_id      int,
    revision        int not null default 1,            -- of a pool: how many sizes it has had
    period          double precision,  -- of a rate: for how many seconds a slot is taken
    next_opening    timestamptz,       -- of a rate for which a task waits: when the next slot becomes free
    unique (kind, name)
) with (fillfactor = 30, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
create index gate_needs_admission on gate (gate_id) where needs_admission;
create index gate_next_opening on gate (next_opening) where next_opening is not null;

-- An available, queued or running task with the gates that it holds, in order of their ids. Never updated.
create table gate_holder (
    run_id bigint not null, idx int not null, map_index int not null,
    gate_ids int[] not null, weights int[] not null,
    since     timestamptz not null,
    primary key (run_id, idx, map_index)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
        vacuum_truncate = off);

-- The open tasks of an ordered key, from when they are first pending until they end. Written under the key's lock.
create table gate_order (
    gate_id int not null, version bigint not null,
    run_id bigint not null, idx int not null, map_index int not null,
    since     timestamptz not null,
    primary key (gate_id, version, run_id, idx, map_index),
    unique (run_id, idx, map_index, gate_id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

-- The slots of a rate that are taken, and until when: as many as its counter says. Only time frees them.
create table rate_slot (
    gate_id int not null, until timestamptz not null,
    seq     bigint generated always as identity,
    primary key (gate_id, until, seq)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

-- All pending tasks that need exactly these gates: the gate that blocks them, their need there, which task is first,
-- and since when. A change needs the lock of the gate that it is blocked on. Tasks whose admission was released because
-- no live runner serves their queue are in a row with that queue: it is blocked on the queue alone.
create table gate_queue (
    queue_id    bigint generated always as identity primary key,
    gate_ids int[] not null, weights int[] not null,
    checks int[] not null default '{}', needs bigint[] not null default '{}',
    queue      text,
    blocked_on int, need bigint,
    rank smallint not null, seq bigint not null, since timestamptz not null,
    unique nulls not distinct (gate_ids, weights, checks, needs, queue)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
create index gate_queue_blocked on gate_queue (blocked_on, need, rank, seq);
create index gate_queue_oldest on gate_queue (blocked_on, since) where need > 1;
create index gate_queue_released on gate_queue (queue) where queue is not null;

-- A pending task in its line.
create table gate_waiter (
    queue_id bigint not null, rank smallint not null,
    seq        bigint generated always as identity,
    run_id bigint not null, idx int not null, map_index int not null, version_id int not null,
    since      timestamptz not null,
    primary key (queue_id, rank, seq),
    unique (run_id, idx, map_index)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
        vacuum_truncate = off);

-- Descriptions of pools, by name: the row of the gate itself is read too often to carry texts.
create table pool_description (
    name text primary key, description text not null
);

-- Runners and schedulers ----------------------------------------------------------------------------------------------

create table runner (
    session            bigint primary key,
    runner_id          text not null,
    name               text,
    version            text not null,
    -- Where its process runs: another runner at the same place can prove that it has ended.
    host text not null, boot_id text not null, pid_namespace text not null,
    uid int not null, pid int not null, pid_started double precision not null,
    queues             text[] not null,
    slots              int not null,
    -- The executor of its claims: the runner itself, or a remote one. An agent has its executor's, and no queue.
    executor           text not null default 'local',
    request            text check (request in ('drain', 'leave')),   -- to claim no new work, or to exit without work
    heartbeat_seq bigint not null default 0, heartbeat_at timestamptz not null,
    observed_seq       bigint not null default 0,
    silent_seconds     double precision not null default 0,
    -- It stops what must not outlive its lease just before this silence; it is not declared dead earlier.
    lost_after_seconds double precision not null,
    started_at         timestamptz not null,
    ended_at timestamptz, end_reason text,
    task_patterns      text[] not null default '{}',  -- the names of the tasks of its queues that it serves; empty: all
    token_id           int  -- it joined over HTTPS with this token; null: it has a connection to the database
) with (fillfactor = 30);
create index runner_live on runner (session) where ended_at is null;

-- Tokens with which runners join over HTTPS. A token limits them to these queues; the secret itself is not stored.
create table runner_token (
    token_id    int generated always as identity primary key,
    secret_hash bytea not null unique,
    name        text not null,
    queues      text[] not null check (cardinality(queues) > 0),
    created_by text not null, created_at timestamptz not null,
    expires_at  timestamptz not null,
    used_at timestamptz, used_from text,
    revoked_at  timestamptz
);

-- Fleets of runners that a launcher starts on an engine. One launcher leads a fleet, by its epoch until its lease ends;
-- it writes here what it decided, and why nothing can be started.
create table fleet (
    name        text primary key,
    engine      text not null,
    queues      text[] not null,
    least int not null, most int not null, slots int not null,
    epoch       bigint not null,
    leader      text not null,
    lease_until timestamptz not null,
    desired     int not null default 0,
    trouble     text
);

-- The launched runners: a row from before their object is submitted until the object has ended. The token is their own.
create table pilot (
    name         text primary key,   -- of the object, and of the runner
    fleet        text not null,
    token_id     int not null unique,
    created_at   timestamptz not null,
    submitted_at timestamptz,
    phase        text not null default 'waiting' check (phase in ('waiting', 'running')),
    reason       text,   -- the engine's words
    withdrawn_at timestamptz   -- it is not needed: its object is to be removed
);

-- Whether an agent, or a runner over HTTPS, could reach any API: every API renews this row while there are some
-- (detect_dead_runners).
create table agent_api (
    heartbeat_seq bigint not null default 0, observed_seq bigint not null default 0,
    silent_seconds double precision not null default 0
) with (fillfactor = 30);
insert into agent_api default values;

create table shard (
    shard             smallint primary key,
    epoch             bigint not null,
    leader            text,
    lease_until       timestamptz,
    has_session_lock  boolean not null default false,   -- the leader's session holds it, see try_acquire_shard
    leader_since      timestamptz,
    -- open: receives DAGs; leaving: is being emptied; closed: has no leader
    state             text not null default 'open' check (state in ('open', 'draining', 'closed')),
    shard_count       smallint not null default 1,   -- how many are led now; its leader reads it in passing
    count_set_at      timestamptz,   -- when the number was set
    rebalancing_since timestamptz,   -- since when its leader moves rows that belong to another shard
    successor text, successor_until timestamptz   -- the only scheduler that may take it until then, after a transfer
);
insert into shard (shard, epoch) values (0, 0);

-- Schedulers that are able to lead, where there is more than one shard.
create table scheduler (
    owner      text primary key,
    since timestamptz not null, seen_until timestamptz not null,
    pid        int                     -- of its session, if that is its own: once it is over, so is the scheduler
) with (fillfactor = 50, vacuum_truncate = off);

-- The servers that this database has lived on, one row per timeline. After a failover the row of the old timeline is as
-- the standby had received it: a process that remembers a later mark knows that acknowledged writes are lost.
create table server_timeline (
    system_id bigint not null, timeline bigint not null,
    first_seen_at timestamptz not null, marked_at timestamptz not null,
    lsn            pg_lsn not null,   -- how far the log was in a transaction that is committed by now
    is_synchronous boolean not null,  -- whether commits waited for a standby then
    lost_until     pg_lsn,            -- up to where acknowledged writes are known to be lost
    primary key (system_id, timeline)
) with (fillfactor = 50);

-- Installed function sets: schema evertick_fn_<hash>, one per release (docs/decisions/0036-function-sets.md).
create table function_set (
    hash       text primary key,
    release    text not null,
    created_at timestamptz not null default clock_timestamp()
);

-- Maintenance ---------------------------------------------------------------------------------------------------------

-- Rows that could not be processed, with the reason. Tried again at retry_at; if null, only publishing again helps.
create table quarantine (
    kind       text not null check (kind in ('schedule', 'run', 'dag')),
    subject_id bigint not null,
    verb text not null, reason text not null, failures int not null,
    since timestamptz not null, failed_at timestamptz not null, retry_at timestamptz,
    primary key (kind, subject_id)
);

-- Running runs in which nothing can move: for how long, and a fingerprint that would show a change.
create table orphan_watch (
    run_id          bigint primary key,
    fingerprint text not null, watched_seconds double precision not null
);

-- The continuous proof: how far each check is, how much it has checked, and what it has found. A row of a scope (runs,
-- fires, triggers) has only its position.
create table proof_cursor (
    check_name text primary key,
    position   jsonb,
    checked    bigint not null default 0,
    checked_at timestamptz not null
) with (fillfactor = 50);

-- One row per subject for as long as the violation holds; it ends when it is checked again and no longer holds.
create table proof_violation (
    violation_id bigint generated always as identity primary key,
    check_name text not null, subject text not null,
    run_id bigint, idx int, map_index int,
    detail       text not null,
    found_at timestamptz not null, seen_at timestamptz not null, ended_at timestamptz
);
create unique index proof_violation_open on proof_violation (check_name, subject) where ended_at is null;

-- The figures of a task of a DAG, or of the runs of a DAG (task ''): sums over the runs that ended since the first one.
-- The sums of seconds count successes only. `landed` and `landing_seconds`: from when the run was due to the end.
create table task_figure (
    dag_id int not null, task text not null,
    succeeded bigint not null, failed bigint not null, other bigint not null, retries bigint not null,
    duration_seconds double precision not null, wait_seconds double precision not null,
    landed bigint not null, landing_seconds double precision not null,
    cpu_seconds double precision not null, peak_memory_bytes bigint,
    -- Of the latest 50 that succeeded, the newest first: from the first start to the end, with the waits for retries.
    durations  real[] not null,
    counted_at timestamptz not null,
    primary key (dag_id, task)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, vacuum_truncate = off);

-- The last ended run whose events of OpenLineage were written.
create table lineage_cursor (
    is_only  boolean primary key default true check (is_only),
    ended_at timestamptz not null, run_id bigint not null
);

-- Jobs that run elsewhere and report here. A report is expected at due_at, and late after the grace period.
create table checkin (
    name       text primary key,
    spec       jsonb not null,
    grace_seconds double precision not null check (grace_seconds >= 0),
    due_at     timestamptz not null,
    last_at    timestamptz,
    message    text,
    has_failed boolean not null default false,   -- the last report says so
    count      bigint not null default 0,
    late_since timestamptz,   -- since when an alert is open
    changed_by text not null, changed_at timestamptz not null
) with (fillfactor = 70);

-- The first prediction of a running run, until it has ended; and how good such predictions were.
create table run_forecast (
    run_id bigint primary key,
    made_at timestamptz not null,
    low_at timestamptz not null, middle_at timestamptz not null, high_at timestamptz not null
);
create table forecast_accuracy (
    is_only boolean primary key default true check (is_only),
    judged bigint not null, inside bigint not null,   -- how many ends, and how many of them in the band
    error_sum double precision not null               -- of errors, relative to the time that was left
);

-- How far the ended runs are counted.
create table figure_cursor (
    is_only  boolean primary key default true check (is_only),
    ended_at timestamptz not null, run_id bigint not null
);

create table pending_cleanup (
    shard smallint not null,
    kind  text not null check (kind in ('run', 'version')),
    id    bigint not null,
    primary key (shard, kind, id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

-- `look_at`: from then on it is removed if no line is in it. Null while there is one.
create table log_archive_object (
    object_id uuid primary key default gen_random_uuid(),
    run_id bigint not null, bytes int not null,
    look_at   timestamptz
);
create index log_archive_object_of_run on log_archive_object (run_id);
create index log_archive_object_look on log_archive_object (look_at) where look_at is not null;

-- Runs whose logs are still to be archived, and the position of the walk over all runs that adds them.
create table log_archive_queue (
    run_id bigint primary key
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

create table log_archive_cursor (
    is_only boolean primary key default true check (is_only),
    after   bigint not null
);

-- The audit log: actions of people and repairs, kept.
create table audit_log (
    entry_id    bigint generated always as identity primary key,
    occurred_at timestamptz not null,
    action text not null, actor text not null,
    dag_id int, run_id bigint, idx int, map_index int,
    detail      jsonb not null,
    origin text, request_id text   -- where the request came from, and its id
);
create index audit_log_of_run on audit_log (run_id, entry_id) where run_id is not null;
create index audit_log_in_time on audit_log (occurred_at);

-- Alerts and notifications --------------------------------------------------------------------------------------------

-- Missed deadlines. One row per failure streak: it begins with the first miss, counts the further ones, and ends
-- when the schedule fires again or a later run is in time, or when there is no such deadline any more.
create table alert (
    alert_id    bigint generated always as identity primary key,
    kind        text not null check (kind in ('not_fired', 'not_started', 'not_finished', 'will_miss')),
    schedule_id int not null,
    task        text not null default '',   -- by its name; '' of a run as a whole
    run_id      bigint,                 -- the first that was late
    due_at      timestamptz not null,   -- by when it should have been, the first time
    last_due_at timestamptz not null,
    count       int not null default 1,
    raised_at timestamptz not null, ended_at timestamptz
);
create unique index alert_open on alert (schedule_id, kind, task) where ended_at is null;

-- What of a schedule has failed and not succeeded since: a task, or the run (''). Its begin sends a notification.
create table failure_streak (
    schedule_id int not null,
    task        text not null,
    run_id      bigint not null,   -- the first that failed
    since       timestamptz not null,
    failures    int not null,
    primary key (schedule_id, task)
);

create table outbox (
    delivery_id   bigint generated always as identity primary key,
    shard         smallint not null,      -- always 0: one leader sends for all, so that the pace of a sink is one
    sink text not null, event text not null,
    run_id bigint, payload jsonb not null,
    created_at    timestamptz not null,
    waiting_since timestamptz not null,   -- later than that if it was requested again
    state         text not null default 'waiting' check (state in ('waiting', 'sent', 'failed')),
    attempts      int not null default 0,
    due_at        timestamptz not null,   -- when it is tried next; while it is being sent, when another process may try
    ended_at      timestamptz,
    response      text,                     -- what the sink said, or why it could not be reached
    check ((ended_at is null) = (state = 'waiting'))
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
create index outbox_waiting on outbox (shard, sink, due_at) where state = 'waiting';

-- Accounts and stored values ------------------------------------------------------------------------------------------

-- People and programs. Without a password only a token or a one-time link signs in. `tags`: only DAGs with one of them.
create table account (
    account_id          int generated always as identity primary key,
    name                text not null,
    role                text not null check (role in ('viewer', 'operator', 'editor', 'admin')),
    tags                text[] check (cardinality(tags) > 0),
    password_hash text, is_disabled boolean not null default false,
    created_by text not null, created_at timestamptz not null,
    password_changed_at timestamptz
);
create unique index account_name on account (lower(name));

-- Tokens, browser sessions and one-time links. Only the hash of the secret is stored: the secret has 256 random bits,
-- so a quick hash is enough. `role` and `tags` can only reduce what the account may do.
create table credential (
    credential_id bigint generated always as identity primary key,
    secret_hash   bytea not null unique,
    account_id    int not null references account on delete restrict,
    kind text not null check (kind in ('token', 'session', 'link')), name text not null,
    role text check (role in ('viewer', 'operator', 'editor', 'admin')), tags text[],
    created_by text not null, created_at timestamptz not null,
    expires_at    timestamptz,
    used_at timestamptz, used_from text,
    revoked_at    timestamptz,
    check (expires_at is not null or kind = 'token')
);
create index credential_of_account on credential (account_id, credential_id);

-- Who an account is at a provider of OpenID Connect, which decides about its rights: every credential of the account
-- works only for a minute after the provider was asked. `tokens`: encrypted; null: the person must sign in again.
create table oidc_identity (
    account_id  int primary key references account on delete restrict,
    provider text not null, subject text not null,
    session_id  text,                      -- of the provider, of the latest sign-in
    tokens text, key_id text,
    checked_at  timestamptz not null,
    asked_until timestamptz,               -- while a process asks the provider
    unique (provider, subject)
);

-- Values that may be used once: states of sign-ins, tokens of programs and of the provider. By its hash, until it has
-- expired.
create table used_once (
    key        bytea primary key,
    expires_at timestamptz not null
);
create index used_once_expiry on used_once (expires_at);

-- What tasks keep by key: of a task in all its runs (run_id 0), of a task in one run, or of an asset (dag_id 0).
create table state_entry (
    run_id bigint not null, dag_id int not null, owner text not null, map_index int not null,
    key        text not null check (length(key) between 1 and 512),
    value      jsonb not null,
    expires_at timestamptz,
    changed_at timestamptz not null, changed_by text not null,
    writer     jsonb,                      -- the task that changed the state of an asset
    primary key (run_id, dag_id, owner, map_index, key)
);
create index state_entry_expiry on state_entry (expires_at) where expires_at is not null;

-- Failed logins in a row, by user and by address.
create table login_attempt (
    subject text primary key, failures int not null,
    tried_at timestamptz not null
);

create table stored_value (
    kind        text not null check (kind in ('variable', 'connection', 'secret')),
    name        text not null,
    content text not null, key_id text not null,
    description text,
    changed_by text not null, changed_at timestamptz not null,
    primary key (kind, name)
);
