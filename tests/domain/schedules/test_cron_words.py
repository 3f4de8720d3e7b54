"""Cron expressions in words."""

from __future__ import annotations

import pytest

from evertick.domain.schedules.cron import parse_cron
from evertick.domain.schedules.cron_text import cron_in_words, rule_in_words


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("30 2 * * *", "at 02:30 every day"),
        ("*/15 9-17 * * MON-FRI", "every 15 minutes from 09:00 to 17:59 on Monday to Friday"),
        ("* * * * *", "every minute"),
        ("* * * * * *", "every second"),
        ("0 * * * *", "at minute 0 of every hour"),
        ("0 */2 * * *", "at minute 0 in every 2nd hour (00, 02, 04, 06, 08, 10, … 22) every day"),
        ("*/7 * * * *", "at minutes 0, 7, 14, 21, 28, 35, … 56 of every hour"),
        ("*/20 59 23 * * *", "at 23:59:00, 23:59:20 and 23:59:40 every day"),
        ("*/10 * 2 * * *", "every 10 seconds from 02:00 to 02:59 every day"),
        ("0 0 13 * 5", "at 00:00 on the 13th of the month, and also on Friday"),
        ("0 0 13 * +5", "at 00:00 on the 13th of the month, if that is Friday"),
        ("0 0 1-31 * 5", "at 00:00 every day"),
        ("0 0 L * *", "at 00:00 on the last day of the month"),
        ("0 0 1,LW 1,7 *", "at 00:00 on the 1st and last weekday (Monday to Friday) of the month in January and July"),
        ("0 0 * * 5L", "at 00:00 on the last Friday of the month"),
        ("5 0,23 * * SUN,MON", "at 00:05 and 23:05 on Monday or Sunday"),
        ("0 9 * * TUE-SUN", "at 09:00 on Tuesday to Sunday"),
        ("@yearly", "at 00:00 on the 1st of the month in January"),
    ],
)
def test_an_expression_is_told_in_words(expression: str, words: str) -> None:
    assert cron_in_words(parse_cron(expression, "Europe/Berlin")) == f"{words}, Europe/Berlin time"


def test_the_rule_that_holds_is_told() -> None:
    assert "follows real time" in rule_in_words(parse_cron("0 */2 * * *"))
    assert "right after the gap" in rule_in_words(parse_cron("0 2 * * *"))
