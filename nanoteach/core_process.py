"""Stage 10. The engine's core in a process of its own.

    this process                               the core's process
    text, HTTP        --- add, abort, ask -->  step, step, step
                      <-- what a step gave --  (and launches the next one meanwhile)

In one process a single Python thread runs at a time. To make a token's text, its JSON and its
system call takes a tenth of a millisecond, and for 200 tokens a step that is longer than a GPU
needs for the step: it would wait. So what a GPU waits for gets a process, and an interpreter, to
itself. vLLM does the same.

On this side a request is a `Sequence`, too, which is brought up to date with every message.

Knows: what of a request must be told to whom. Does not know: text, HTTP, how a step is run.
"""

import atexit
import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import queue
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from nanoteach.config import EngineConfig, option_names
from nanoteach.cost_model import WallClock
from nanoteach.engine import Engine
from nanoteach.engine_core import EngineCore, Limits
from nanoteach.hub import default_model, resolve_model
from nanoteach.loader import load_tokenizer
from nanoteach.sequence import Sequence, Status
from nanoteach.types import EngineStats, Logprob

log = logging.getLogger(__name__)


class CoreDied(RuntimeError):
    """The core's process is gone, and its requests with it."""


class News(NamedTuple):
    """What a step did for one request. `number` is its name in the other process."""

    number: int
    token: int
    time: float
    finish_reason: str | None
    num_cached_tokens: int | None
    logprobs: dict[int, Logprob] | None


class Failure(NamedTuple):
    """A step has raised; these requests were in it, and are over."""

    numbers: list[int]
    error: str


class Answer(NamedTuple):
    """To a question."""

    value: Any


class CoreProcess(EngineCore):
    """An `EngineCore` whose steps run in another process. Close it in the end.

    build: makes the core, over there, so it must be something that can be pickled. What it raises
        is raised here.
    """

    def __init__(self, build: Callable[[], EngineCore]) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection, theirs = context.Pipe()
        self.awake, self.waker = socket.socketpair()  # something that `step` can wait for, too
        self.waker.setblocking(False)
        self.process = context.Process(target=run_core, args=(build, theirs), daemon=True)
        self.process.start()
        atexit.register(self.process.kill)  # multiprocessing sends SIGTERM, and waits for its end
        theirs.close()  # so that its end is noticed here
        self.inbox: deque[Any] = deque()  # what came before the answer to a question
        self.sequences, self.failed = {}, []
        self.clock, self.trace = WallClock(), None
        self.counter = itertools.count()
        self.numbers: dict[str, int] = {}  # an id may come again while news of its first use come
        self.by_number: dict[int, Sequence] = {}
        try:
            first = self.receive()
            if isinstance(first, Exception):
                raise first
        except BaseException:
            self.process.kill()
            self.close()
            raise
        self.limits: Limits = first
        self.max_model_len = first.max_model_len

    def close(self) -> None:
        """End the process."""
        self.send(None)
        self.connection.close()  # it may be waiting for us to read what it sends
        self.awake.close()
        self.waker.close()
        self.process.join(timeout=10)
        self.process.kill()  # if it is in a step that does not end
        self.process.join()
        atexit.unregister(self.process.kill)

    @property
    def alive(self) -> bool:
        """See `EngineCore.alive`."""
        return self.process.is_alive()

    @property
    def has_news(self) -> bool:
        """See `EngineCore.has_news`."""
        return bool(self.inbox) or self.connection.poll()

    def wake(self) -> None:
        """See `EngineCore.wake`."""
        with contextlib.suppress(OSError):  # it is full, and so it wakes, or it is closed
            self.waker.send(b"!")

    def woken(self) -> bool:
        """Wait for a message, or for `wake`. Whether it was the latter."""
        if self.connection.closed or self.connection in wait([self.connection, self.awake]):
            return False
        self.awake.recv(4096)
        return True

    def send(self, message: Any) -> None:
        """Tell the other process. Whether it is still there is noticed when it is asked."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Any:
        """Its next message. Raises CoreDied."""
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join(timeout=1)
            code = self.process.exitcode
            raise CoreDied(f"the engine's process has ended (exit code {code})") from error

    def ask(self, what: str) -> Any:
        """What a method of the core returns, between two steps."""
        self.send((what,))
        while not isinstance(message := self.receive(), Answer):
            self.inbox.append(message)
        return message.value

    def queue(self, seq: Sequence) -> None:
        """See `EngineCore.queue`."""
        number = next(self.counter)
        self.sequences[seq.request_id] = self.by_number[number] = seq
        self.numbers[seq.request_id] = number
        self.send(("add", number, seq.token_ids, seq.params))

    def abort_request(self, request_id: str, reason: str = "abort") -> None:
        """See `EngineCore.abort_request`."""
        if request_id in self.sequences:
            self.send(("abort", self.numbers[request_id]))
            self.end(self.sequences[request_id], reason)

    def end(self, seq: Sequence, reason: str) -> None:
        """A request is over."""
        seq.status, seq.finish_reason = Status.FINISHED, reason
        del self.sequences[seq.request_id], self.by_number[self.numbers.pop(seq.request_id)]

    def step(self) -> list[Sequence]:
        """Wait for a step's news, or for `wake`. See `EngineCore.step`. Raises CoreDied, too."""
        self.failed = []
        if not self.sequences and not self.has_news:
            return []  # none would ever come
        if not self.inbox and self.woken():
            return []  # somebody has something to do before the next step
        message = self.inbox.popleft() if self.inbox else self.receive()
        if isinstance(message, Failure):
            known = [seq for n in message.numbers if (seq := self.by_number.get(n))]
            if not known:
                return []  # all were aborted here meanwhile: nobody else is to blame
            self.failed = [seq.request_id for seq in known]
            for seq in known:
                self.end(seq, "error")
            raise RuntimeError(message.error)
        changed = []
        for news in message:
            seq = self.by_number.get(news.number)
            if not seq:
                continue  # it was aborted here meanwhile
            seq.token_ids.append(news.token)
            seq.token_times.append(news.time)
            seq.num_cached_tokens = news.num_cached_tokens
            if news.logprobs is not None:
                seq.logprobs.append(news.logprobs)
            if news.finish_reason:
                self.end(seq, news.finish_reason)
            changed.append(seq)
        return changed

    def stats(self) -> EngineStats:
        """See `EngineCore.stats`."""
        stats: EngineStats = self.ask("stats")
        return stats

    def check(self) -> list[str]:
        """See `EngineCore.check`."""
        problems: list[str] = self.ask("check")
        return problems


