"""A token opens one attempt's door, for one use, for a while; nobody without the key can make or change one."""

from __future__ import annotations

import pytest

from evertick.domain.agent_token import CLOCK_LEEWAY_SECONDS, AgentKeys, Bearer, TokenUse, new_agent_key
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import InvalidSettings, Refused

BEARER = Bearer(use=TokenUse.START, key=TaskKey(7, 2, -1), epoch=3, session=2**63 - 1, expires_at=1000.0)
KEY, OTHER = "k" * 43, "o" * 43


def read(keys: AgentKeys, token: str, *, use: TokenUse = TokenUse.START, now: float = 999.0) -> Bearer:
    return keys.read(token, use=use, now=now)


def test_what_was_signed_is_read_again() -> None:
    assert read(AgentKeys((KEY,)), AgentKeys((KEY,)).sign(BEARER)) == BEARER


def test_another_key_reads_nothing_and_a_second_key_still_reads() -> None:
    token = AgentKeys((KEY,)).sign(BEARER)
    assert read(AgentKeys((OTHER, KEY)), token) == BEARER
    with pytest.raises(Refused, match="no token"):
        read(AgentKeys((OTHER,)), token)


def test_a_changed_character_is_refused_wherever_it_is() -> None:
    token = AgentKeys((KEY,)).sign(BEARER)
    for place in range(len(token)):
        changed = token[:place] + ("A" if token[place] != "A" else "B") + token[place + 1 :]
        # The last character of a signature has bits that mean nothing; the text is compared as it is, so even those count.
        with pytest.raises(Refused):
            read(AgentKeys((KEY,)), changed)


@pytest.mark.parametrize(
    "text", ["", "eva_", "eva_.", "evt_something", "eva_é.é", "eva_" + "A" * 5000 + ".x", "Bearer x"]
)
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="no token"):
        read(AgentKeys((KEY,)), text)


def test_a_token_is_good_for_its_use_alone() -> None:
    with pytest.raises(Refused, match="to start an attempt, and is good for nothing else"):
        read(AgentKeys((KEY,)), AgentKeys((KEY,)).sign(BEARER), use=TokenUse.ATTEMPT)


def test_it_ends_with_its_time_and_a_little_more_for_clocks_that_differ() -> None:
    keys = AgentKeys((KEY,))
    token = keys.sign(BEARER)
    assert read(keys, token, now=1000.0 + CLOCK_LEEWAY_SECONDS) == BEARER
    with pytest.raises(Refused, match="expired"):
        read(keys, token, now=1000.1 + CLOCK_LEEWAY_SECONDS)


def test_a_key_that_could_be_guessed_is_no_key() -> None:
    assert AgentKeys((new_agent_key(),))
    with pytest.raises(InvalidSettings, match="shorter than 32"):
        AgentKeys((KEY, "short"))
    with pytest.raises(InvalidSettings, match="EVERTICK_AGENT_KEY"):
        AgentKeys(())


def test_keys_are_not_shown() -> None:
    assert KEY not in repr(AgentKeys((KEY,)))
