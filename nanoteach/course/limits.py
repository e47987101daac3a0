"""A limit on how long a learner's code may run: an endless loop costs seconds, not a kernel."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

TICK = 0.02


class TimeUp(BaseException):
    """Time is over. No Exception, so that an `except Exception` in the code does not stop it."""


@contextmanager
def time_limit(seconds: float, filename: str | None = None) -> Iterator[None]:
    """Raise TimeUp inside the block when code of `filename` has run for `seconds`.

    What such code calls is counted with it; with no filename, everything is. The rest of the block,
    which may wait in vain for what that code returned, gets six times as long.

    A timer's signal where there is one (not on Windows, and only in the main thread); else a trace
    function that looks at the clock on every line, which is slower. Neither can interrupt a single
    call into C, such as `sum(itertools.count())`.
    """
    watch = _Watch(seconds, filename)
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
        yield from _by_signal(watch)
    else:
        yield from _by_trace(watch)


class _Watch:
    """How much time is left, for the learner's code and for the rest."""

    def __init__(self, seconds: float, filename: str | None) -> None:
        self.filename = filename
        self.left = seconds
        self.left_for_others = 6 * seconds

    def passed(self, seconds: float, frame: FrameType | None) -> None:
        """Some time went by in this frame."""
        files = set()
        while frame:
            files.add(frame.f_code.co_filename)
            frame = frame.f_back
        # An import is not the learner's doing, and half a module would stay in memory.
        if any(file.startswith("<frozen importlib") for file in files):
            return
        if self.filename is None or self.filename in files:
            self.left -= seconds
            over = self.left <= 0
        else:
            self.left_for_others -= seconds
            over = self.left_for_others <= 0
        if over:
            raise TimeUp


def _by_signal(watch: _Watch) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        watch.passed(TICK, frame)

    before = signal.signal(signal.SIGALRM, ring)
    # It rings on after the first TimeUp, in case a bare `except:` took that.
    signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _by_trace(watch: _Watch) -> Iterator[None]:
    last = time.monotonic()

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal last
        now = time.monotonic()
        if now - last >= TICK:
            gone, last = now - last, now
            watch.passed(gone, frame)
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
