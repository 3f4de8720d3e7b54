-- The tables of the engine. Why this layout: docs/decisions/0001-table-layout.md.
--
-- `task` holds the truth of every task in one row, found by its key alone, so that claiming and finishing are
-- HOT updates. `ready`, `lease` and `timer` are small companions that say in which order, for whom and when: a task is
-- in `ready` while it is available, in `lease` while it runs, in `timer` while it waits for a time.

create type task_state as enum (
    'waiting', 'pending', 'available', 'queued', 'running', 'deferred',
    'success', 'failed', 'skipped', 'canceled', 'upstream_failed');
create type run_state as enum ('queued', 'running', 'success', 'failed', 'canceled');
create type run_kind as enum ('scheduled', 'manual', 'backfill');
create type trigger_rule as enum (
    'all_success', 'all_failed', 'all_done', 'all_done_min_one_success', 'all_done_setup_success',
    'one_success', 'one_failed', 'one_done', 'none_failed', 'none_skipped',
    'none_failed_min_one_success', 'all_skipped', 'always');
create type decision as enum ('wait', 'run', 'skip', 'upstream_failed');
create type task_request as enum ('cancel', 'clear', 'mark_success', 'mark_failed', 'mark_skipped');

-- The plan -----------------------------------------------------------------------------------------------------------

create table bundle (
    hash         text primary key,
    file         text not null,
    archive      bytea not null,
    uses_threads text,
    created_at   timestamptz not null
);

create table dag (
    dag_id          int generated always as identity primary key,
    name            text not null unique,
    shard           smallint not null default 0,
    paused          boolean not null default false,
    version_id      int,
    max_active_runs int check (max_active_runs > 0),
    has_run_timeout boolean not null default false,   -- whether some version of it limits how long a run may take
    is_awaited      boolean not null default false,   -- whether some schedule waits for its runs
    has_turns       boolean not null default false,   -- whether some schedule of it lets its runs start only one after the other
    awaits_past     boolean not null default false,   -- whether some task of it waits for the run before
    notifies        boolean not null default false,   -- whether somebody is told of its runs, see 0022_outbox.sql
    has_run_retries boolean not null default false,   -- whether some version of it lets a run that fails begin again as a whole
    file            text not null,
    deleted_at      timestamptz
);
create index dag_timed on dag (dag_id) where has_run_timeout;

create table dag_version (
    version_id  int generated always as identity primary key,
    dag_id      int not null,
    number      int not null,
    hash        text not null,
    bundle_hash text not null,
    spec        jsonb not null,
    task_count  int not null,
    run_timeout double precision check (run_timeout > 0),
    run_retries int not null default 0 check (run_retries >= 0),
    created_at  timestamptz not null,
    -- When another version took its place, and the newest run of all then: none of its runs is newer. Null while current.
    retired_at   timestamptz,
    final_run_id bigint,
    unique (dag_id, number),
    unique (dag_id, hash, bundle_hash)
);

create table task_spec (
    version_id     int not null,
    idx            int not null,
    name           text not null,
    queue          text not null,
    priority       smallint not null check (priority between 0 and 9),
    rule           trigger_rule not null,
    upstream_total int not null,
    setup_total    int not null,
    is_setup       boolean not null,
    is_leaf        boolean not null,
    starts_at_once boolean not null,
    max_attempts   int not null check (max_attempts > 0),
    rerun_on_loss  boolean not null,
    queue_timeout  double precision check (queue_timeout > 0),
    outlets        text[],   -- the assets that it updates; null for none
    is_gated       boolean not null default false,   -- it has rows in task_gate
    is_ordered     boolean not null default false,   -- of them, one of an ordered key
    awaits_past    boolean not null default false,   -- of them, the one of the run before; or another version of it has that
    defers         boolean not null default false,   -- it waits for something outside and no runner sees it, see 0020_deferral.sql
    is_mapped      boolean not null default false,   -- it becomes its instances when it may start, see 0019_mapping.sql
    notifies       boolean not null default false,   -- it has rows in notice
    grp            int,                              -- the group with retries that it is in, see 0027_groups.sql
    decides_grp    boolean not null default false,   -- its failure is that of the group
    primary key (version_id, idx)
);

-- Groups of tasks that run again as a whole when they fail.
create table retry_group (
    version_id int not null,
    grp        int not null,
    name       text not null,
    retries    int not null check (retries > 0),
    members    int[] not null,
    primary key (version_id, grp)
);

create table edge (
    version_id int not null,
    src        int not null,
    dst        int not null,
    out_of     int,   -- the group with retries that it leads out of: then it says how src ended when all of the group has
    primary key (version_id, src, dst) include (out_of)
);
create index edge_upstream on edge (version_id, dst, src) include (out_of);

-- Which upstream results a task takes as arguments; their names are what the function's caller sees.
create table task_input (
    version_id int not null,
    idx        int not null,
    src        int not null,
    primary key (version_id, idx, src)
);

create table import_error (
    file        text primary key,
    line        int,
    message     text not null,
    detail      text not null default '',
    occurred_at timestamptz not null
);

-- When -----------------------------------------------------------------------------------------------------------------

