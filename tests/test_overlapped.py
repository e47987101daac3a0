"""The overlapped loop gives what the plain one gives, whatever comes in between."""

import random
from contextlib import suppress
from dataclasses import dataclass

import pytest
from fakes import EOS, Fault, ShadowRunner, expected_tokens

from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.overlapped import OverlappedEngineCore
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.scheduler import Scheduled
from nanoteach.types import Logprob, SamplingParams


@dataclass
class Pending:
    """A shadow step in flight. Its tokens are told only when asked for."""

    gives_token: list[bool]
    tokens: list[int | None]
    lengths: list[int | None]
    """Of the requests that ask for logprobs, their tokens so far: it stands in for the logprob."""

    def logprobs(self) -> dict[int, dict[int, Logprob]]:
        return {
            row: {token: Logprob(-length)}
            for row, (token, length) in enumerate(zip(self.tokens, self.lengths, strict=True))
            if token is not None and length is not None
        }

    def result(self) -> list[int | None]:
        return self.tokens


class LateRunner(ShadowRunner):
    """Has `GraphRunner.launch`: looks promises up in what the step before has sampled."""

    sampled: list[int | None]

    def launch(self, scheduled: list[Scheduled]) -> Pending:
        promised = [(seq, seq.token_ids[-1]) for seq, _ in scheduled if seq.token_ids[-1] < 0]
        gives_token = [part.gives_token for part in scheduled]
        for seq, promise in promised:
            token = self.sampled[-1 - promise]
            assert token is not None, f"{seq.request_id} waits for a token that nobody samples"
            seq.token_ids[-1] = token
        try:
            self.sampled = self.execute(scheduled)
        finally:
            for seq, promise in promised:
                seq.token_ids[-1] = promise
        lengths = [
            None if seq.params.logprobs is None else len(seq.token_ids) for seq, _ in scheduled
        ]
        return Pending(gives_token, self.sampled, lengths)


def make_core(
    num_blocks: int, block_size: int, max_num_seqs: int, budget: int
) -> tuple[OverlappedEngineCore, LateRunner]:
    manager = PrefixCachingBlockManager(num_blocks, block_size)
    scheduler = ChunkedPrefillScheduler(manager, max_num_seqs, budget)
    runner = LateRunner(scheduler)
    core = OverlappedEngineCore(scheduler, runner, 64, [EOS], filters=True)  # type: ignore[arg-type]
    return core, runner


def random_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    prompt = [rng.randrange(4) for _ in range(rng.choice([1, 2, 8, 9, 20]))]
    return prompt, SamplingParams(
        max_tokens=rng.randint(1, 12),
        ignore_eos=rng.random() < 0.7,
        logprobs=rng.choice([None, 0]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_same_tokens_whatever_comes_in_between(seed: int) -> None:
    """Requests come at any step, some are aborted, pools run out, and now and then a step fails."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4])
    num_blocks = -(-32 // block_size) + rng.randint(0, 12)
    core, runner = make_core(num_blocks, block_size, rng.choice([1, 3, 8]), rng.choice([1, 5, 64]))
    requests = {f"r{i}": random_request(rng) for i in range(12)}
    waiting, seqs, aborted = list(requests), {}, set()
    for _ in range(2000):
        if not waiting and not core.has_unfinished_requests():
            break
        if waiting and rng.random() < 0.4:
            name = waiting.pop()
            seqs[name] = core.add_request(name, *requests[name])
        if seqs and rng.random() < 0.03:
            name = rng.choice(list(seqs))
            if not seqs[name].finish_reason:
                aborted.add(name)
                core.abort_request(name)
        if core.has_unfinished_requests():
            runner.fault = Fault() if rng.random() < 0.05 else None
            with suppress(Fault):
                core.step()
        assert core.check() == []
        assert all(token >= 0 for seq in seqs.values() for token in seq.token_ids)
    else:
        pytest.fail("somebody waits for ever")
    for name, (prompt, params) in requests.items():
        tokens = expected_tokens(prompt, params)
        found = seqs[name].output_token_ids
        assert found == (tokens[: len(found)] if name in aborted else tokens)
        assert len(seqs[name].token_times) == len(found)
        asked = params.logprobs is not None
        told = [{token: Logprob(-len(prompt) - i)} for i, token in enumerate(found) if asked]
        assert seqs[name].logprobs == told
    assert core.scheduler.block_manager.num_free == num_blocks


def test_the_next_step_is_launched_before_the_last_is_read() -> None:
    core, runner = make_core(32, 4, 4, 64)
    order: list[str] = []
    launch = runner.launch

    class Watched(Pending):
        def result(self) -> list[int | None]:
            order.append("read")
            return super().result()

    def watched(scheduled: list[Scheduled]) -> Pending:
        order.append("launch")
        pending = launch(scheduled)
        return Watched(pending.gives_token, pending.tokens, pending.lengths)

    runner.launch = watched  # type: ignore[method-assign]
    (tokens,) = core.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(tokens) == 4
    assert order == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]
