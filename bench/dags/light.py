"""The light workloads: a chain of forty, one to a hundred to one, and a single task, each with both kinds of isolation.

And a slower task, so that runners fill all of their slots before the measurement.

Every body does what every peer's body does: stamps its start, computes fib(10), prints a line, stamps its end.
"""

import time

from evertick import dag, task

CHAIN, WIDTH, HELD_SECONDS = 40, 100, 0.5


def fib(number):
    return number if number < 2 else fib(number - 1) + fib(number - 2)


def body():
    started = time.time()
    print("fib(10) =", fib(10))
    return [started, time.time()]


def take_a_while():
    started = time.time()
    time.sleep(HELD_SECONDS)
    print("held")
    return [started, time.time()]


def declare(isolation):
    """The four DAGs with this isolation, which is part of their names."""
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

    @dag(name=f"held_{isolation}")
    def held():
        task(name="take_a_while", isolation=isolation)(take_a_while)()

    return chain, fan, single, held


chain_process, fan_process, single_process, held_process = declare("process")
chain_warm, fan_warm, single_warm, held_warm = declare("warm")
