"""The light workloads: a chain of forty, one to a hundred to one, and a single task, each isolated in both ways.

Every body does what every peer's body does: stamps its start, computes fib(10), prints a line, stamps its end.
"""

import time

from evertick import dag, task

CHAIN, WIDTH = 40, 100


def fib(number):
    return number if number < 2 else fib(number - 1) + fib(number - 2)


def body():
    started = time.time()
    print("fib(10) =", fib(10))
    return [started, time.time()]


def declare(isolation):
    """The three DAGs whose tasks are isolated like this, under names that say so."""
    light = task(name="light", isolation=isolation)(body)

    @dag(name=f"chain_{isolation}")
    def chain():
        last = light()
        for _ in range(CHAIN - 1):
            following = light()
            last >> following
            last = following

    @dag(name=f"fan_{isolation}")
    def fan():
        light() >> [light() for _ in range(WIDTH)] >> light()

    @dag(name=f"single_{isolation}")
    def single():
        light()

    return chain, fan, single


chain_process, fan_process, single_process = declare("process")
chain_warm, fan_warm, single_warm = declare("warm")
