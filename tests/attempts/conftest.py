"""Fixtures for the executor's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attempts.http_host import served


@pytest.fixture
def url() -> Iterator[str]:
    with served() as address:
        yield address
