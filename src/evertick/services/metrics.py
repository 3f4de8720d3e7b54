"""What the services count and measure: one set of Prometheus metrics per process, in a registry of its own.

Only counts; must never decide anything, touch the database, or fail its caller. docs/howto/monitor.md says what each
one means to an operator. Label values are few and known (a queue, a reason), never an id: each value is kept for ever.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

# When a series began is one more series each, and nobody asks.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()
# Memory, processor time, open files: read from the kernel when somebody asks, not before.
ProcessCollector(namespace="evertick", registry=REGISTRY)

# From what a good step takes (1 ms) to what an operator must hear of.
_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# A fire can be late by an outage: up to an hour is told apart.
_LATE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 3600.0)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"evertick_{name}", text, labels, registry=REGISTRY)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"evertick_{name}", text, labels, registry=REGISTRY)


def _histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _QUICK) -> Histogram:
    return Histogram(f"evertick_{name}_seconds", text, labels, buckets=buckets, registry=REGISTRY)


# The loops
TICK_SECONDS = _histogram("tick_duration", "How long one tick of a loop took, waiting not included.", "service")
STEP_FAILURES = _counter("step_failures", "Ticks, or steps of a tick, that failed and were contained.", "step")
RECONNECTS = _counter("reconnects", "Database connections opened again after they broke.", "purpose")
FAILOVERS = _counter(
    "failovers",
    "Changes of the database server, by what is known of acknowledged writes: safe, unproven, lost.",
    "writes",
)
RESTARTS = _counter("service_restarts", "Services that ended and were started again by the supervisor.", "service")
LOG_LINES_DROPPED = _counter("log_lines_dropped", "Log lines that could not be written: a full disk, a stuck reader.")

# Planning
LEADER = _gauge("leader", "1 while this scheduler leads shard 0, and so does what there is one of; else 0.")
SHARD_LEADER = _gauge("shard_leader", "1 while this scheduler leads that shard, else 0.", "shard")
LEADERSHIP_CHANGES = _counter("leadership_changes", "Times that this scheduler took or lost the lead.")
FIRES = _counter("fires", "Runs created by schedules.")
SHARD_FIRES = _counter("shard_fires", "Runs created by schedules, by shard.", "shard")
MOVED = _counter("moved", "DAGs and what hangs on them, moved to another shard.")
BACKFILL_RUNS = _counter("backfill_runs", "Runs created by backfills.")
FIRE_LAG = _histogram("fire_lag", "From the due instant of a schedule to its run.", buckets=_LATE)
SKIPPED_FIRES = _counter("skipped_fires", "Due instants that were skipped, with a record that says why.", "reason")
QUEUE_DEPTH = _gauge("queue_depth", "Tasks in line, claimable now, by queue. Counted by the leader.", "queue")
DRIFT_REPAIRED = _counter(
    "drift_repaired", "What reconcile found wrong and put right. Each is a bug to report.", "kind"
)
GATE_DRIFT = _counter("gate_drift", "Gates whose used slots were not what their holders have. Each is a bug to report.")
QUARANTINED = _counter("quarantined", "Things set aside because they fail every time.", "kind")
ALERTS = _counter(
    "alerts", "Episodes of schedules that did not fire, or runs or tasks that did not start or finish, in time.", "kind"
)
NOTIFICATIONS = _counter(
    "notifications", "Attempts to send a notification: sent, failed and tried again, given_up.", "outcome"
)
NOTIFICATIONS_WAITING = _gauge("notifications_waiting", "Notifications that are not sent yet. Counted by the leader.")
NOTIFICATIONS_OLDEST = _gauge("notifications_oldest_seconds", "How long the oldest of them has waited.")
TIMEOUTS = _counter("timeouts", "Attempts, runs and waits ended by their time limit.", "kind")
PRUNED = _counter("pruned", "What retention has deleted: runs, journal entries, versions and so on.", "kind")
LOGS_MOVED = _counter("logs_moved_characters", "Characters of logs that were moved to the object storage.")
LOG_MOVES_FAILING = _gauge(
    "log_moves_failing_seconds", "For how long no log could be moved to the object storage; 0 while that works."
)
OLDEST_SNAPSHOT = _gauge(
    "oldest_snapshot_seconds", "Age of the oldest snapshot in the database, which keeps dead rows. Seen by the leader."
)

# Running
SLOTS = _gauge("runner_slots", "Attempts that this runner may run at once.")
RUNNING = _gauge("attempts_running", "Attempts that this runner runs now.")
CLAIMS = _counter("claims", "Tasks claimed by this runner.")
CLAIMS_LOST = _counter("claims_lost", "Claims given back or lost: the reply never came, or the lease passed on.")
HOP_SECONDS = _histogram("hop_latency", "From a finished task to the start of its successor, or in line to claimed.")
ATTEMPTS_FINISHED = _counter("attempts_finished", "Attempts that ended on this runner, by outcome.", "outcome")
STALE_WRITES_REFUSED = _counter("stale_writes_refused", "Reports of an old epoch or session that changed nothing.")

# Handing over to an executor elsewhere
DISPATCH_QUEUE_DEPTH = _gauge("dispatch_queue_depth", "Attempts that wait in this runner's memory to be handed over.")
DISPATCH_AT_CAPACITY = _counter(
    "dispatch_at_capacity",
    "Ticks in which this runner took nothing because its pool, its slots or its executor had no room.",
)
DISPATCH_LATENCY = _histogram("dispatch_latency", "From the claim of a task until its executor has it.", buckets=_LATE)
DISPATCH_FAILED = _counter(
    "dispatch_failed",
    "Calls of an executor that failed: busy, unavailable, refused, observe (a look at it), end (of an attempt), or stray.",
    "reason",
)

# Reaping
DISPATCH_LOST = _counter("dispatch_lost_tasks", "Queued tasks of which their executor knew nothing any more.")
AGENT_LOST = _counter("agent_lost_tasks", "Tasks taken from a runner that is gone.")
AGENT_LOST_LIST_ERROR = _counter("agent_lost_list_error", "Searches for lost runners that failed.")
ORPHAN_REAPED = _counter("orphan_reaped", "Runs failed because nothing in them could move any more.")
ORPHAN_REAP_ERROR = _counter("orphan_reap_error", "Orphaned runs that could not be failed.")
ORPHAN_LIST_ERROR = _counter("orphan_list_error", "Searches for orphaned runs that failed.")
ORPHAN_PANIC = _counter("orphan_panic", "Sweeps for orphaned runs that broke off unexpectedly.")

# The API
API_REQUESTS = _counter("api_requests", "Requests that were answered, by the first digit of the status.", "status")
API_SECONDS = _histogram("api_request_duration", "From a request to the beginning of its answer.")
