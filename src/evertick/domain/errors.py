"""Every error that Evertick raises on purpose, in one tree. A message names the thing and the next step.

EvertickError
├── UserError                what the caller asked for cannot be done: tell them how to do it instead
│   ├── InvalidDag           a DAG that cannot be published
│   │   ├── LacksPool        it needs a pool that is not there, or more of one than it has
│   │   └── EndlessLoop      it would start itself again for ever
│   ├── InvalidSchedule      a schedule that cannot be saved
│   ├── InvalidParams        parameters that do not fit the DAG's declaration
│   ├── InvalidTemplate      a template that cannot be rendered
│   ├── NotDeclared          a task asks by name for what it, or its DAG, does not declare
│   ├── SecretLocked         a stored value that no key here can read
│   ├── BadChoice            a branch returned what is no task after it
│   ├── InvalidSettings      settings that contradict each other
│   ├── InvalidRouting       routing rules or a pattern that cannot be used
│   ├── NotFound             no such DAG, run, task, schedule, runner
│   ├── Conflict             somebody else changed it first, or it is in the wrong state
│   ├── Refused              who asks is not known, or has the wrong password
│   ├── Forbidden            who asks may not do this
│   ├── TooMany              asked too often: wait
│   ├── TooLarge             a request that is larger than any needs to be
│   └── Stale                it changed since it was read: read it again
├── ResultLost               a task's result cannot be read: its file is gone or changed, or its type is unknown here
├── StorageUnavailable       object storage cannot be reached, or does not take or give what it should
├── DeliveryFailed           a notification that its sink did not take
├── ExecutorBusy             an executor elsewhere has no room now: nobody hands over anything for a while
├── ExecutorUnavailable      an executor elsewhere cannot be reached, or does not say whether it took something
├── SubmissionRefused        an executor elsewhere will never take this attempt, by the task's own fault
├── LeaseLost                an attempt's owner was replaced: drop the work and say so
├── NotLeader                a planning write by a scheduler that no longer leads
├── SchemaMismatch           the database's schema and this program do not fit each other
├── MigrationBlocked         a migration could not have a table that somebody else keeps
├── Unanswered               an agent's question that the API did not answer: ask again
└── PostgresUnavailable      the database cannot be reached or could not be started
    ├── WrongServer          a server answers that was replaced by another: nothing may be written to it
    └── AnswerLost           a change was asked for and no answer came: it may have been made or not
"""

from __future__ import annotations


class EvertickError(Exception):
    """Something that Evertick foresaw went wrong."""

    code = "error"


class UserError(EvertickError):
    """The request cannot be carried out as it was made."""

    code = "invalid"


class InvalidDag(UserError):
    """The DAG cannot be published. `file` and `line` say where, as far as that is known."""

    code = "invalid_dag"

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.file = file
        self.line = line

    def __str__(self) -> str:
        return f"{self.message} ({self.file}, line {self.line})" if self.file else self.message


class LacksPool(InvalidDag):
    """The DAG needs a pool that is not there, or more of one than it has."""


class EndlessLoop(InvalidDag):
    """Each run of the DAG would bring about its next one, for ever."""


class InvalidSchedule(UserError):
    """The schedule cannot be saved."""

    code = "invalid_schedule"


class InvalidParams(UserError):
    """The parameters do not fit the DAG's declaration."""

    code = "invalid_params"


class BadChoice(UserError):
    """A branch returned what is no task directly after it."""

    code = "bad_choice"


class InvalidTemplate(UserError):
    """The template cannot be rendered."""

    code = "invalid_template"


class NotDeclared(UserError, KeyError):
    """A task asks for a param, variable, connection or secret that is not declared."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would quote it


class SecretLocked(UserError):
    """No key here can read the stored value."""

    code = "secret_locked"


class InvalidSettings(UserError):
    """Two settings contradict each other, or one has an impossible value."""

    code = "invalid_settings"


class InvalidRouting(UserError):
    """A routing rule or a pattern cannot be used."""

    code = "invalid_routing"


class NotFound(UserError):
    """There is nothing by that name or id."""

    code = "not_found"


class Conflict(UserError):
    """The thing is not in a state that allows this, or somebody changed it first."""

    code = "conflict"


class ResultLost(EvertickError):
    """A task's result cannot be read: its file is gone or changed, or its type is unknown here."""

    code = "result_lost"


class StorageUnavailable(EvertickError):
    """Object storage cannot be reached, or does not take or give what it should."""

    code = "storage_unavailable"


class Refused(UserError):
    """Who asks is not known, or has the wrong password."""

    code = "refused"


class Forbidden(UserError):
    """Who asks may not do this."""

    code = "forbidden"


class TooMany(UserError):
    """Asked too often: wait, and ask again."""

    code = "too_many"

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class TooLarge(UserError):
    """The request is larger than any needs to be."""

    code = "too_large"


class Stale(UserError):
    """It changed since it was read."""

    code = "stale"


class DeliveryFailed(EvertickError):
    """A sink did not take a notification. `is_final`: another try would end the same."""

    code = "delivery_failed"

    def __init__(self, message: str, *, is_final: bool = False, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.is_final, self.retry_after_seconds = is_final, retry_after_seconds


class ExecutorBusy(EvertickError):
    """An executor elsewhere has no room now (a quota, too many requests). Counts against no budget."""

    code = "executor_busy"

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ExecutorUnavailable(EvertickError):
    """An executor elsewhere cannot be reached, or does not say whether it took something: an outage, a time-out, its own error."""

    code = "executor_unavailable"


class SubmissionRefused(EvertickError):
    """An executor elsewhere will never take this attempt, by the task's own fault (a bad template): it failed with that reason."""

    code = "submission_refused"


class LeaseLost(EvertickError):
    """The attempt was taken away from its owner; its report changes nothing."""

    code = "lease_lost"


class Unanswered(EvertickError):
    """The API did not answer, or cannot do it now: to be asked again."""

    code = "unanswered"


class NotLeader(EvertickError):
    """This scheduler no longer leads its shard; its planning write was refused."""

    code = "not_leader"


class SchemaMismatch(EvertickError):
    """The database's schema and this program do not fit each other."""

    code = "schema_mismatch"


class MigrationBlocked(EvertickError):
    """A migration could not have a table that somebody else keeps. It changed nothing."""

    code = "migration_blocked"


class PostgresUnavailable(EvertickError):
    """PostgreSQL cannot be reached, or could not be started."""

    code = "postgres_unavailable"


class WrongServer(PostgresUnavailable):
    """A server answers that was replaced by another; nothing may be written to it."""

    code = "wrong_server"


class AnswerLost(PostgresUnavailable):
    """A change was asked for and no answer came: it may have been made or not."""

    code = "answer_lost"
