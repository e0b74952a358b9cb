"""What Ctrl-C does to a running task: cancel it, or first ask it to come to an end by itself."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import TracebackType


class Interrupt:
    """While its block lasts, Ctrl-C cancels the task that entered it.

    Inside `patient` the first Ctrl-C only tells, and the next one cancels. Where a program ignores
    Ctrl-C, or runs the loop in another thread than the main one, nothing is changed.
    """

    def __init__(self) -> None:
        self._tell: Callable[[], None] | None = None
        self._installed = False

    def __enter__(self) -> "Interrupt":
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            with contextlib.suppress(NotImplementedError):  # loops without signals
                asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._pressed)
                self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._installed:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    @contextlib.contextmanager
    def patient(self, tell: Callable[[], None]) -> Iterator[None]:
        """Have the first Ctrl-C within the block call `tell`."""
        self._tell = tell
        try:
            yield
        finally:
            self._tell = None

    def _pressed(self) -> None:
        tell, self._tell = self._tell, None
        if tell is None:
            self._task.cancel("Ctrl-C")
        else:
            tell()
