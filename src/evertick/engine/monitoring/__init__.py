"""Operations that observe: they count, predict and expect, and decide nothing about runs."""
