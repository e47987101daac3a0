"""Stage 8. The loop of stage 4, one step ahead: while the GPU runs a step, the next is prepared.

    plain        schedule | execute ........ | commit | schedule | execute ........ | commit
    overlapped   schedule | launch | schedule | launch | wait, commit | schedule | launch | ...
                                     (the GPU never waits for the host)

The next step needs tokens that are still being computed. A request therefore gets a promise in its
place: the number -1 - i stands for sample i of the running step, and the GPU looks it up. When the
step is done the promise is replaced, and only then is it known whether the text has ended. If so,
the request's part of the step that already runs was for nothing: its result is dropped.

How many tokens a request has is known without the GPU, so an end by `max_tokens` wastes nothing.

Knows: what may happen before a result is there. Does not know: graphs, kernels.
"""

from typing import TYPE_CHECKING

from nanoteach.cost_model import Work
from nanoteach.engine_core import EngineCore
from nanoteach.scheduler import Scheduled
from nanoteach.sequence import Sequence, Status

if TYPE_CHECKING:
    from nanoteach.cuda_graphs import GraphRunner, PendingTokens


class Flight:
    """A step that has been launched and not been committed. Its requests count as computed."""

    def __init__(self, scheduled: list[Scheduled], pending: "PendingTokens") -> None:
        self.pending = pending
        self.parts = [
            (seq, seq.num_computed_tokens, num_new, seq.block_table) for seq, num_new in scheduled
        ]
        self.work = [
            Work(num_new, start, gives_token)
            for (_, start, num_new, _), gives_token in zip(
                self.parts, pending.gives_token, strict=True
            )
        ]
        for seq, num_new in scheduled:
            seq.num_computed_tokens += num_new

    def promise(self, last_too: bool = False) -> None:
        """Give every request that goes on a token to compute next, which the GPU will look up.

        One that will have its max_tokens is left out, unless `last_too`.
        """
        for row, (seq, _, _, _) in enumerate(self.parts):
            if self.pending.gives_token[row] and seq.status is Status.RUNNING:
                goes_on = seq.num_output_tokens + 1 != seq.params.max_tokens
                if goes_on or last_too:
                    seq.token_ids.append(-1 - row)


class OverlappedEngineCore(EngineCore):
    """Continuous batching in which commit comes one step late. Same tokens."""

    runner: "GraphRunner"  # it must have `launch`
    flight: Flight | None = None

    def run_step(self) -> list[Sequence]:
        """Launch the next step, then commit the one before. Promises live in here alone."""
        if self.trace:
            self.trace.step += 1
            self.trace.time = self.clock.now()
        flight, self.flight = self.flight, None
        if flight:
            flight.promise()
        scheduled = self.scheduler.schedule()
        if scheduled:
            scheduled.sort(key=lambda part: (part.num_new > 1, part.seq.num_computed_tokens))
            if self.trace:
                self.trace.add("step", data={seq.request_id: n for seq, n in scheduled})
            self.flight = Flight(scheduled, self.runner.launch(scheduled))
        elif flight is None:
            raise RuntimeError("the scheduler found nothing to do while requests wait")
        changed = self.settle(flight) if flight else []
        if not self.sequences:
            self.flight = None  # it was launched before it was known that nobody needs it
        return changed

    def settle(self, flight: Flight) -> list[Sequence]:
        """Book a step, once its tokens are there."""
        tokens, logprobs = flight.pending.result(), flight.pending.logprobs()
        self.clock.tick(flight.work)
        now = self.clock.now()
        self.num_computed_tokens += sum(work.num_new for work in flight.work)
        self.batch_sizes[len(flight.work)] += 1
        if self.trace:
            self.trace.time = now
        changed = []
        for row, (seq, start, num_new, table) in enumerate(flight.parts):
            token = tokens[row]
            if seq.status is Status.FINISHED:
                continue  # it has ended meanwhile: this was for nothing
            stop = start + num_new
            if seq.block_table is table:  # not preempted meanwhile
                self.scheduler.block_manager.publish(seq, start, stop)
            if token is None:
                continue
            seq.token_ids[stop:] = [token]  # in place of the promise
            seq.token_times.append(now)
            if row in logprobs:
                seq.logprobs.append(logprobs[row])
            changed.append(seq)
            reason = seq.params.finish_reason(token, seq.num_output_tokens, self.eos_token_ids)
            if reason:
                self.scheduler.retire(seq, reason)
                del self.sequences[seq.request_id]
        return changed

    def abort_request(self, request_id: str, reason: str = "abort") -> None:
        """See `EngineCore.abort_request`. What is in flight for nobody is never booked."""
        super().abort_request(request_id, reason)
        if not self.sequences:
            self.flight = None

    def step(self) -> list[Sequence]:
        """See `EngineCore.step`. A fault loses what was in flight; it is computed again."""
        try:
            return super().step()
        except BaseException:
            self.flight = None
            raise

    def check(self) -> list[str]:
        """See `EngineCore.check`."""
        if not self.flight:
            return super().check()
        self.flight.promise(last_too=True)
        try:
            return super().check()
        finally:
            for seq in self.sequences.values():
                while seq.token_ids[-1] < 0:
                    seq.token_ids.pop()
