"""The Prometheus metrics of a process, in a registry of its own.

Must never decide anything, query the database, or fail its caller. docs/reference/metrics.md explains each metric. Label
values are few and known (a queue, a reason), never an id: each value is kept until the process ends.
"""

from __future__ import annotations

from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

# The creation time of each series would be a series of its own, which is not used.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()
# Memory, processor time, open files: read from the kernel only on a scrape.
ProcessCollector(registry=REGISTRY)

# From the time of a fast exchange (1 ms) to a time that needs an operator.
_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# An outage can delay a fire: up to an hour is distinguished.
_LATE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 3600.0)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"evertick_{name}", text, labels, registry=REGISTRY)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"evertick_{name}", text, labels, registry=REGISTRY)


def _histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _QUICK) -> Histogram:
    return Histogram(f"evertick_{name}_seconds", text, labels, buckets=buckets, registry=REGISTRY)


# Joined with other series, to show which release a process runs.
BUILD_INFO = _gauge("build_info", "Always 1. The label is the release of this process.", "version")
BUILD_INFO.labels(version("evertick")).set(1)


# The loops
TICK_SECONDS = _histogram("tick_duration", "Duration of one tick of a loop, without waiting.", "service")
JOB_FAILURES = _counter("job_failures", "Ticks, or jobs of a tick, that failed without affecting others.", "job")
RECONNECTS = _counter("reconnects", "Database connections reopened after they broke.", "purpose")
FAILOVERS = _counter(
    "failovers",
    "Failovers of the database server, by the state of acknowledged writes: safe, unproven, lost.",
    "writes",
)
RESTARTS = _counter("service_restarts", "Services that ended and were restarted by the supervisor.", "service")
LOG_LINES_DROPPED = _counter("log_lines_dropped", "Log lines that could not be written: a full disk, a stuck reader.")

# Planning
LEADER = _gauge("leader", "1 while this scheduler leads shard 0 and so runs the singleton jobs, else 0.")
SHARD_LEADER = _gauge("shard_leader", "1 while this scheduler leads that shard, else 0.", "shard")
LEADERSHIP_CHANGES = _counter("leadership_changes", "Times that this scheduler acquired or lost leadership.")
FIRES = _counter("fires", "Runs created by schedules.")
SHARD_FIRES = _counter("shard_fires", "Runs created by schedules, by shard.", "shard")
SHARD_MOVES = _counter("shard_moves", "DAGs moved to another shard, with their rows.")
BACKFILL_RUNS = _counter("backfill_runs", "Runs created by backfills.")
FIRE_LAG = _histogram("fire_lag", "From the due instant of a schedule to its run.", buckets=_LATE)
SKIPPED_FIRES = _counter("skipped_fires", "Due instants that were skipped, with a recorded reason.", "reason")
QUEUE_DEPTH = _gauge("queue_depth", "Queued tasks that can be claimed now, by queue. Counted by the leader.", "queue")
TASKS_ENDED = _counter("task_ended", "Tasks of ended runs, of the busiest tasks.", "dag", "task", "state")
TASK_RETRIES = _counter("task_retries", "Retries of these tasks.", "dag", "task")
TASK_DURATION = _counter("task_duration_seconds", "Time that these tasks took, where they succeeded.", "dag", "task")
TASK_WAIT = _counter(
    "task_wait_seconds", "Time that these tasks waited for a slot or a gate, where they succeeded.", "dag", "task"
)
TASK_CPU = _counter("task_cpu_seconds", "CPU time of all attempts of these tasks.", "dag", "task")
TASK_MEMORY = _gauge("task_peak_memory_bytes", "Largest peak memory in the latest runs of these tasks.", "dag", "task")
DAG_RUNS = _counter("dag_runs_ended", "Runs that ended, of the busiest DAGs.", "dag", "state")
DAG_RUN_DURATION = _counter("dag_run_duration_seconds", "Time that these runs took, where they succeeded.", "dag")
DAG_LANDING = _gauge("dag_landing_seconds", "From when a run was due until it succeeded: the latest runs.", "dag")
DRIFT_REPAIRED = _counter(
    "drift_repaired", "Inconsistencies that reconciliation found and repaired. Each is a bug to report.", "kind"
)
VIOLATIONS = _counter(
    "violations", "Violations of a guarantee that the leader found. Each is a bug to report.", "guarantee"
)
GATE_DRIFT = _counter("gate_drift", "Gates whose used slots did not match their holders. Each is a bug to report.")
DEAD_LETTERS = _counter("dead_letters", "Requests for runs that could not become one.")
QUARANTINED = _counter("quarantined", "Items in quarantine because they fail every time.", "kind")
ALERTS = _counter(
    "alerts",
    "Failure streaks of schedules that did not fire, or runs or tasks that did not start or finish, in time.",
    "kind",
)
NOTIFICATIONS = _counter(
    "notifications", "Attempts to send a notification: sent, failed (retried later), given_up.", "outcome"
)
NOTIFICATIONS_WAITING = _gauge("notifications_waiting", "Notifications that are not sent yet. Counted by the leader.")
NOTIFICATIONS_OLDEST = _gauge("notifications_oldest_seconds", "Age of the oldest notification that is not sent yet.")
PINGS = _counter("pings", "Pings of the monitor of this installation.", "outcome")
TIMEOUTS = _counter("timeouts", "Attempts, runs and waits ended by their timeout.", "kind")
PRUNED = _counter("pruned", "Rows that retention has deleted: runs, audit entries, versions and so on.", "kind")
LOGS_ARCHIVED = _counter(
    "logs_archived_bytes", "Bytes of logs that were archived to the object storage, before compression."
)
LOG_ARCHIVE_FAILING = _gauge(
    "log_archive_failing_seconds",
    "Seconds for which no log could be archived to the object storage; 0 while archiving works.",
)
OLDEST_SNAPSHOT = _gauge(
    "oldest_snapshot_seconds", "Age of the oldest snapshot in the database, which keeps dead rows. Seen by the leader."
)

