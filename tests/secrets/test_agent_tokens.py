"""A token opens the routes of one attempt, for one use, for a limited time; without the key no token can be made or changed."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jwt
import pytest

from evertick.config import Settings
from evertick.domain.agent_protocol import AgentIdentity, TokenUse
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import InvalidSettings, Unauthenticated
from evertick.secrets.agent_tokens import (
    CLOCK_LEEWAY_SECONDS,
    PREFIX,
    AgentKeys,
    AgentTokens,
    load_agent_keys,
    new_agent_key,
)

TASK = TaskKey(1, 2, 3)
KEY, OTHER = "k" * 43, "o" * 43
INVALID = "not a valid token"


def bearer(*, use: TokenUse = TokenUse.START, seconds: int = 60) -> AgentIdentity:
    expires_at = int(time.time()) + seconds
    return AgentIdentity(use=use, key=TaskKey(7, 2, -1), epoch=3, session=2**63 - 1, expires_at=expires_at)


def forged(claims: dict[str, Any], *, key: str = KEY, algorithm: str = "HS256") -> str:
    """A token that differs from a valid one in some claims; None removes one."""
    token = AgentKeys((KEY,)).sign(bearer()).removeprefix(PREFIX)
    valid = jwt.decode(token, options={"verify_signature": False})
    changed = {name: value for name, value in (valid | claims).items() if value is not None}
    headers = {"kid": jwt.get_unverified_header(token)["kid"]}
    return PREFIX + jwt.encode(changed, key, algorithm=algorithm, headers=headers)


def test_a_signed_token_is_verified() -> None:
    token = AgentKeys((KEY,)).sign(expected := bearer())
    assert AgentKeys((KEY,)).verify(token, TokenUse.START) == expected


def test_a_second_key_verifies_and_another_key_does_not() -> None:
    token = AgentKeys((KEY,)).sign(expected := bearer())
    assert AgentKeys((OTHER, KEY)).verify(token, TokenUse.START) == expected
    with pytest.raises(Unauthenticated, match=INVALID):
        AgentKeys((OTHER,)).verify(token, TokenUse.START)


def test_a_changed_character_is_refused_wherever_it_is() -> None:
    # Of many tokens, so that each last character of a signature occurs: two of its bits mean nothing to the decoder.
    for seconds in range(60, 100):
        token = AgentKeys((KEY,)).sign(bearer(seconds=seconds))
        places = range(len(token)) if seconds == 60 else [len(token) - 1]
        for place in places:
            changed = token[:place] + ("A" if token[place] != "A" else "B") + token[place + 1 :]
            with pytest.raises(Unauthenticated):
                AgentKeys((KEY,)).verify(changed, TokenUse.START)


@pytest.mark.parametrize(
    "text",
    [
        *("", "eva_", "eva_.", "eva_..", "evt_something", "eva_é.é", "eva_" + "A" * 5000 + ".x", "Bearer x"),
        f"eva_e30.e30.{'A' * 43}",
        f"eva_W10.e30.{'A' * 43}",
        f"eva_AAAA.AAAA.{'A' * 43}",
    ],
)
def test_a_text_that_is_not_a_token_is_refused(text: str) -> None:
    with pytest.raises(Unauthenticated, match=INVALID):
        AgentKeys((KEY,)).verify(text, TokenUse.START)


def test_a_token_without_a_signature_or_with_another_algorithm_is_refused() -> None:
    for algorithm, key in (("none", ""), ("HS512", KEY * 2), ("HS384", KEY * 2)):
        with pytest.raises(Unauthenticated, match=INVALID):
            AgentKeys((KEY,)).verify(forged({}, key=key, algorithm=algorithm), TokenUse.START)
        # The same header with a signature of the right length.
        head, body, _ = forged({}, key=key, algorithm=algorithm).split(".")
        with pytest.raises(Unauthenticated, match=INVALID):
            AgentKeys((KEY,)).verify(f"{head}.{body}.{'A' * 43}", TokenUse.START)


@pytest.mark.parametrize("claims", [{"iss": "other"}, {"iss": None}, {"aud": None}, {"exp": None}, {"exp": "x"}])
def test_a_token_that_another_program_signed_with_the_key_is_refused(claims: dict[str, Any]) -> None:
    with pytest.raises(Unauthenticated):
        AgentKeys((KEY,)).verify(forged(claims), TokenUse.START)
    assert AgentKeys((KEY,)).verify(forged({}), TokenUse.START)


def test_a_token_is_valid_for_its_use_only() -> None:
    keys = AgentKeys((KEY,))
    with pytest.raises(Unauthenticated, match="can only start an attempt"):
        keys.verify(keys.sign(bearer()), TokenUse.ATTEMPT)
    with pytest.raises(Unauthenticated, match="needs its start token"):
        keys.verify(keys.sign(bearer(use=TokenUse.ATTEMPT)), TokenUse.START)


def test_a_token_expires_after_a_leeway_for_clocks_that_differ() -> None:
    keys = AgentKeys((KEY,))
    late = bearer(seconds=10 - CLOCK_LEEWAY_SECONDS)
    assert keys.verify(keys.sign(late), TokenUse.START) == late
    with pytest.raises(Unauthenticated, match="expired"):
        keys.verify(keys.sign(bearer(seconds=-1 - CLOCK_LEEWAY_SECONDS)), TokenUse.START)


def test_a_short_key_is_refused() -> None:
    assert AgentKeys((new_agent_key(),))
    with pytest.raises(InvalidSettings, match="shorter than 32"):
        AgentKeys((KEY, "short"))
    with pytest.raises(InvalidSettings, match="EVERTICK_AGENT_KEY"):
        AgentKeys(())


def test_keys_are_not_shown() -> None:
    assert KEY not in repr(AgentKeys((KEY,)))
    assert "aaaa" not in repr(Settings(agent_key=("a" * 40,)))


def test_the_first_process_that_needs_a_key_creates_it_for_its_owner_alone(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    token = AgentTokens(settings).make_start_token(key=TASK, epoch=4, session=5)
    place = tmp_path / "home" / "agent.key"
    assert place.stat().st_mode & 0o777 == 0o600
    found = AgentTokens(settings).read(token, TokenUse.START)
    assert (found.key, found.epoch, found.session) == (TASK, 4, 5)
    assert [each.name for each in place.parent.iterdir()] == ["agent.key"]


def test_processes_that_create_the_key_at_once_have_the_same(tmp_path: Path) -> None:
    settings, one = Settings(home=tmp_path), bearer()
    with ThreadPoolExecutor(8) as pool:
        assert len({keys.sign(one) for keys in pool.map(lambda _: load_agent_keys(settings), range(16))}) == 1


def test_a_new_key_signs_and_the_old_one_is_still_accepted(tmp_path: Path) -> None:
    old, new = "a" * 40, "b" * 40
    token = AgentTokens(Settings(agent_key=(old,))).make_attempt_token(key=TASK, epoch=1, session=2)
    AgentTokens(Settings(agent_key=(new, old))).read(token, TokenUse.ATTEMPT)
    with pytest.raises(Unauthenticated):
        AgentTokens(Settings(agent_key=(new,))).read(token, TokenUse.ATTEMPT)
    file = tmp_path / "keys"
    file.write_text(f"{new}\n{old}\n")
    file.chmod(0o600)
    AgentTokens(Settings(agent_key_file=file)).read(token, TokenUse.ATTEMPT)


def test_a_key_that_other_users_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a" * 40)
    file.chmod(0o640)
    with pytest.raises(InvalidSettings, match="chmod 600"):
        AgentTokens(Settings(agent_key_file=file))


def test_where_no_key_can_be_created_the_setting_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSettings, match="EVERTICK_AGENT_KEY"):
        AgentTokens(Settings(agent_key_file=tmp_path / "file" / "key"))


def test_the_library_is_loaded_only_where_tokens_are_used() -> None:
    """Runners of local tasks, schedulers, agents and the process that forks services do not pay for it."""
    code = """
import sys, evertick.cli.main, evertick.supervisor.fork_server, evertick.attempts.fork_server_main
from evertick.cli.commands.services import preload
for service in ("runner", "scheduler", "agent"):
    preload(service)
sys.exit('jwt' in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
