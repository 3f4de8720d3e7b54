"""Where the key of agents' tokens comes from, and that nobody else can read it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evertick.config import Settings
from evertick.domain.agent_token import TokenUse
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import InvalidSettings, Refused
from evertick.services.agent_tokens import AgentTokens, load_agent_keys

KEY = TaskKey(1, 2, 3)


def test_the_first_who_needs_a_key_makes_it_for_its_owner_alone(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    token = AgentTokens(settings).make_start_token(key=KEY, epoch=4, session=5)
    place = tmp_path / "home" / "agent.key"
    assert place.stat().st_mode & 0o777 == 0o600
    bearer = AgentTokens(settings).read(token, TokenUse.START)
    assert (bearer.key, bearer.epoch, bearer.session) == (KEY, 4, 5)
    assert [each.name for each in place.parent.iterdir()] == ["agent.key"]


def test_of_many_who_make_it_at_once_all_have_the_same(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    with ThreadPoolExecutor(8) as pool:
        assert len({keys.keys for keys in pool.map(lambda _: load_agent_keys(settings), range(16))}) == 1


def test_a_new_key_goes_first_and_the_old_one_is_still_accepted(tmp_path: Path) -> None:
    old, new = "a" * 40, "b" * 40
    token = AgentTokens(Settings(agent_key=(old,))).make_attempt_token(key=KEY, epoch=1, session=2)
    AgentTokens(Settings(agent_key=(new, old))).read(token, TokenUse.ATTEMPT)
    with pytest.raises(Refused):
        AgentTokens(Settings(agent_key=(new,))).read(token, TokenUse.ATTEMPT)
    file = tmp_path / "keys"
    file.write_text(f"{new}\n{old}\n")
    file.chmod(0o600)
    AgentTokens(Settings(agent_key_file=file)).read(token, TokenUse.ATTEMPT)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a" * 40)
    file.chmod(0o640)
    with pytest.raises(InvalidSettings, match="chmod 600"):
        AgentTokens(Settings(agent_key_file=file))


def test_where_no_key_can_be_made_the_setting_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSettings, match="EVERTICK_AGENT_KEY"):
        AgentTokens(Settings(agent_key_file=tmp_path / "file" / "key"))


def test_the_key_is_not_shown_with_the_settings() -> None:
    assert "aaaa" not in repr(Settings(agent_key=("a" * 40,)))
