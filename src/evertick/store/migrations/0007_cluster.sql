-- The servers that this database has lived on, one row per timeline. After a failover the row of the old timeline is as the
-- standby had received it: whoever remembers a later mark knows that acknowledged writes are lost.

create table cluster (
    system_id      bigint not null,
    timeline       bigint not null,
    first_seen_at  timestamptz not null,
    marked_at      timestamptz not null,
    lsn            pg_lsn not null,   -- how far the log was in a transaction that is committed by now
    is_synchronous boolean not null,  -- whether commits waited for a standby then
    lost_until     pg_lsn,            -- up to where acknowledged writes are known to be lost
    primary key (system_id, timeline)
) with (fillfactor = 50);
