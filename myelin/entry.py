"""Runs an async `main` from a plain script."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from myelin.runtime.event_loop import new_event_loop

Result = TypeVar("Result")


def run(main: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run `main()` to its end on uvloop, or on asyncio's own loop where that is not installed.

    Ctrl-C cancels it, so that `async with` blocks are left in order. In a notebook, which has a
    running loop already, write `await main()` instead.

    Raises:
        RuntimeError: a loop is running in this thread already.
    """
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main())
