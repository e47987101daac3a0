"""Stage 10. One engine, many callers who wait: the bridge between asyncio and the step loop.

    event loop                              engine thread
    generate --- add, abort, call --->      queue of commands
                                            step, step, step
             <-- call_soon_threadsafe ---   what the step gave, for everybody at once

The engine has no locks, so one thread owns it: whatever is to be done with it is a command, carried
out between two steps. A request's caller holds a `Stream`, a place for the newest output alone. An
output holds all that came before it, so a caller who is slow misses nothing, and nothing piles up.

Knows: who waits for which request, how many may, what to do when a step raises. Does not know:
HTTP.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from nanoteach.config import check_positive
from nanoteach.core_process import CoreDied
from nanoteach.engine import Engine, Prompt
from nanoteach.sequence import Sequence
from nanoteach.types import RequestOutput, SamplingParams, one_for_each

T = TypeVar("T")
Prepared = tuple[Sequence, str | None]
"""A request that is not queued yet, and its prompt's text, if it came as text."""
log = logging.getLogger(__name__)


class QueueFull(RuntimeError):
    """As many requests as may wait do so already: come again later."""


class EngineStopped(RuntimeError):
    """The engine takes no requests any more, or has ended this one before its time."""


class StepFailed(RuntimeError):
    """The step that computed this request raised. The request is over; the engine goes on."""


class Observer:
    """Is told what happens, on the engine's thread. This one takes no notice."""

    def stepped(self, outputs: list[RequestOutput]) -> None:
        """A step, or several, gave each of these requests a token; some have finished."""

    def ended(self, request_id: str, reason: str) -> None:
        """A request ended before it was finished: "abort" or "error"."""


class Stream:
    """What one reader waits for: the newest outputs of one or several requests."""

    def __init__(self, request_ids: list[str]) -> None:
        self.request_ids = request_ids
        self.unfinished = set(request_ids)
        self.unread: dict[str, RequestOutput] = {}
        self.error: Exception | None = None
        self.arrived = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Here is a request's newest; one that was not read is forgotten."""
        self.unread[output.request_id] = output
        if output.finished:
            self.unfinished.discard(output.request_id)
        self.arrived.set()

    def fail(self, error: Exception) -> None:
        """No more will come, unless all has come already."""
        if self.unfinished:
            self.error = error
            self.arrived.set()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> list[RequestOutput]:
        """Outputs that were not read, once there are some. Raises what ended the requests."""
        if not self.unfinished and not self.unread:
            raise StopAsyncIteration
        await self.arrived.wait()
        self.arrived.clear()
        if self.error:
            raise self.error
        outputs = list(self.unread.values())
        self.unread.clear()
        return outputs


