"""Many programs compiled side by side, so that a few minutes on a GPU are not spent on waiting for one core."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax

Key = TypeVar("Key")
_MOST_WORKERS = 16


def compile_all(
    programs: Mapping[Key, Callable[[], jax.stages.Lowered]],
) -> dict[Key, Callable[[], Any]]:
    """Lowers every program in turn and compiles them side by side; returns when all are done.

    Args:
        programs: what lowers each of them.

    Returns:
        for each key a function that returns the compiled program, or raises what lowering or compiling it raised.
    """
    with ThreadPoolExecutor(max(1, min(_MOST_WORKERS, (os.cpu_count() or 2) - 1))) as pool:
        futures = {key: _submit(pool, lower) for key, lower in programs.items()}
    return {key: future.result for key, future in futures.items()}


def _submit(pool: ThreadPoolExecutor, lower: Callable[[], jax.stages.Lowered]) -> Future:
    try:
        return pool.submit(lower().compile)
    except Exception as error:
        failed: Future = Future()
        failed.set_exception(error)
        return failed