# --- in the core's process ---------------------------------------------------------------------


def run_core(build: Callable[[], EngineCore], connection: Connection) -> None:
    """Build a core and step it, until the other side says None. (If it is gone: `read_all`.)"""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they may be meant for all; the other side decides
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A thread, so that each side can send while the other does: neither waits for the other.
    threading.Thread(target=read_all, args=(connection, messages), daemon=True).start()
    try:
        core = build()
    except Exception as error:  # not all can be pickled
        ours = isinstance(error, ValueError)
        told = ValueError(str(error)) if ours else RuntimeError(f"{type(error).__name__}: {error}")
        connection.send(told)
        return
    # What is there now stays. A full collection would walk all of it: 140 ms, between two steps.
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else triton's bindings call it a leak at the very end
    with contextlib.suppress(OSError):  # the other side is gone
        connection.send(core.limits)
        while True:
            try:
                message = messages.get(block=not core.has_unfinished_requests())
            except queue.Empty:
                connection.send(step(core))
                continue
            if message is None:
                return
            carry_out(core, connection, *message)


def read_all(connection: Connection, messages: "queue.SimpleQueue[Any]") -> None:
    """Fetch what the other side sends, up to None. If it goes before that, so does this process."""
    try:
        while (message := connection.recv()) is not None:
            messages.put(message)
        messages.put(None)
    except (EOFError, OSError):
        os._exit(1)  # to build a core may take minutes, and hold a GPU meanwhile
    except Exception:  # such as a class that is not to be found here
        log.exception("the engine's process can't read a message")
        os._exit(1)


def carry_out(core: EngineCore, connection: Connection, what: str, *given: Any) -> None:
    """One message from the other side."""
    if what == "add":
        number, token_ids, params = given
        core.queue(Sequence(str(number), token_ids, params))
    elif what == "abort":
        core.abort_request(str(given[0]))
    else:
        connection.send(Answer(getattr(core, what)()))


def step(core: EngineCore) -> list[News] | Failure:
    """One step, as the other side is told of it."""
    try:
        changed = core.step()
    except Exception as error:
        log.exception("a step failed")
        failed = core.failed or list(core.sequences)  # those that only waited are not to blame
        for request_id in failed:
            core.abort_request(request_id)
        return Failure([int(request_id) for request_id in failed], repr(error))
    return [
        News(
            int(seq.request_id), seq.token_ids[-1], seq.token_times[-1], seq.finish_reason,
            seq.num_cached_tokens, seq.logprobs[-1] if seq.logprobs else None,
        )
        for seq in changed
    ]  # fmt: skip


# --- an engine around it -----------------------------------------------------------------------


def build_core(model: Path, options: dict[str, Any]) -> EngineCore:
    """The core that an `Engine` with these options has."""
    return Engine(model, **options).core


@contextlib.contextmanager
def engine_around_process(model: str | Path | None = None, **options: Any) -> Iterator[Engine]:
    """An `Engine` whose steps run in a process of their own, which ends with this context.

    model, options: as `Engine` has them, but for trace and clock.
    """
    known = option_names(EngineConfig)
    config = EngineConfig(**{name: options[name] for name in known if name in options})
    folder = resolve_model(default_model() if model is None else model)
    with contextlib.closing(CoreProcess(partial(build_core, folder, options))) as core:
        yield Engine.around(core, load_tokenizer(folder), config)