class AsyncEngine:
    """An `Engine` for asyncio, while its context (`async with`) lasts.

    max_queue: requests that may be open beyond max_num_seqs, and so wait for their turn.
    """

    def __init__(
        self, engine: Engine, max_queue: int = 512, observer: Observer | None = None
    ) -> None:
        check_positive("max_queue", max_queue)
        self.engine = engine
        self.max_open = engine.config.max_num_seqs + max_queue
        self.observer = observer or Observer()
        self.streams: dict[str, Stream] = {}
        self.calls: set[asyncio.Future[Any]] = set()
        self.accepting = False
        self.ids = itertools.count()
        self.commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.loop: asyncio.AbstractEventLoop
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- on the event loop ---------------------------------------------------------------------

    async def __aenter__(self) -> "AsyncEngine":
        """Start the engine's thread. All who use it are on this event loop."""
        self.loop = asyncio.get_running_loop()
        self.thread.start()
        self.accepting = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        """End what runs, and then the thread."""
        await self.drain(0)
        self.commands.put(None)
        await asyncio.to_thread(self.thread.join)

    @property
    def healthy(self) -> bool:
        """Whether it takes requests."""
        return self.accepting and self.thread.is_alive() and self.engine.core.alive

    async def call(self, function: Callable[[Engine], T]) -> T:
        """What `function(engine)` returns, run on the engine's thread between two steps."""
        if not self.thread.is_alive():
            raise EngineStopped("the engine is not running")
        future: asyncio.Future[T] = self.loop.create_future()
        self.calls.add(future)
        self.commands.put(lambda: self._carry_out(function, future))
        self.engine.core.wake()  # or it hears of a new request when the next step has begun
        try:
            return await future
        finally:
            self.calls.remove(future)

    def admit(self, count: int) -> None:
        """Whether `count` more requests may come in: all of them, or none.

        Raises EngineStopped while none are taken, and QueueFull where over `max_open` would be
        open, those in `streams` and these together.
        """
        if not self.accepting:
            raise EngineStopped("the server is shutting down")
        if len(self.streams) + count > self.max_open:
            raise QueueFull(
                f"{len(self.streams)} requests are open, and with {count} more there would be over "
                f"{self.max_open}: try again later"
            )

    async def open(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        request_ids: SequenceOf[str] | None = None,
    ) -> Stream:
        """Queue requests, all or none. Whoever has their stream must `close` it in the end.

        They arrive now, however long it takes until the engine's thread has time for them. Raises
        ValueError if one can't be served, QueueFull, EngineStopped.
        """
        arrived = self.engine.core.clock.now()
        if len(prompts) > self.max_open:
            raise ValueError(
                f"{len(prompts)} prompts are more than ever may be open at once, {self.max_open}: "
                "send fewer at a time"
            )
        self.admit(len(prompts))
        each = one_for_each(params, len(prompts))
        ids = [f"request-{next(self.ids)}" for _ in prompts] if request_ids is None else request_ids
        strings = all(isinstance(request_id, str) for request_id in ids)
        if not strings or not len(set(ids)) == len(ids) == len(prompts):
            raise ValueError("request ids are strings, one for each prompt, and no two the same")
        if used := self.streams.keys() & set(ids):
            raise ValueError(f"request id {min(used)!r} is in use: give each request its own")
        stream = Stream(list(ids))
        self.streams.update(dict.fromkeys(ids, stream))

        def prepare(request_id: str, prompt: Prompt, p: SamplingParams) -> Prepared:
            text, token_ids = self.engine.tokenize(prompt)
            settled = self.engine.core.limits.settle(token_ids, p)
            return Sequence(request_id, token_ids, settled, arrived), text

        def add(engine: Engine) -> None:
            if used := engine.requests.keys() & set(ids):  # by one who did not come through here
                raise ValueError(f"request id {min(used)!r} is in use: give each request its own")
            for seq, text in prepared:
                engine.queue(seq, text, owner="step")

        try:
            # A long text takes a while to tokenize: neither this loop nor a step waits for it.
            prepared = await asyncio.to_thread(lambda: list(map(prepare, ids, prompts, each)))
            if stream.error:  # all were ended meanwhile, and nobody would end what came after
                raise stream.error
            await self.call(add)
        except BaseException:  # its reader may also have left by now
            self.close(stream)
            raise
        return stream

    def close(self, stream: Stream) -> None:
        """Nobody reads this stream any more: forget its requests, and abort what still runs.

        The engine is another thread's, so `_abort` is left to it, as a command. To close a stream
        twice does no harm.
        """
        for request_id in stream.request_ids:
            if self.streams.get(request_id) is stream:
                del self.streams[request_id]
                self.commands.put(partial(self._abort, request_id))

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come, each with all of the text so far; a slow reader skips some.

        To leave early, close the iterator or cancel the task: that aborts the request. Raises as
        `open` does, and StepFailed.
        """
        stream = await self.open([prompt], params, None if request_id is None else [request_id])
        try:
            async for outputs in stream:
                yield outputs[0]
        finally:
            self.close(stream)

    async def drain(self, timeout: float) -> None:
        """Take no more requests; after at most `timeout` seconds, end those that are left."""
        self.accepting = False
        end = self.loop.time() + timeout
        while self.streams and self.loop.time() < end:
            await asyncio.sleep(0.02)
        for stream in set(self.streams.values()):
            self.close(stream)
            stream.fail(EngineStopped("the server is shutting down"))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """A step's outputs, to those who still wait for them."""
        for output in outputs:
            if stream := self.streams.get(output.request_id):
                stream.put(output)

    def _fail(self, request_ids: list[str], error: Exception) -> None:
        """Tell those who wait for these requests that they are over."""
        for request_id in request_ids:
            if stream := self.streams.get(request_id):
                stream.fail(error)

    def _settle(self, future: "asyncio.Future[T]", result: T | None, error: Any) -> None:
        """Answer a call, if anybody still waits for it."""
        if future.done():
            return
        if error:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def _stopped(self) -> None:
        """The thread is at its end, whatever the reason: nobody may wait for it for ever."""
        self.accepting = False
        error = EngineStopped("the engine has stopped")
        for future in self.calls:
            self._settle(future, None, error)
        self._fail(list(self.streams), error)

    # --- on the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        """All commands that are there, then a step; with nothing to do, wait for a command."""
        try:
            while True:
                try:
                    command = self.commands.get(block=not self.engine.has_unfinished_requests())
                except queue.Empty:
                    self._step()
                    continue
                if command is None:
                    return
                command()
        except CoreDied as error:
            log.error("%s: nothing more can be served", error)
        finally:
            self.loop.call_soon_threadsafe(self._stopped)

    def _step(self) -> None:
        """Run a step and pass on what it gave. If it raises, its requests end."""
        try:
            outputs = self.engine.step()
            self.observer.stepped(outputs)
        except CoreDied:
            raise  # there is nothing to go on with
        except Exception as error:
            log.exception("a step failed")
            # Those that only waited are not to blame, unless nobody else can be.
            failed = self.engine.core.failed or list(self.engine.requests)
            for request_id in failed:
                self._abort(request_id, "error")
            told = StepFailed(f"the step that computed this request failed: {error!r}")
            self.loop.call_soon_threadsafe(self._fail, failed, told)
        else:
            if outputs:
                self.loop.call_soon_threadsafe(self._deliver, outputs)

    def _abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request, if it is still there."""
        if request_id in self.engine.requests:
            self.engine.abort_request(request_id)
            self.observer.ended(request_id, reason)

    def _carry_out(self, function: Callable[[Engine], T], future: "asyncio.Future[T]") -> None:
        """Make a call and pass on what it gives."""
        result, error = None, None
        try:
            result = function(self.engine)
        except CoreDied:
            raise  # which ends all calls
        except Exception as raised:
            error = raised
        self.loop.call_soon_threadsafe(self._settle, future, result, error)


class ServedEngine:
    """Stage 10 as the ladder sees it: token ids in, token ids out, by way of a stream."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[list[int]]:
        """The tokens generated after each prompt. A thread of its own has the event loop."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, self._generate(prompts, params)).result()

    async def _generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None,
    ) -> list[list[int]]:
        async with AsyncEngine(self.engine, max_queue=max(1, len(prompts))) as async_engine:
            stream = await async_engine.open(prompts, params)
            try:
                last = {o.request_id: o async for outputs in stream for o in outputs}
            finally:
                async_engine.close(stream)
        return [last[request_id].outputs[0].token_ids for request_id in stream.request_ids]
