"""Runs an async `main` from a plain script."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from myelin.models.checks import shown
from myelin.runtime.event_loop import new_event_loop

Result = TypeVar("Result")


def run(main: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run `main()` to its end on uvloop, or on asyncio's own loop where that is not installed.

    Ctrl-C cancels it, so that `async with` blocks are left in order. In a notebook, which has a
    running loop already, write `await main()` instead.

    Raises:
        RuntimeError: a loop is running in this thread already.
        TypeError: `main` is no async function, or was called already.
    """
    name = getattr(main, "__name__", "main")
    given = f"{name}()" if _closed(main) else name
    if _is_running():
        raise RuntimeError(
            f"an event loop is running here already, as in a notebook or in `python -m asyncio`: "
            f"write `await {name}()` instead of `myelin.run({given})`"
        )
    if given != name:
        raise TypeError(
            f"myelin.run was given {given}, which is a coroutine: pass the function itself, "
            f"`myelin.run({name})`; arguments go in with "
            f"`myelin.run(functools.partial({name}, ...))`"
        )
    if not callable(main):
        raise TypeError(f"myelin.run was given {shown(main)}: pass an `async def` function")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_called(main, name))


def _closed(main: object) -> bool:
    """Tell whether it is a coroutine, and close it, so that nothing warns of it later."""
    if not inspect.iscoroutine(main):
        return False
    main.close()
    return True


def _called(
    main: Callable[[], Coroutine[Any, Any, Result]], name: str
) -> Coroutine[Any, Any, Result]:
    made: object = main()
    if not inspect.iscoroutine(made):
        raise TypeError(
            f"{name}() gave {shown(made)}, which cannot be run: define it with `async def`"
        )
    return made


def _is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
