"""How a plain script runs its `main`, and what it is told when it does so wrongly."""

import functools
import gc
import inspect
import subprocess
import sys
from typing import Any

import pytest

import myelin


async def main(value: int = 3) -> int:
    return value


def test_the_value_of_main_is_returned() -> None:
    assert myelin.run(main) == 3
    assert myelin.run(functools.partial(main, 4)) == 4


def test_a_coroutine_is_refused_and_closed() -> None:
    made = main()
    with pytest.raises(TypeError, match=r"given main\(\), .*`myelin\.run\(main\)`"):
        myelin.run(made)  # type: ignore[arg-type]
    assert inspect.getcoroutinestate(made) == inspect.CORO_CLOSED
    del made
    gc.collect()  # a warning would be an error


@pytest.mark.parametrize("wrong", [None, 3, "main"])
def test_what_cannot_be_called_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="pass an `async def` function"):
        myelin.run(wrong)


def test_a_function_that_is_not_async_is_refused() -> None:
    def plain() -> int:
        return 3

    with pytest.raises(TypeError, match=r"plain\(\) gave 3.*define it with `async def`"):
        myelin.run(plain)  # type: ignore[arg-type]


async def test_inside_a_running_loop_it_says_what_to_write_and_calls_nothing() -> None:
    called = list[int]()

    async def inside() -> None:
        called.append(1)

    with pytest.raises(
        RuntimeError, match=r"`await inside\(\)` instead of `myelin\.run\(inside\)`"
    ):
        myelin.run(inside)
    with pytest.raises(
        RuntimeError, match=r"`await main\(\)` instead of `myelin\.run\(main\(\)\)`"
    ):
        myelin.run(main())  # type: ignore[arg-type]
    gc.collect()  # a warning would be an error
    assert not called


@pytest.mark.slow
def test_a_console_with_a_loop_gets_no_warning() -> None:
    script = """
import asyncio, myelin
async def main(): ...
async def console():
    try: myelin.run(main)
    except RuntimeError as error: print(error)
asyncio.run(console())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    assert "await main()" in done.stdout
