"""A limit on how long a learner's code may run, so that an endless loop costs seconds, not a kernel."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class TimeUp(BaseException):
    """Time is over. No Exception, so that an `except Exception` in the code does not stop it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp inside the block when it has run for `seconds`.

    A timer's signal where there is one (not on Windows, and only in the main thread); else a trace
    function that looks at the clock on every line, which is slower.
    """
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
        yield from _by_signal(seconds)
    else:
        yield from _by_trace(seconds)


def _by_signal(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    # It rings again soon, in case a bare `except:` took the first.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.02)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _by_trace(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TimeUp
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