create table shard (
    shard       smallint primary key,
    epoch       bigint not null,
    owner       text,
    lease_until timestamptz,
    is_watched  boolean not null default false,  -- the leader's session holds the session lock, see stand_by
    led_since   timestamptz,
    state       text not null default 'open' check (state in ('open', 'leaving', 'closed')),   -- 0028_shards.sql has the rest
    of_shards   smallint not null default 1,     -- how many are led now; in every row, so that its leader reads it in passing
    chosen_at   timestamptz,                     -- when somebody last said how many there shall be
    moves_since timestamptz,                     -- since when its leader looks for what belongs to another one
    heir        text,                            -- who alone may take it until then: it was handed over
    heir_until  timestamptz
);
insert into shard (shard, epoch) values (0, 0);

create table schedule (
    schedule_id int generated always as identity primary key,
    dag_id      int not null,
    name        text not null,
    version     int not null check (version > 0),
    spec        jsonb not null,
    params      jsonb not null,
    misfire     text not null,
    window_seconds double precision not null,
    catchup_limit int check (catchup_limit > 0),
    overlap     text not null default 'allow' check (overlap in ('allow', 'skip', 'queue_one', 'queue_all', 'cancel')),
    start_within  double precision check (start_within > 0),   -- deadlines of its runs, from when they are due
    finish_within double precision check (finish_within > 0),
    delay_seconds double precision not null default 0,   -- its jitter: how much later than its instants it is due
    origin      text not null default 'code' check (origin in ('code', 'user')),
    request     text,
    changed_by  text not null,
    changed_at  timestamptz not null,
    deleted_at  timestamptz,
    unique (dag_id, name)
);

create table schedule_state (
    schedule_id int primary key,
    shard       smallint not null,
    version     int not null,
    next_due    timestamptz,
    last_fired  timestamptz,
    paused      boolean not null default false,   -- its own pause or the DAG's
    is_held     boolean not null default false,   -- its own
    error       text
) with (fillfactor = 70);
-- The due scan reads exactly the rows that are due: paused, finished and quarantined schedules are not in the index.
create index schedule_due on schedule_state (shard, next_due)
    where next_due is not null and not paused and error is null;

create table skip_record (
    schedule_id int not null,
    first_at    timestamptz not null,
    last_at     timestamptz not null,
    count       bigint not null check (count > 0),
    reason      text not null,
    recorded_at timestamptz not null,
    primary key (schedule_id, first_at)
);

-- What runs -------------------------------------------------------------------------------------------------------------

-- These grow with history. Vacuumed before a fifth of it is new or dead, and frozen the first time, when the page is in memory
-- anyway: later, when it must be, that reads and writes all of it (measured in docs/decisions/0011-upkeep.md). Nobody ever waits
-- for the end of a table to be given back.

