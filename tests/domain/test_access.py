"""Passwords that are refused, and the network that an address belongs to."""

from __future__ import annotations

import pytest

from evertick.domain.access import check_password, network_of
from evertick.domain.errors import UserError


@pytest.mark.parametrize(
    "password",
    [
        *(
            "password",
            "Password1!",
            "passw0rd",
            "12345678",
            "87654321",
            "aaaaaaaa",
            "abababab",
            "abcdefgh",
            "qwertyuiop",
            "1q2w3e4r",
        ),
        *("christine", "Christine", "christine2026!", "evertick", "admin123", "iloveyou", "changeme", "short"),
    ],
)
def test_a_password_that_is_tried_first_is_refused(password: str) -> None:
    with pytest.raises(UserError):
        check_password(password, "christine")


@pytest.mark.parametrize(
    "password", ["correct horse battery", "a horse!", "password of my cat", "k8Jd0-xQ", "christine in June"]
)
def test_other_passwords_are_accepted(password: str) -> None:
    assert check_password(password, "christine") == password


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::ffff", "2001:db8:1:2::/64"),
        ("unknown", "unknown"),
    ],
)
def test_addresses_of_one_subscriber_are_one_network(address: str, network: str) -> None:
    assert network_of(address) == network
