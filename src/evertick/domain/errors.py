"""Every error that Evertick raises on purpose, in one tree. A message names the thing and the next step.

EvertickError
├── UserError                the request cannot be carried out: the message says how to do it instead
│   ├── InvalidDag           a DAG that cannot be published
│   │   ├── MissingPool      it needs a pool that does not exist, or more slots than the pool has
│   │   ├── CyclicDependency its runs would start each other endlessly
│   │   ├── NotOwned         another deployment has a DAG of that name
│   │   └── BrokenFiles      files of a deployment that cannot be loaded, with the reason of each
│   ├── InvalidSchedule      a schedule that cannot be saved
│   ├── InvalidParams        parameters that do not fit the DAG's declaration
│   ├── InvalidTemplate      a template that cannot be rendered
│   ├── NotDeclared          a task requests a name that neither it nor its DAG declares
│   ├── DecryptionFailed     a stored value that no configured key can decrypt
│   ├── BadChoice            a branch returned a name that is not a task after it
│   ├── InvalidSettings      settings that contradict each other
│   ├── InvalidRouting       routing rules or a pattern that cannot be used
│   ├── NotFound             no such DAG, run, task, schedule, runner
│   ├── Conflict             another process changed it first, or it is in the wrong state
│   ├── Unauthenticated      authentication failed: unknown caller or wrong password
│   ├── Forbidden            the caller lacks the permission
│   ├── GitFailed            git could not reach or read a repository
│   ├── RateLimited          rate limit exceeded: wait
│   ├── TooLarge             the request exceeds the size limit
│   └── PreconditionFailed   it changed since it was read: read it again
├── ResultLost               a task's result cannot be read: its file is missing or changed, or its type is unknown here
├── StorageUnavailable       object storage is unreachable or refused a read or a write
├── DeliveryFailed           a notification that its sink did not accept
├── ProviderUnavailable      a sign-in provider is unreachable, or answers nonsense
├── EnvironmentFailed        the environment of a DAG file could not be resolved or built on this machine: try again later
├── ExecutorBusy             a remote executor has no capacity: submissions pause
├── ExecutorUnavailable      a remote executor is unreachable, or does not say whether it accepted a submission
├── SubmissionRefused        a remote executor will never accept this attempt, because of the task's own configuration
├── LeaseLost                the attempt belongs to another owner now: drop the work and report it
├── NotLeader                a write by a scheduler that no longer leads the shard
├── SchemaMismatch           the database's schema and this program are incompatible
├── MigrationBlocked         a migration could not lock a table that another session holds
├── ReportRefused            the database refused a runner's reports, and would refuse them again
├── ApiUnreachable           the API did not answer a request of an agent or a runner: send it again
└── PostgresUnavailable      the database is unreachable or could not be started
    ├── StaleServer          the server was replaced by another: nothing may be written to it
    └── OutcomeUnknown       a write was sent and no reply came: it may have been applied or not
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class EvertickError(Exception):
    """An error that Evertick anticipates."""

    code = "error"


def did_you_mean(name: object, known: Iterable[str], otherwise: str) -> str:
    """`did you mean 'x'?`, or `otherwise` if no known name is similar."""
    from difflib import get_close_matches

    near = get_close_matches(str(name), known, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


class _RetryLater(Exception):
    """`retry_after_seconds`: the pause that was asked for, if any."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class UserError(EvertickError):
    """The request cannot be carried out as it was made."""

    code = "invalid"


class InvalidDag(UserError):
    """The DAG cannot be published. `file` and `line` say where, if known."""

    code = "invalid_dag"

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.file = file
        self.line = line

    def __str__(self) -> str:
        return f"{self.message} ({self.file}, line {self.line})" if self.file else self.message


class MissingPool(InvalidDag):
    """The DAG needs a pool that does not exist, or more slots than the pool has."""


class CyclicDependency(InvalidDag):
    """Each run of the DAG would cause its next one, endlessly."""


class NotOwned(InvalidDag):
    """Another deployment has a DAG of that name."""


class BrokenFiles(InvalidDag):
    """Files of a deployment cannot be loaded, so nothing was published. `verdicts`: what was found in each file."""

    code = "broken_files"

    def __init__(self, message: str, *, verdicts: Iterable[Any] = ()) -> None:
        super().__init__(message)
        self.verdicts = tuple(verdicts)


class InvalidSchedule(UserError):
    """The schedule cannot be saved."""

    code = "invalid_schedule"


