"""Follows a branch of a git repository, and publishes each new commit as a whole. A broken commit changes nothing.

Nothing is checked out: git writes the files as an archive, so no hook, filter or submodule of the repository runs. Secrets reach
git through its environment, never through a command line or a URL. A webhook only wakes this publisher.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from psycopg import AsyncConnection

from evertick.bundles.archive import MOST_UNPACKED_BYTES, unpack_archive
from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.notify import Channel
from evertick.db.queries import deployments
from evertick.db.queries.deployments import DeploymentRow
from evertick.domain.access import Actor
from evertick.domain.deployments import DeploymentChange, DeploymentKind, one_line
from evertick.domain.errors import BrokenFiles, Conflict, EvertickError, GitFailed, PostgresUnavailable, UserError
from evertick.domain.stored_values import ValueKind
from evertick.engine.deployments import note_deployment
from evertick.observability.health import STALLED_SECONDS, LoopHealth
from evertick.observability.logging import Log
from evertick.publisher.deployment import deploy, deployed_locks, load_folder
from evertick.publisher.publisher import store_import_error
from evertick.runtime.connections import Notifier, ReconnectingConnection, listen_forever
from evertick.runtime.loop import in_background, run_loop
from evertick.runtime.server_watch import SELDOM_SECONDS
from evertick.secrets.backends import SecretProvider

# A fetch of one commit takes seconds. A server that hangs must not stop the publisher.
GIT_SECONDS = 120.0
# Fetched objects accumulate; after so many commits the repository is made again.
_MOST_FETCHES = 200
_PROTOCOLS = ("https", "http", "ssh", "file")
_SSH_PLACE = re.compile(r"(?:[\w.-]+@)?[\w.-]+:(?!//)[\w./~-]+")
_REF = re.compile(r"(?!-)(?!.*(\.\.|//|@\{|\.lock$))[\w./-]{1,200}")
_MOST_OUTPUT_BYTES = 3 * MOST_UNPACKED_BYTES
_PRIVATE_KEY = "-----BEGIN "
# The name of a variable is on the command line; its value is not.
_CREDENTIAL_HELPER = (
    '!f() { test "$1" = get && printf "username=%s\\npassword=%s\\n" "$EVT_GIT_USER" "$EVT_GIT_PASSWORD"; }; f'
)
_PASSED = {
    *("PATH", "HOME", "SSH_AUTH_SOCK", "GIT_SSL_CAINFO", "SSL_CERT_FILE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GitSource:
    """A branch or tag of a repository, and the folder in it with the DAGs. The URL contains no credentials."""

    url: str
    ref: str
    path: str

    def __post_init__(self) -> None:
        check_url(self.url)
        if not _REF.fullmatch(self.ref):
            raise UserError(f"{self.ref[:200]!r} is not the name of a branch or tag, such as main.")
        if self.path.startswith(("/", "-")) or ".." in self.path.split("/") or ":" in self.path:
            raise UserError(
                f"{self.path[:200]!r} is not a folder of the repository: write one such as dags, or . for all."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    hash: str
    author: str | None
    message: str | None


def check_url(url: str) -> None:
    """Refuse an address with credentials, of another protocol, or that git would take for an option."""
    scheme = protocol_of(url)
    parts = urlsplit(url) if "://" in url else None
    if scheme not in _PROTOCOLS or not url.isprintable() or " " in url:
        raise UserError(
            f"{url[:200]!r} is not the address of a repository: write https://…, ssh://…, git@host:path or file://…"
        )
    if parts is not None and (parts.password is not None or (parts.username is not None and scheme != "ssh")):
        raise UserError(
            "The repository's URL must not contain a password or a token: others can see it. Store it as a secret, and name"
            " it with --git-secret."
        )


def protocol_of(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    if separator:
        return scheme.lower()
    return "ssh" if _SSH_PLACE.fullmatch(url) else "unknown"


class GitRepository:
    """The fetched commits of one branch, in a private folder that is made anew by each process."""

    def __init__(self, source: GitSource, *, environment: Mapping[str, str]) -> None:
        self.source = source
        self._environment = {name: value for name, value in environment.items() if name in _PASSED}
        self._folder: Path | None = None
        self._fetches = 0

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._fetches = None, 0

    async def newest(self, secret: str | None) -> str:
        """The hash of the newest commit."""
        with _Credentials(self.source.url, secret) as given:
            names = [self.source.ref, f"refs/heads/{self.source.ref}", f"refs/tags/{self.source.ref}^{{}}"]
            told = await self._git(given, "ls-remote", "--", self.source.url, *names)
        lines = (line.split("\t", 1) for line in told.decode(errors="replace").splitlines() if "\t" in line)
        found = {name: commit for commit, name in lines}
        # A branch takes precedence, and the commit of an annotated tag is listed after the tag itself.
        for name in (*names[1:], f"refs/tags/{self.source.ref}", self.source.ref):
            if name in found:
                return found[name]
        raise GitFailed(f"The repository {self.source.url} has no branch or tag {self.source.ref!r}.")

    async def fetch(self, secret: str | None) -> Commit:
        """Fetch the newest commit, without its history."""
        if self._fetches >= _MOST_FETCHES:
            self.close()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="evertick-git-"))
            await self._git(None, "init", "--quiet", "--bare", "--template=", str(self._folder))
        self._fetches += 1
        try:
            with _Credentials(self.source.url, secret) as given:
                options = ("--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules", "--no-auto-gc", "--force")
                await self._git(given, *self._here, "fetch", *options, "--", self.source.url, self.source.ref)
            told = await self._git(None, *self._here, "log", "-1", "--format=%H%x00%an <%ae>%x00%s", "FETCH_HEAD")
        except GitFailed:
            self.close()
            raise
        commit, author, message = told.decode(errors="replace").strip().split("\0", 2)
        return Commit(hash=commit, author=one_line(author), message=one_line(message))

    async def unpack(self, commit: Commit, folder: Path) -> None:
        """Write the files of the source's folder, as they are in a commit."""
        path = self.source.path.strip("/").removeprefix("./")
        tree = commit.hash if path in ("", ".") else f"{commit.hash}:{path}"
        try:
            archive = await self._git(None, *self._here, "archive", "--format=tar.gz", tree)
        except GitFailed as error:
            raise UserError(f"Commit {commit.hash[:12]} has no folder {path!r} that can be read: {error}") from None
        await asyncio.to_thread(unpack_archive, io.BytesIO(archive), folder)

    @property
    def _here(self) -> tuple[str, str]:
        return ("--git-dir", str(self._folder))

    async def _git(self, credentials: _Credentials | None, *arguments: str) -> bytes:
        """The output of a git command. Nothing outside its arguments and this environment configures it."""
        environment = {
            **self._environment,
            "LC_ALL": "C.UTF-8",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            # Neither a redirect nor a repository can lead to another protocol.
            "GIT_ALLOW_PROTOCOL": protocol_of(self.source.url),
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
            **(credentials.environment if credentials else {}),
        }
        options = ["core.hooksPath=/dev/null", "http.followRedirects=false", "credential.helper=", "gc.auto=0"]
        options += ["http.lowSpeedLimit=1000", "http.lowSpeedTime=30", "protocol.version=2", "safe.directory=*"]
        if credentials is not None and credentials.is_password:
            options.append(f"credential.helper={_CREDENTIAL_HELPER}")
        try:
            process = await asyncio.create_subprocess_exec(
                "git",
                *(part for each in options for part in ("-c", each)),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise GitFailed(
                "git is not installed: install it where this publisher runs, for example apt install git."
            ) from None
        try:
            async with asyncio.timeout(GIT_SECONDS):
                output, told = await asyncio.gather(
                    _read(process.stdout, _MOST_OUTPUT_BYTES), _read(process.stderr, 100_000)
                )
                status = await process.wait()
        except TimeoutError:
            raise GitFailed(f"git did not finish within {GIT_SECONDS:g} s for {self.source.url}.") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if status != 0:
            text = credentials.hide(told.decode(errors="replace")) if credentials else told.decode(errors="replace")
            raise GitFailed(
                f"git {_verb(arguments)} failed for {self.source.url}: {one_line(text) or f'status {status}'}"
            )
        return output


def _verb(arguments: tuple[str, ...]) -> str:
    return next((each for each in arguments if each in ("init", "fetch", "ls-remote", "log", "archive")), "command")


async def _read(stream: asyncio.StreamReader | None, most: int) -> bytes:
    assert stream is not None
    found = bytearray()
    while chunk := await stream.read(65_536):
        found += chunk
        if len(found) > most:
            raise GitFailed(f"git wrote more than {most:,} bytes.")
    return bytes(found)


class _Credentials:
    """A token, `user:password`, or a private SSH key, for as long as one command runs. A key is in a private file meanwhile."""

    def __init__(self, url: str, secret: str | None) -> None:
        self._url, self._secret = url, secret
        self._key: Path | None = None
        self.is_password = secret is not None and not secret.startswith(_PRIVATE_KEY)
        self.environment: dict[str, str] = {}

    def __enter__(self) -> _Credentials:
        if self._secret is None:
            return self
        if self.is_password:
            if protocol_of(self._url) == "http" and not _is_loopback(urlsplit(self._url).hostname or ""):
                raise UserError(f"A secret is not sent to {self._url}, because http is not encrypted. Use https.")
            user, colon, password = self._secret.partition(":")
            # The services accept any user name with a token.
            self.environment = {
                "EVT_GIT_USER": user if colon else "x-access-token",
                "EVT_GIT_PASSWORD": password if colon else user,
            }
            return self
        descriptor, name = tempfile.mkstemp(prefix="evertick-key-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(self._secret.rstrip("\n") + "\n")
        self._key = Path(name)
        self.environment = {"GIT_SSH_COMMAND": f"ssh -oBatchMode=yes -oIdentitiesOnly=yes -i {name}"}
        return self

    def __exit__(self, *_: object) -> None:
        if self._key is not None:
            self._key.unlink(missing_ok=True)

    def hide(self, text: str) -> str:
        """The text without the secret, which git does not write, but a server might, also as it received it."""
        user, password = self.environment.get("EVT_GIT_USER", ""), self.environment.get("EVT_GIT_PASSWORD", "")
        sent = base64.b64encode(f"{user}:{password}".encode()).decode() if password else ""
        for part in {self._secret or "", password, sent} - {""}:
            text = text.replace(part, "***")
        return text


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


# A commit that could not be published is tried again after this long: a missing pool may exist by then.
RETRY_SECONDS, AGAIN_SECONDS = 60.0, 1.0
_ACTOR = Actor("publisher")


class GitPublisher:
    """Keeps one deployment in step with a branch."""

    def __init__(self, settings: Settings, *, url: str, environment: Mapping[str, str], log: Log) -> None:
        """`environment` is the environment that DAG files see while they are loaded."""
        assert settings.git_url is not None
        self._settings, self._url, self._environment, self._log = settings, url, environment, log
        self._source = GitSource(url=settings.git_url, ref=settings.git_ref, path=settings.git_path)
        self._name = settings.deployment
        self._described: dict[str, object] = {**asdict(self._source), "webhook_secret": settings.git_webhook_secret}
        self._repository = GitRepository(self._source, environment=environment)
        self._secrets = SecretProvider(settings)
        self._link = ReconnectingConnection(url, Purpose.SCHEDULER)
        self._notifier = Notifier(url, is_enabled=settings.listen_notify, log=log, look_seconds=SELDOM_SECONDS)
        self._refused, self._refused_at = "", 0.0
        self._told: str | None = None
        self._pulse = LoopHealth("publisher", longest_tick_seconds=2 * GIT_SECONDS + STALLED_SECONDS)
        self.wake, self.stop = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        works = [self._notifier.run()]
        if self._settings.listen_notify:
            works.append(listen_forever(self._url, [Channel.DEPLOY], lambda _: self.wake.set(), log=self._log))
        try:
            async with in_background(*works):
                await run_loop(
                    self.tick, wake=self.wake, stop=self.stop, name="publisher", log=self._log, pulse=self._pulse
                )
        finally:
            self._repository.close()
            await self._notifier.close()
            await self._link.close()

    async def tick(self) -> float:
        """Publish the newest commit if it is not published. Returns the seconds to the next look."""
        conn = await self._link.get()
        row = await deployments.find(conn, self._name)
        problem, delay = None, min(self._settings.git_poll_seconds, RETRY_SECONDS)
        try:
            secret = await self._secret()
            newest = await self._repository.newest(secret)
            if self._is_refused(newest):
                problem = self._told
            elif newest != self._published(row):
                await self._publish_newest(conn, row, secret)
        except PostgresUnavailable:
            raise
        except Conflict as error:
            # Another publisher was first, or an operator rolled back: look again.
            self._refused, problem, delay = "", str(error), AGAIN_SECONDS
        except EvertickError as error:
            problem = str(error)
        await self._note(conn, problem)
        return delay

    def _published(self, row: DeploymentRow | None) -> str | None:
        """The commit that was published last. After a rollback, too: only a newer commit replaces what was restored."""
        return row.published_commit if row is not None and row.kind == DeploymentKind.GIT and row.version else None

    def _is_refused(self, commit: str) -> bool:
        return commit == self._refused and time.monotonic() - self._refused_at < RETRY_SECONDS

    async def _secret(self) -> str | None:
        """Read each time, so that a new value needs no restart."""
        name = self._settings.git_secret
        if name is None:
            return None
        wanted = (ValueKind.SECRET.value, name)
        return (await self._secrets.values(self._secrets.stored(self._link.get), [wanted]))[wanted]

    async def _publish_newest(self, conn: AsyncConnection, row: DeploymentRow | None, secret: str | None) -> None:
        commit = await self._repository.fetch(secret)
        try:
            await self._publish(conn, row, commit)
        except EvertickError:
            self._refused, self._refused_at = commit.hash, time.monotonic()
            raise

    async def _publish(self, conn: AsyncConnection, row: DeploymentRow | None, commit: Commit) -> None:
        change = DeploymentChange(
            name=self._name,
            kind=DeploymentKind.GIT,
            source=self._described,
            expected=row.version if row is not None else 0,
            is_whole=True,
            commit_hash=commit.hash,
            author=commit.author,
            message=commit.message,
        )
        with TemporaryDirectory(prefix="evertick-deploy-", ignore_cleanup_errors=True) as folder:
            await self._repository.unpack(commit, Path(folder))
            try:
                known = await deployed_locks(conn, self._name)
                loaded = await load_folder(Path(folder), self._settings, self._environment, known)
                done = await deploy(conn, loaded, change, settings=self._settings, actor=_ACTOR)
            except BrokenFiles as error:
                for verdict in error.verdicts:
                    if verdict.error is not None:
                        await store_import_error(conn, self._name, verdict.file, verdict.error)
                raise
        self._log.info(
            "deployment_published",
            deployment=self._name,
            version=done.version,
            commit=commit.hash,
            author=commit.author,
            is_new=done.is_new,
        )
        self._notifier.wake(Channel.SCHEDULE)

    async def _note(self, conn: AsyncConnection, problem: str | None) -> None:
        """Show a problem with the deployment, and log it once."""
        row = await deployments.find(conn, self._name)
        if row is None or (row.problem, row.source) != (problem, self._described):
            await note_deployment(
                conn, name=self._name, kind=DeploymentKind.GIT, source=self._described, problem=problem
            )
        if problem is not None and problem != self._told:
            self._log.error("deployment_failed", deployment=self._name, message=problem)
        self._told = problem
        self._pulse.blocked = problem
