# /// script
# dependencies = []
# ///
"""The chain of `light.py` in a Python environment of its own."""

from light import CHAIN, body

from evertick import dag, task


def declare(isolation):
    light = task(name="light", isolation=isolation)(body)

    @dag(name=f"chain_env_{isolation}")
    def chain():
        last = light()
        for _ in range(CHAIN - 1):
            following = light()
            last >> following
            last = following

    return chain


chain_process, chain_warm = declare("process"), declare("warm")
