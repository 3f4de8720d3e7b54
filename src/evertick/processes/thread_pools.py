"""Imports numeric libraries (numpy, pandas, …) without the threads of their pools: a process with threads cannot be forked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# OpenBLAS starts a thread per further core when it is imported, MKL and OpenMP when they are first used.
_SIZES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def without_pool_threads() -> Iterator[None]:
    """Libraries imported within use one thread, unless the user sets the sizes of the pools. Programs that a task starts do not
    inherit this, and a task can enlarge the pools of its own process."""
    added = [name for name in _SIZES if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