class InvalidParams(UserError):
    """The parameters do not fit the DAG's declaration."""

    code = "invalid_params"


class BadChoice(UserError):
    """A branch returned a name that is not a task directly after it."""

    code = "bad_choice"


class InvalidTemplate(UserError):
    """The template cannot be rendered."""

    code = "invalid_template"


class NotDeclared(UserError, KeyError):
    """A task requests a param, variable, connection or secret that is not declared."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would quote it


class DecryptionFailed(UserError):
    """No configured key can decrypt the stored value."""

    code = "secret_locked"


class InvalidSettings(UserError):
    """Two settings contradict each other, or one has an impossible value."""

    code = "invalid_settings"


class InvalidRouting(UserError):
    """A routing rule or a pattern cannot be used."""

    code = "invalid_routing"


class NotFound(UserError):
    """Nothing has that name or id."""

    code = "not_found"


class Conflict(UserError):
    """The object is not in a state that allows this, or another process changed it first."""

    code = "conflict"


class EnvironmentFailed(EvertickError):
    """The Python environment of a DAG file could not be resolved or built here. `is_lasting`: for a long time already."""

    code = "environment_failed"

    def __init__(self, message: str, *, retry_after_seconds: float = 0.0, is_lasting: bool = False) -> None:
        super().__init__(message)
        self.retry_after_seconds, self.is_lasting = retry_after_seconds, is_lasting


class ResultLost(EvertickError):
    """A task's result cannot be read: its file is missing or changed, or its type is unknown here."""

    code = "result_lost"


class StorageUnavailable(EvertickError):
    """Object storage is unreachable or refused a read or a write."""

    code = "storage_unavailable"


class Unauthenticated(UserError):
    """Authentication failed: the caller is unknown or gave a wrong password."""

    code = "refused"


class Forbidden(UserError):
    """The caller lacks the permission for this."""

    code = "forbidden"


class GitFailed(UserError):
    """git could not reach or read a repository."""


class RateLimited(_RetryLater, UserError):
    """Rate limit exceeded: wait, then repeat the request."""

    code = "too_many"


class TooLarge(UserError):
    """The request exceeds the size limit."""

    code = "too_large"


class PreconditionFailed(UserError):
    """The object changed since it was read."""

    code = "stale"


class DeliveryFailed(_RetryLater, EvertickError):
    """A sink did not accept a notification. `is_final`: a retry would fail the same way."""

    code = "delivery_failed"

    def __init__(self, message: str, *, is_final: bool = False, retry_after_seconds: float | None = None) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.is_final = is_final


class ProviderUnavailable(EvertickError):
    """A sign-in provider is unreachable, or its answer cannot be used."""

    code = "provider_unavailable"


class ExecutorBusy(_RetryLater, EvertickError):
    """A remote executor has no capacity now (a quota, too many requests). Uses up no retry."""

    code = "executor_busy"


class ExecutorUnavailable(EvertickError):
    """A remote executor is unreachable, or does not say whether it accepted a submission: an outage, a timeout, a server error."""

    code = "executor_unavailable"


class SubmissionRefused(EvertickError):
    """A remote executor will never accept this attempt, because of the task's own configuration (a bad template). It fails."""

    code = "submission_refused"


class LeaseLost(EvertickError):
    """The attempt was taken away from its owner; its report changes nothing."""

    code = "lease_lost"


class ReportRefused(EvertickError):
    """The database refused the reports of a runner over HTTPS, and would refuse them again."""

    code = "report_refused"


class ApiUnreachable(EvertickError):
    """The API did not answer, or cannot serve the request now: send it again. `problem`: its own error code, if any."""

    code = "unanswered"

    def __init__(self, message: str, *, problem: str = "") -> None:
        super().__init__(message)
        self.problem = problem


class NotLeader(EvertickError):
    """This scheduler no longer leads its shard; its write was rejected."""

    code = "not_leader"


class SchemaMismatch(EvertickError):
    """The database's schema and this program are incompatible."""

    code = "schema_mismatch"


class MigrationBlocked(EvertickError):
    """A migration could not lock a table that another session holds. It changed nothing."""

    code = "migration_blocked"


class PostgresUnavailable(EvertickError):
    """PostgreSQL cannot be reached, or could not be started."""

    code = "postgres_unavailable"


class StaleServer(PostgresUnavailable):
    """The server was replaced by another; nothing may be written to it."""

    code = "wrong_server"


class OutcomeUnknown(PostgresUnavailable):
    """A write was sent and no reply came: it may have been applied or not."""

    code = "answer_lost"
