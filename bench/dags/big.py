"""One large DAG: a task, WIDTH downstream tasks, and one task after all of them. The smoke test makes it smaller."""

import time

from evertick import dag, task

WIDTH = 9_998


def fib(number):
    return number if number < 2 else fib(number - 1) + fib(number - 2)


@task(isolation="warm")
def light():
    started = time.time()
    print("fib(10) =", fib(10))
    return [started, time.time()]


@dag
def big():
    light() >> [light() for _ in range(WIDTH)] >> light()
