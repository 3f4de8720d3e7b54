"""A schedule to measure delays. Its interval is not a whole fraction of a second, so that it meets every phase of other work."""

import time

from evertick import dag, task


def fib(number):
    return number if number < 2 else fib(number - 1) + fib(number - 2)


@task
def light():
    started = time.time()
    print("fib(10) =", fib(10))
    return [started, time.time()]


@dag(schedule="@every 230ms")
def ticking():
    light()