-- The fact: inserted once, never updated.
create table run (
    run_id       bigint generated always as identity primary key,
    dag_id       int not null,
    version_id   int not null,
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
-- Of those that somebody gave an instant of their own: hardly any, so it is almost empty and costs the others nothing.
create unique index run_instant on run (dag_id, fire_at) where kind = 'manual' and fire_at is not null;

-- Where it stands. Every verb that moves a run's tasks, but claim, locks this row first.
create table run_status (
    run_id           bigint primary key,
    dag_id           int not null,
    version_id       int not null,
    state            run_state not null,
    open_tasks       int not null check (open_tasks >= 0),
    failed_leaves    int not null default 0 check (failed_leaves >= 0),
    extra_tasks      int not null default 0,   -- how many more than its version names, by mapping
    cancel_requested boolean not null default false,
    retried          smallint not null default 0,   -- how often it has begun again as a whole
    started_at       timestamptz,
    finished_at      timestamptz,
    reason           text,
    check (state not in ('success', 'failed', 'canceled') or (open_tasks = 0 and finished_at is not null)),
    check (state <> 'running' or open_tasks > 0)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_freeze_min_age = 0, vacuum_truncate = off);
-- The state in it keeps every change of state from being HOT. Worth it: a companion table instead costs a run 95 bytes of WAL more.
-- Statistics know of no open run, as a rule, so walking over all of them looks cheaper than a look at one by its id. Whoever looks for runs by
-- their ids in a batch therefore excludes the closed states instead of naming the open ones: then this index does not offer itself.
create index run_active on run_status (dag_id, state, run_id) where state in ('queued', 'running');

-- A task without a row is waiting. The n_* counters are of ended upstream tasks, kept while it waits.
create table task (
    run_id            bigint not null,
    idx               int not null,
    map_index         int not null default -1,
    version_id        int not null,
    state             task_state not null,
    epoch             int not null default 0,
    attempt           smallint not null default 0 check (attempt >= 0),
    losses            smallint not null default 0,
    session           bigint,
    request           task_request,
    not_before        timestamptz,
    let_in_at         timestamptz,   -- when its gates let it in; null without gates. This and the next two are only looked at
    taken_at          timestamptz,   -- when a runner took it for an executor elsewhere; it is started when its agent begins
    started_at        timestamptz,
    start_seconds     real,          -- how long after that its body began, where that was longer than a moment; known at its end
    finished_at       timestamptz,
    n_success         int,
    n_failed          int,
    n_upstream_failed int,
    n_skipped         int,
    n_setup_success   int,
    n_setup_skipped   int,
    n_more            int,   -- how many upstream tasks there are besides those of the version, by mapping
    exit_code         int,
    reason            text,
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
    grp     int not null,
    ended   int not null default 0,        -- how many of its tasks have ended
    more    int not null default 0,        -- how many more there are than the version names, by mapping
    retried smallint not null default 0,   -- how often it has begun again
    primary key (run_id, grp)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_freeze_min_age = 0, vacuum_truncate = off);

-- Available tasks in the order in which they are claimed.
create table ready (
    queue      text not null,
    rank       smallint not null,
    seq        bigint generated always as identity,
    run_id     bigint not null,
    idx        int not null,
    map_index  int not null,
    expires_at timestamptz,   -- of a task with a queue_timeout
    primary key (queue, rank, seq)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000, vacuum_truncate = off);
create index ready_expiry on ready (expires_at) where expires_at is not null;

-- Running tasks by the session that owns them.
create table lease (
    session   bigint not null,
    run_id    bigint not null,
    idx       int not null,
    map_index int not null,
    epoch     int not null,
    primary key (session, run_id, idx, map_index)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000, vacuum_truncate = off);

-- Pending tasks that time alone makes available.
create table timer (
    shard     smallint not null,
    due_at    timestamptz not null,
    run_id    bigint not null,
    idx       int not null,
    map_index int not null,
    primary key (shard, due_at, run_id, idx, map_index)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

-- Attempts that were superseded by a retry, a loss or a clear. The latest one is in the task's own row.
create table attempt (
    run_id      bigint not null,
    idx         int not null,
    map_index   int not null,
    epoch       int not null,
    attempt     smallint not null,
    session     bigint,
    outcome     text not null,
    reason      text,
    exit_code   int,
    let_in_at   timestamptz,
    taken_at    timestamptz,
    started_at  timestamptz,
    start_seconds real,
    finished_at timestamptz not null,
    retry_at    timestamptz,   -- from when the next one might begin; null where a person had to ask for it
    primary key (run_id, idx, map_index, epoch)
) with (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_freeze_min_age = 0, vacuum_truncate = off);

create table result (
    run_id    bigint not null,
    idx       int not null,
    map_index int not null,
    epoch     int not null,
    value     jsonb not null,
    primary key (run_id, idx, map_index)
) with (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_freeze_min_age = 0, vacuum_truncate = off,
        toast.autovacuum_vacuum_insert_scale_factor = 0.05, toast.autovacuum_freeze_min_age = 0);

create table log_chunk (
    run_id    bigint not null,
    idx       int not null,
    map_index int not null,
    epoch     int not null,
    seq       bigint not null,   -- where the chunk starts in the attempt's spool file, and where it ends
    until     bigint not null,
    is_late   boolean not null default false,
    content   text,
    -- Where the lines are that are not here any more: a part of an object in the storage, and what it must be.
    object_id uuid,
    at        int,
    bytes     int,
    digest    bytea,
    primary key (run_id, idx, map_index, epoch, seq),
    check ((content is null) = (object_id is not null and at is not null and bytes is not null and digest is not null))
) with (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_freeze_min_age = 0, vacuum_truncate = off,
        toast.autovacuum_vacuum_insert_scale_factor = 0.05, toast.autovacuum_freeze_min_age = 0);

-- Who runs ---------------------------------------------------------------------------------------------------------------

create table runner (
    session            bigint primary key,
    runner_id          text not null,
    name               text,
    version            text not null,
    -- Where its process is: whoever is there, too, can prove that it is gone.
    host               text not null,
    boot_id            text not null,
    pid_namespace      text not null,
    uid                int not null,
    pid                int not null,
    pid_started        double precision not null,
    queues             text[] not null,
    slots              int not null,
    -- How what it claims is run: by itself, or by that executor. The agent of an attempt has its executor's, too, and no queue.
    executor           text not null default 'local',
    -- What people ask of it: to take no new work, or to leave as soon as it has none.
    request            text check (request in ('drain', 'leave')),
    beat               bigint not null default 0,
    beat_at            timestamptz not null,
    watched_beat       bigint not null default 0,
    silent_seconds     double precision not null default 0,
    -- It stops what must not outlive its contact a moment before this silence is full: nobody may give it up earlier.
    lost_after_seconds double precision not null,
    started_at         timestamptz not null,
    gone_at            timestamptz,
    gone_reason        text
) with (fillfactor = 30);
create index runner_live on runner (session) where gone_at is null;

-- What people and repairs did: explicit, and kept.
create table journal (
    entry_id    bigint generated always as identity primary key,
    occurred_at timestamptz not null,
    verb        text not null,
    actor       text not null,
    dag_id      int,
    run_id      bigint,
    idx         int,
    map_index   int,
    detail      jsonb not null
);
create index journal_of_run on journal (run_id, entry_id) where run_id is not null;