# Running
SLOTS = _gauge("runner_slots", "Maximum number of concurrent attempts of this runner.")
WAITING_RUNNERS = _gauge("waiting_runners", "Runners over HTTPS that wait for work at this API.")
RUNNING = _gauge("attempts_running", "Attempts that are running on this runner.")
TRIGGERS = _gauge("triggers_running", "Triggers of deferred tasks that wait on this runner.")
CLAIMS = _counter("claims", "Tasks claimed by this runner.")
CLAIMS_LOST = _counter("claims_lost", "Claims returned or lost: the reply never arrived, or the lease was taken.")
HANDOFF_SECONDS = _histogram(
    "handoff_latency", "From a finished task to the start of its successor, or from enqueued to claimed."
)
ATTEMPTS_FINISHED = _counter("attempts_finished", "Attempts that ended on this runner, by outcome.", "outcome")
ATTEMPT_CPU = _counter("attempts_cpu_seconds", "CPU time of the attempts that ended on this runner.")
ATTEMPT_MEMORY = Histogram(
    "evertick_attempt_peak_memory_bytes",
    "Peak memory of the attempts that ended on this runner.",
    buckets=[2.0**power for power in range(24, 38)],
    registry=REGISTRY,
)
STALE_WRITES_REFUSED = _counter("stale_writes_refused", "Refused reports of an old epoch or session.")

# Submitting to a remote executor
DISPATCH_QUEUE_DEPTH = _gauge("dispatch_queue_depth", "Attempts that wait in this runner's memory to be submitted.")
DISPATCH_AT_CAPACITY = _counter(
    "dispatch_at_capacity",
    "Ticks in which this runner claimed nothing because its pool, its slots or its executor had no room.",
)
DISPATCH_LATENCY = _histogram(
    "dispatch_latency", "From the claim of a task until its executor has accepted it.", buckets=_LATE
)
DISPATCH_FAILED = _counter(
    "dispatch_failed",
    "Failed executor calls: busy, unavailable, refused, observe (listing attempts), end (of an attempt), or stray.",
    "reason",
)

# Dead runners and orphaned runs
DISPATCH_LOST = _counter("dispatch_lost_tasks", "Queued tasks that their executor no longer knew.")
DISPATCH_LOST_LIST_ERROR = _counter("dispatch_lost_list_error", "Failed searches for lost submissions.")
AGENT_LOST = _counter("agent_lost_tasks", "Tasks taken from a dead runner.")
AGENT_LOST_LIST_ERROR = _counter("agent_lost_list_error", "Failed searches for dead runners.")
ORPHAN_REAPED = _counter("orphan_reaped", "Runs failed because no task in them could progress.")
ORPHAN_REAP_ERROR = _counter("orphan_reap_error", "Orphaned runs that could not be failed.")
ORPHAN_LIST_ERROR = _counter("orphan_list_error", "Failed searches for orphaned runs.")
ORPHAN_PANIC = _counter("orphan_panic", "Searches for orphaned runs that ended unexpectedly.")

# The API
API_REQUESTS = _counter("api_requests", "Answered requests, by the first digit of the status.", "status")
API_SECONDS = _histogram("api_request_duration", "From a request to the start of its response.")
