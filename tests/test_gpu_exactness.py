"""The stages on a GPU generate what transformers generates there, on trained models.

Needs an NVIDIA GPU. float32 is compared token by token. bfloat16 is judged on scores, which are
taken out of the very engine that runs: see `Recorder`.

    python -m pytest tests/test_gpu_exactness.py -n 4 -rP      (-rP tells what was found)

NANOTEACH_SMOLLM2: the folder of smollm2-135m, if it is not in the cache. Nothing is downloaded.
NANOTEACH_REPORT: a JSON file, to which what was found is added.
NANOTEACH_TEST_INTERPRETED=1: without a GPU, run on a toy in Triton's interpreter: everything in
float32, graphs replaced by runs in their padded buffers. It takes most of an hour.
"""

import dataclasses
import gc
import importlib.util
import json
import math
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import save_random_model
from filelock import FileLock
from models import text_stream
from pytest import MonkeyPatch
from settings import problems
from torch import Tensor

from nanoteach.block_manager import BlockManager
from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.config import EngineConfig
from nanoteach.engine_core import EngineCore
from nanoteach.hub import TINY, cache_folder
from nanoteach.loader import eos_token_ids, load_model
from nanoteach.model import Decoder
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.reference import (
    HFModel,
    Judgement,
    Reference,
    compare,
    judge_logits,
    open_model,
    references,
)
from nanoteach.scheduler import Scheduled
from nanoteach.sequence import Sequence
from nanoteach.stages import LADDER, Generator, Parts, build_engine
from nanoteach.types import SamplingParams, Trace

pytest.importorskip("triton")

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED and os.environ.get("NANOTEACH_TEST_INTERPRETED") != "1":
    pytest.skip("the GPU stages' exactness needs an NVIDIA GPU", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
MODELS = ("toy",) if INTERPRETED else ("tiny", "smollm2-135m")
HAS_LIBRARY = not INTERPRETED and importlib.util.find_spec("flash_attn") is not None
HALF = torch.float32 if INTERPRETED else torch.bfloat16  # bfloat16 is wrong in the interpreter


# --- what runs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One way to run a stage. Graphs, and the loop one step ahead, are stage 8's alone."""

    stage: int
    graphs: bool = False
    overlapped: bool = False
    library: bool = False
    """Stage 7 on flash-attn's kernels in place of ours."""

    def __str__(self) -> str:
        if self.library:
            return f"stage{self.stage}-flash_attn"
        if self.stage < 8:
            return f"stage{self.stage}"
        graphs, loop = "graphs" if self.graphs else "eager", "overlapped"
        return f"stage8-{graphs}-{loop if self.overlapped else 'plain'}"


VARIANTS = [
    Variant(4),
    Variant(5),
    Variant(6),
    Variant(7),
    *(Variant(8, graphs, overlapped) for graphs in (True, False) for overlapped in (True, False)),
]
RUNNERS = [Variant(6), Variant(7), Variant(8, True, True), Variant(8, False, True)]
"""Those whose steps are computed in different ways."""
LIBRARY = Variant(7, library=True)


@dataclass(frozen=True)
class Scale:
    """How large the requests to a model are, and the engine that serves them.

    pool: blocks; so few that requests are preempted. ample: enough for all that is ever asked.
    stops: one of so many requests ends early. wide: decodes that are to happen together, at least.
    widths: batch sizes to judge.
    """

    num_requests: int
    longest_prompt: int
    shortest_output: int
    longest_output: int
    beginning: int
    pool: int
    ample: int = 1024
    block_size: int = 16
    max_num_seqs: int = 24
    budget: int = 48
    max_model_len: int = 256
    stops: int = 8
    wide: int = 9
    widths: tuple[int, ...] = (1, 3, 6, 12)


SCALES = {
    "tiny": Scale(28, 120, 1, 48, beginning=40, pool=40),
    "smollm2-135m": Scale(16, 60, 8, 24, beginning=34, pool=22, max_num_seqs=16),
    "toy": Scale(
        9, 14, 4, 8, beginning=9, pool=18, ample=160, block_size=3, max_num_seqs=9, budget=14,
        max_model_len=64, stops=4, wide=5, widths=(1, 3, 5),
    ),
}  # fmt: skip

# flash-attn reads blocks of 256: longer requests, so that they fill some, and run out of them.
SCALES |= {
    f"{name}, blocks of 256": dataclasses.replace(
        SCALES[name], longest_prompt=460, beginning=300, block_size=256, pool=7, ample=128,
        budget=300, max_model_len=640, wide=4,
    )
    for name in ("tiny", "smollm2-135m")
}  # fmt: skip


def make_requests(stream: list[int], scale: Scale) -> tuple[list[list[int]], list[SamplingParams]]:
    """Ragged requests cut out of a stream of tokens; some have their beginning in common.

    Some end early, at a token that is common. The last one asks again what another has asked.
    """
    rng, tokens = random.Random(0), cycle(stream)
    common = [token for token, _ in Counter(stream).most_common(8)]

    def take(num_tokens: int) -> list[int]:
        return list(islice(tokens, num_tokens))

    longest, size = scale.longest_prompt, scale.block_size
    beginning, twin = take(scale.beginning), take(2 * size)
    prompts = [take(longest), take(1), twin, list(twin), list(beginning)]
    prompts += [beginning + take(n) for n in (1, size, longest - scale.beginning)]
    prompts = prompts[: scale.num_requests - 1]
    while len(prompts) < scale.num_requests - 1:
        prompts.append(take(round(math.exp(rng.uniform(0, math.log(longest))))))
    rng.shuffle(prompts)
    prompts.append(beginning + take(1))
    params = [
        SamplingParams(
            max_tokens=rng.randint(scale.shortest_output, scale.longest_output),
            ignore_eos=i % 3 > 0,
            stop_token_ids=common if i % scale.stops == 1 else (),
        )
        for i in range(len(prompts) - 2)
    ]
    params += [SamplingParams(max_tokens=scale.longest_output, ignore_eos=True)] * 2
    return prompts, params


class Subject:
    """A model, the requests to it, and what transformers makes of them on the same device."""

    def __init__(self, name: str, folder: Path, stream: list[int]) -> None:
        self.name, self.folder, self.scale = name, folder, SCALES[name]
        self.eos = eos_token_ids(folder)
        self.prompts, self.params = make_requests(stream, self.scale)
        self.decoders: dict[torch.dtype, Decoder] = {}
        self.known: dict[tuple[HFModel, tuple[int, ...]], Tensor] = {}

    @cached_property
    def exact(self) -> HFModel:
        """transformers in float32."""
        return open_model(self.folder, torch.float32, DEVICE)

    @cached_property
    def theirs(self) -> HFModel:
        """transformers in bfloat16."""
        return open_model(self.folder, torch.bfloat16, DEVICE)

    @cached_property
    def references(self) -> list[Reference]:
        """What transformers generates, in float32."""
        return references(self.exact, self.prompts, self.params, self.eos)

    def decoder(self, dtype: torch.dtype) -> Decoder:
        """Ours."""
        if dtype not in self.decoders:
            self.decoders[dtype] = load_model(self.folder, DEVICE, dtype)
        return self.decoders[dtype]

    @torch.inference_mode()
    def scores(self, model: HFModel, text: list[int]) -> Tensor:
        """The scores that one of transformers' models gives after each token of a text."""
        key = model, tuple(text)
        if key not in self.known:
            self.known[key] = model(torch.tensor([text], device=DEVICE)).logits[0].float()
        return self.known[key]

    def parts(self, dtype: torch.dtype, variant: Variant, **changes: Any) -> Parts:
        """What an engine for these requests is built from. It keeps a trace."""
        scale = self.scale
        options: dict[str, Any] = {
            "block_size": scale.block_size,
            "max_num_seqs": scale.max_num_seqs,
            # Before stage 6 a step must hold a whole prompt.
            "max_num_batched_tokens": scale.max_model_len if variant.stage < 6 else scale.budget,
            "max_model_len": scale.max_model_len,
            "num_gpu_blocks_override": scale.pool,
            "enforce_eager": not variant.graphs,
            "attention_backend": "flash_attn" if variant.library else "triton",  # without a GPU too
            **changes,
        }
        return Parts(self.decoder(dtype), EngineConfig(**options), self.eos, trace=Trace())


def smollm2_folder() -> Path | None:
    """Where smollm2-135m is, if it is on this machine."""
    folder = Path(os.environ.get("NANOTEACH_SMOLLM2") or cache_folder() / "smollm2-135m")
    needed = ("config.json", "tokenizer_config.json", "model.safetensors")
    return folder if all((folder / name).is_file() for name in needed) else None


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """One of `MODELS`, loaded once, and let go of before the next."""
    name = request.param
    if name == "toy":
        folder = save_random_model(tmp_path_factory.mktemp("model"), max_position=128)
        rng = random.Random(0)
        return Subject(name, folder, [rng.randrange(90) for _ in range(2000)])
    if name.startswith("tiny"):
        return Subject(name, TINY, text_stream(TINY))
    smollm2 = smollm2_folder()
    if smollm2 is None:
        pytest.skip("smollm2-135m is not on this machine: name its folder in NANOTEACH_SMOLLM2")
    return Subject(name, smollm2, text_stream(smollm2))


each_model = pytest.mark.parametrize("subject", MODELS, indirect=True)
one_model = pytest.mark.parametrize("subject", MODELS[:1], indirect=True)
each_model_in_large_blocks = pytest.mark.parametrize(
    "subject", [name for name in SCALES if "blocks" in name], indirect=True
)
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="needs a GPU with flash-attn")
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)
each_runner = pytest.mark.parametrize("variant", RUNNERS, ids=str)


@pytest.fixture(autouse=True)
def plain_float32() -> Iterator[None]:
    """Products in float32 are not shortened to TF32, in transformers neither."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def build(parts: Parts, variant: Variant) -> EngineCore:
    """An engine. Its runner is of the stage; the loop is the plain one unless `overlapped`."""
    gc.collect()  # the graphs of engines before, not while ours are recorded
    stage = LADDER[variant.stage - 1]
    assert stage.number == variant.stage
    core: Any = build_engine(parts) if variant.library else stage.build(parts)
    runner = core.runner
    assert not variant.library or type(runner.attention).__name__ == "FlashAttention"
    if variant.stage == 8:
        assert bool(runner.graphs) == variant.graphs
        if not variant.overlapped:
            longest, trace = parts.max_model_len, parts.trace
            core = EngineCore(core.scheduler, runner, longest, parts.eos_token_ids, trace=trace)
    return core


def run(core: EngineCore, check: bool = True) -> None:
    """Go on until every request is done."""
    while core.has_unfinished_requests():
        core.step()
        assert not check or core.check() == []


def serve(core: EngineCore, subject: Subject, check: bool = True) -> list[list[int]]:
    """All requests: two thirds at once, others while these run, and one when all are done."""
    seqs: list[Sequence] = []

    def add(up_to: int) -> None:
        for i in range(len(seqs), up_to):
            seqs.append(core.add_request(str(i), subject.prompts[i], subject.params[i]))

    num_requests = len(subject.prompts)
    add(2 * num_requests // 3)
    for _ in range(6):
        core.step()
        assert not check or core.check() == []
    add(num_requests - 1)
    run(core, check)
    add(num_requests)
    run(core, check)
    return [seq.output_token_ids for seq in seqs]


# --- what is found -------------------------------------------------------------------------------

Report = Callable[[str, Any], None]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Tell something: on paper, and in the file named by NANOTEACH_REPORT."""

    def tell(label: str, value: Any) -> None:
        print(f"{request.node.name}: {label}: {value}")
        if not (name := os.environ.get("NANOTEACH_REPORT")):
            return
        if isinstance(value, Verdict):
            value = {**dataclasses.asdict(value), "ok": value.ours.ok, "text": str(value)}
        path = Path(name).resolve()
        with FileLock(f"{path}.lock"):  # other processes tell as well
            told = json.loads(path.read_text()) if path.exists() else {}
            told["device"] = "cpu" if INTERPRETED else torch.cuda.get_device_name()
            told["torch"] = torch.__version__
            told.setdefault("tests", {}).setdefault(request.node.name, {})[label] = value
            path.write_text(json.dumps(told, indent=1, default=dataclasses.asdict) + "\n")

    return tell


def decode_sizes(core: EngineCore) -> Counter[int]:
    """How many steps of decodes alone had how many requests. 0: steps with prompts in them."""
    assert core.trace
    steps = [list(event.data.values()) for event in core.trace.events if event.kind == "step"]
    return Counter(0 if max(step) > 1 else len(step) for step in steps)


def prove_that_it_happened(core: EngineCore, subject: Subject, report: Report) -> None:
    """There was all that the stage knows: preemptions, prefix hits, mixed steps, all widths."""
    scheduler, sizes = core.scheduler, decode_sizes(core)
    report("preemptions", scheduler.num_preemptions)
    report("tokens found in the prefix cache", scheduler.num_prefix_hits)
    report("steps, by decodes (0: with chunks)", dict(sorted(sizes.items())))
    assert scheduler.num_preemptions > 0
    shares = isinstance(scheduler.block_manager, PrefixCachingBlockManager)
    assert (scheduler.num_prefix_hits > 0) == shares
    assert sizes[0] > 0, "no step has prompts"
    assert core.trace
    steps = [list(event.data.values()) for event in core.trace.events if event.kind == "step"]
    mixed = any(1 in step for step in steps if max(step) > 1)
    assert mixed or not isinstance(scheduler, ChunkedPrefillScheduler), "decodes beside chunks"
    kinds = [(1, 1), (2, 4), (5, 8), (9, 1000)]
    for low, high in kinds:
        if low <= subject.scale.wide:
            assert any(low <= size <= high for size in sizes), f"no {low} to {high} decodes alone"


# --- float32 -------------------------------------------------------------------------------------


@each_model
@each_variant
def test_float32_tokens_are_those_of_transformers(
    subject: Subject,
    variant: Variant,
    report: Report,
    record_property: Callable[[str, object], None],
) -> None:
    core = build(subject.parts(torch.float32, variant), variant)
    comparison = compare(subject.references, serve(core, subject))
    pairs = zip(subject.references, subject.params, strict=True)
    assert sum(len(ref.tokens) < (p.max_tokens or 0) for ref, p in pairs) > 0, "none ended early"
    report("float32", str(comparison))
    report("ties", len(comparison.ties))
    record_property("requests", comparison.num_requests)
    record_property("tokens", comparison.num_tokens)
    record_property("ties", len(comparison.ties))
    record_property("preemptions", core.scheduler.num_preemptions)
    assert comparison.exact, str(comparison)
    assert problems(core) == []
    prove_that_it_happened(core, subject, report)


OTHER_ENGINES: list[dict[str, Any]] = [
    {"block_size": 1, "num_gpu_blocks_override": 400, "max_num_seqs": 5},
    {"block_size": 5, "max_num_batched_tokens": 7, "enable_prefix_caching": False},
    {"block_size": 64, "max_num_batched_tokens": 1000},
    {"max_num_seqs": 40},  # more than there are: its mixed steps are those of few requests
]


@one_model
@pytest.mark.parametrize("variant", [Variant(7), Variant(8, True, True)], ids=str)
@pytest.mark.parametrize(
    "changes", OTHER_ENGINES, ids=["blocks of 1", "small budget", "large one", "many places"]
)
def test_float32_tokens_of_other_engines(
    changes: dict[str, Any], variant: Variant, subject: Subject, report: Report
) -> None:
    core = build(subject.parts(torch.float32, variant, **changes), variant)
    comparison = compare(subject.references, serve(core, subject))
    report("float32", str(comparison))
    assert comparison.exact, str(comparison)
    assert problems(core) == []


# --- bfloat16: scores of the engine that runs ----------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What was computed in one step, on the device.

    parts: (request, position of its first token, how many), in the order of the step.
    hidden: after the last layer, `[tokens, hidden]`. scores, sampled: for each part, those after
    its last token `[parts, vocab]`, and the token that was chosen; valid where it `gives_token`.
    """

    parts: list[tuple[str, int, int]]
    gives_token: list[bool]
    hidden: Tensor
    scores: Tensor
    sampled: Tensor

    @property
    def kind(self) -> str:
        """Which kernels of stage 8 compute it."""
        if any(num_new > 1 for _, _, num_new in self.parts):
            return "prompt chunks, alone and beside decodes"
        kinds = {1: "1 decode", 4: "2 to 4 decodes", 8: "5 to 8 decodes"}
        found = [name for most, name in kinds.items() if len(self.parts) <= most]
        return found[0] if found else "9 decodes and more"


@dataclass
class Recorder:
    """Keeps what an engine computes while it runs.

    Stage 8 samples on the device and gives no scores. So its layers, and what it samples with,
    are wrapped: their results are copied into our buffers as well. A CUDA graph records these
    copies with all the rest, so its replays fill the buffers too.
    """

    hidden: Tensor
    scores: Tensor
    head: Callable[[Tensor], Tensor]
    steps: list[Step] = field(default_factory=list)

    def keep(self, scheduled: list[Scheduled], sampled: Tensor) -> None:
        """A step has been launched: copy the buffers, once it is done."""
        num_tokens = sum(num_new for _, num_new in scheduled)
        self.steps.append(
            Step(
                [(seq.request_id, seq.num_computed_tokens, n) for seq, n in scheduled],
                [part.gives_token for part in scheduled],
                self.hidden[:num_tokens].clone(),
                self.scores[: len(scheduled)].clone(),
                sampled[: len(scheduled)].clone(),
            )
        )

    def logits(self, step: Step) -> Tensor:
        """Scores after every token of a step, float32 `[tokens, vocab]`.

        Where it sampled, they are those that it sampled from; elsewhere nobody needed them, and we
        compute them in the same way from the hidden states.
        """
        scores = self.head(step.hidden).float()
        end = 0
        for i, (_, _, num_new) in enumerate(step.parts):
            end += num_new
            if step.gives_token[i]:
                scores[end - 1] = step.scores[i]
        return scores


def record(
    parts: Parts, variant: Variant, patch: MonkeyPatch, subject: Subject
) -> tuple[EngineCore, Recorder]:
    """An engine, and what will keep all that it computes."""
    model, rows = parts.model, max(parts.config.max_num_batched_tokens, parts.config.max_num_seqs)
    recorder = Recorder(
        torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=DEVICE),
        torch.zeros(parts.config.max_num_seqs, model.config.vocab_size, device=DEVICE),
        model.logits,
    )
    wrap = wrap_stage_8 if variant.stage == 8 else wrap_model
    wrap(recorder, model, patch)
    core = build(parts, variant)
    runner: Any = core.runner
    name = "launch" if variant.stage == 8 else "execute"
    correct = getattr(runner, name)

    def recorded(scheduled: list[Scheduled]) -> Any:
        result = correct(scheduled)
        if variant.stage == 8:
            sampled = runner.decoder.sampled
        else:
            tokens = [-1 if token is None else token for token in result]
            sampled = torch.tensor(tokens, device=DEVICE)
            given = [i for i, part in enumerate(scheduled) if part.gives_token]
            recorder.scores[given] = recorder.scores[: len(given)].clone()
        recorder.keep(scheduled, sampled)
        return result

    patch.setattr(runner, name, recorded)
    return core, recorder


def wrap_model(recorder: Recorder, model: Decoder, patch: MonkeyPatch) -> None:
    """Stages 6 and 7: hidden states come out of `forward`, scores out of `logits`."""
    forward, logits = model.forward, model.logits

    def recorded_forward(*args: Any) -> Tensor:
        hidden = forward(*args)
        recorder.hidden[: len(hidden)].copy_(hidden)
        return hidden

    def recorded_logits(hidden: Tensor) -> Tensor:
        scores = logits(hidden)
        recorder.scores[: len(scores)].copy_(scores)
        return scores

    patch.setattr(model, "forward", recorded_forward)
    patch.setattr(model, "logits", recorded_logits)


def wrap_stage_8(recorder: Recorder, model: Decoder, patch: MonkeyPatch) -> None:
    """Before the engine is built, so that its graphs record our copies."""
    from nanoteach import fused_decoder
    from nanoteach.fused_decoder import FusedDecoder
    from nanoteach.kernels.rms_norm import add_rms_norm

    def recorded(layers: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(self: FusedDecoder, step: Any) -> Tensor:
            hidden = layers(self, step)
            recorder.hidden[: len(hidden)].copy_(hidden)
            return hidden

        return wrapped

    def recorded_sample(logits: Tensor, *args: Any) -> None:
        recorder.scores[: len(logits)].copy_(logits)
        sample(logits, *args)

    def recorded_head(hidden: Tensor, weight: Tensor, norm: Tensor, eps: float, *args: Any) -> None:
        # This kernel keeps its scores to itself. They are float32 all the way, as here.
        x = F.rms_norm(hidden.float(), (hidden.shape[1],), norm.float(), eps)
        recorder.scores[:1].copy_(F.linear(x, weight.float()))
        lm_head_and_sample(hidden, weight, norm, eps, *args)

    sample, lm_head_and_sample = fused_decoder.sample, fused_decoder.lm_head_and_sample
    patch.setattr(FusedDecoder, "layers", recorded(FusedDecoder.layers))
    patch.setattr(FusedDecoder, "thin_layers", recorded(FusedDecoder.thin_layers))
    patch.setattr(fused_decoder, "sample", recorded_sample)
    patch.setattr(fused_decoder, "lm_head_and_sample", recorded_head)
    weights, eps = model.weights, model.config.rms_norm_eps
    recorder.head = lambda hidden: F.linear(
        add_rms_norm(hidden, None, weights.norm, eps), weights.lm_head
    )


@dataclass(frozen=True)
class Verdict:
    """A judgement, and how transformers' own bfloat16 scores would fare by the same rule.

    sampled: how many tokens were generated after these positions; only these can differ. ties:
    choices that `judge_logits` does not explain, where our scores, rounded to bfloat16, of what we
    chose and of the best are the same number. They count neither as explained nor as unexplained.
    """

    ours: Judgement
    theirs: Judgement
    sampled: int
    ties: int

    def __str__(self) -> str:
        told = f"{self.sampled} of them sampled after, {self.ties} ties in bfloat16"
        differing, unexplained = self.theirs.num_differing, len(self.theirs.unexplained)
        return (
            f"{self.ours} ({told}; of transformers in bfloat16 there {differing} differ, "
            f"{unexplained} unexplained)"
        )


@torch.inference_mode()
def judge(
    subject: Subject,
    recorder: Recorder,
    steps: SequenceOf[Step],
    texts: Mapping[str, list[int]],
) -> Verdict:
    """Judge all that was computed in these steps, given each request's whole text.

    A request's name is its number. The scores at all positions count, and the tokens that were
    sampled as a request's output. They must be the best of the scores that we recorded.
    """
    ours, theirs, exact = [], [], []
    rows: list[int] = []
    chosen: list[int] = []
    end = 0
    for step in steps:
        ours.append(recorder.logits(step))
        for i, (request, start, num_new) in enumerate(step.parts):
            end += num_new
            text, stop = texts[request], start + num_new
            theirs.append(subject.scores(subject.theirs, text)[start:stop])
            exact.append(subject.scores(subject.exact, text)[start:stop])
            if step.gives_token[i] and stop >= len(subject.prompts[int(request)]):
                rows.append(end - 1)
                chosen.append(int(step.sampled[i]))
    a, b, best = torch.cat(ours), torch.cat(theirs), torch.cat(exact)
    scores = a[rows, chosen]
    assert float((a[rows].amax(-1) - scores).max()) < 1e-3, "sampled is not what scored best"
    exact_tokens = best.argmax(-1)
    tokens = exact_tokens.clone()  # where nothing was sampled nothing can differ
    tokens[rows] = torch.tensor(chosen, device=tokens.device)
    judgement = judge_logits(a, b, best, tokens.tolist())
    tied = [
        row
        for row in judgement.unexplained
        if a[row, exact_tokens[row]].to(HALF) == a[row, tokens[row]].to(HALF)
    ]
    unexplained = [row for row in judgement.unexplained if row not in tied]
    return Verdict(
        dataclasses.replace(judgement, unexplained=unexplained),
        judge_logits(b[rows], b[rows], best[rows]),
        len(rows),
        len(tied),
    )


@each_model
@each_variant
def test_bfloat16_scores_of_a_crowded_engine(
    subject: Subject, variant: Variant, report: Report, monkeypatch: MonkeyPatch
) -> None:
    """Preemption, prefix hits and mixed steps: every position that the engine has computed."""
    core, recorder = record(subject.parts(HALF, variant), variant, monkeypatch, subject)
    outputs = serve(core, subject)
    texts = {
        str(i): prompt + output
        for i, (prompt, output) in enumerate(zip(subject.prompts, outputs, strict=True))
    }
    for step in recorder.steps:  # what we recorded is what the requests got
        for (request, start, num_new), gives, token in zip(
            step.parts, step.gives_token, step.sampled.tolist(), strict=True
        ):
            following = texts[request][start + num_new :]
            assert not gives or not following or token == following[0]
    verdict = judge(subject, recorder, recorder.steps, texts)
    report("all steps", verdict)
    for kind in sorted({step.kind for step in recorder.steps}):
        steps = [step for step in recorder.steps if step.kind == kind]
        report(kind, judge(subject, recorder, steps, texts))
    assert verdict.ours.ok, str(verdict)
    prove_that_it_happened(core, subject, report)


@needs_library
@each_model_in_large_blocks
def test_bfloat16_scores_of_the_library(
    subject: Subject, report: Report, monkeypatch: MonkeyPatch
) -> None:
    """flash-attn has no float32: its engine is judged as the others are in bfloat16."""
    test_bfloat16_scores_of_a_crowded_engine(subject, LIBRARY, report, monkeypatch)


def replay(core: EngineCore, texts: SequenceOf[list[int]], width: int, longest_chunk: int) -> None:
    """Compute texts again, `width` of them at a time, each some 1 to `longest_chunk` tokens a step.

    When one is through the next takes its place. Steps of decodes (`longest_chunk` 1) end where
    they would have fewer than `width`. Blocks come from books of our own.
    """
    rng, runner = random.Random(0), core.runner
    pool = core.scheduler.block_manager
    manager = BlockManager(pool.num_blocks, pool.block_size)
    waiting = deque(enumerate(texts))
    rows: list[tuple[Sequence, list[int]]] = []
    while True:
        for seq, text in list(rows):
            if seq.num_computed_tokens == len(text):
                manager.free(seq)
                rows.remove((seq, text))
        while waiting and len(rows) < width:
            i, text = waiting.popleft()
            rows.append((Sequence(str(i), [], SamplingParams(max_tokens=1)), text))
        if not rows or (longest_chunk == 1 and len(rows) < width):
            return
        scheduled, budget = [], core.scheduler.max_num_batched_tokens
        for seq, text in rows:
            start = seq.num_computed_tokens
            num_new = min(rng.randint(1, longest_chunk), len(text) - start, budget)
            if num_new:
                seq.token_ids = text[: start + num_new]
                assert manager.allocate(seq, start + num_new)
                scheduled.append(Scheduled(seq, num_new))
                budget -= num_new
        scheduled.sort(key=lambda part: (part.num_new > 1, part.seq.num_computed_tokens))
        runner.execute(scheduled)
        for seq, num_new in scheduled:
            seq.num_computed_tokens += num_new


@each_model
@each_runner
def test_bfloat16_scores_at_each_batch_size(
    subject: Subject, variant: Variant, report: Report, monkeypatch: MonkeyPatch
) -> None:
    """The engine's own texts again: token by token in batches of one size, and in chunks."""
    scale = subject.scale
    parts = subject.parts(HALF, variant, num_gpu_blocks_override=scale.ample)
    core, recorder = record(parts, variant, monkeypatch, subject)
    outputs = core.generate(subject.prompts, subject.params)
    texts = [prompt + output for prompt, output in zip(subject.prompts, outputs, strict=True)]
    named = {str(i): text for i, text in enumerate(texts)}
    verdicts = {}
    for width, longest_chunk in [*((width, 1) for width in scale.widths), (4, scale.budget // 2)]:
        recorder.steps.clear()
        replay(core, texts[: 6 * width], width, longest_chunk)
        if longest_chunk == 1:
            assert {len(step.parts) for step in recorder.steps} == {width}
            label = f"decodes, {width} at a time"
        else:
            label = f"chunks of up to {longest_chunk} tokens"
            assert len(recorder.steps) > 5
        verdicts[label] = judge(subject, recorder, recorder.steps, named)
        report(label, verdicts[label])
    for label, verdict in verdicts.items():
        assert verdict.ours.ok, f"{label}: {verdict}"


@needs_library
@each_model_in_large_blocks
def test_bfloat16_tokens_of_the_library(
    subject: Subject, report: Report, monkeypatch: MonkeyPatch
) -> None:
    test_bfloat16_tokens_cold_and_cached_alone_and_in_a_batch(subject, LIBRARY, report, monkeypatch)


# --- the stages without a scheduler --------------------------------------------------------------

each_static_stage = pytest.mark.parametrize("stage", [1, 2, 3], ids="stage{}".format)


def static_engine(subject: Subject, dtype: torch.dtype, stage: int) -> Generator:
    """Stages 1 to 3, with room for several requests side by side."""
    ample = subject.scale.ample
    return LADDER[stage - 1].build(
        subject.parts(dtype, Variant(stage), num_gpu_blocks_override=ample)
    )


@each_model
@each_static_stage
def test_float32_tokens_of_static_stages(subject: Subject, stage: int, report: Report) -> None:
    engine = static_engine(subject, torch.float32, stage)
    comparison = compare(subject.references, engine.generate(subject.prompts, subject.params))
    report("float32", str(comparison))
    report("ties", len(comparison.ties))
    assert comparison.exact, str(comparison)


@each_model
@each_static_stage
def test_bfloat16_scores_of_static_stages(
    subject: Subject, stage: int, report: Report, monkeypatch: MonkeyPatch
) -> None:
    """Every position, but of stage 1's many computations of the same one only the first."""
    engine = static_engine(subject, HALF, stage)
    recorder = record_static(subject.decoder(HALF), monkeypatch)
    outputs = engine.generate(subject.prompts, subject.params)
    texts = [prompt + output for prompt, output in zip(subject.prompts, outputs, strict=True)]
    verdict = judge(subject, recorder, recorder.steps, {str(i): t for i, t in enumerate(texts)})
    report("all steps", verdict)
    assert verdict.sampled >= sum(map(len, outputs))
    assert verdict.ours.ok, str(verdict)


def record_static(model: Decoder, patch: MonkeyPatch) -> Recorder:
    """What the model computes. Requests come in their order, in batches or one by one."""
    recorder = Recorder(torch.empty(0), torch.empty(0), model.logits)
    forward, logits = model.forward, model.logits
    first, rows = 0, 0
    before: list[int] = []
    parts: list[tuple[str, int, int]] = []
    hidden = torch.empty(0)

    def recorded_forward(input_ids: Tensor, positions: Tensor, backend: Any, plan: Any) -> Tensor:
        nonlocal first, rows, before, parts, hidden
        result = hidden = forward(input_ids, positions, backend, plan)
        ids, news, lens = input_ids.tolist(), plan.query_lens, plan.seq_lens
        again = ids[:-1] == before and lens == [len(before) + 1]  # stage 1, with a token more
        if news == lens and not again:
            first, rows = first + rows, len(lens)
        if again:
            news, hidden = [1], hidden[-1:]
        before = ids
        pairs = zip(news, lens, strict=True)
        parts = [(str(first + i), n - new, new) for i, (new, n) in enumerate(pairs)]
        return result

    def recorded_logits(last: Tensor) -> Tensor:
        scores = logits(last)
        gives = [True] * len(parts)
        recorder.steps.append(Step(parts, gives, hidden, scores.float(), scores.argmax(-1)))
        return scores

    patch.setattr(model, "forward", recorded_forward)
    patch.setattr(model, "logits", recorded_logits)
    return recorder


# --- bfloat16: the same tokens, whatever is beside them ------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Where two runs of a request first differ.

    gap: between the two best scores of transformers in float32. error: our largest there, of both
    runs. tie: one of the runs had the same score, rounded to bfloat16, for what both chose.
    """

    request: int
    step: int
    gap: float
    error: float
    tie: bool


def first_differences(
    subject: Subject, recorder: Recorder, one: str, other: str, runs: Mapping[str, list[list[int]]]
) -> Iterator[Difference]:
    """The first difference of every request that differs between two runs, by their names."""
    places = {
        (request, start + i): (step, end + i)
        for step in recorder.steps
        for (request, start, num_new), end in zip(step.parts, starts_of(step), strict=True)
        for i in range(num_new)
    }
    for i, (a, b) in enumerate(zip(runs[one], runs[other], strict=True)):
        if a == b:
            continue
        k = next(k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        text = subject.prompts[i] + a[:k]
        exact = subject.scores(subject.exact, text)[-1]
        best, second = exact.topk(2).values.tolist()
        error, tie = 0.0, False
        for name in (one, other):
            step, row = places[f"{name} {i}", len(text) - 1]
            scores = recorder.logits(step)[row]
            error = max(error, float((scores - exact).abs().max()))
            tie |= bool(scores[a[k]].to(HALF) == scores[b[k]].to(HALF))
        yield Difference(i, k, best - second, error, tie)


def starts_of(step: Step) -> list[int]:
    """Where in a step each part begins."""
    sizes = [num_new for _, _, num_new in step.parts]
    return [sum(sizes[:i]) for i in range(len(sizes))]


@each_model
@each_runner
def test_bfloat16_tokens_cold_and_cached_alone_and_in_a_batch(
    subject: Subject, variant: Variant, report: Report, monkeypatch: MonkeyPatch
) -> None:
    """How often they differ is told. A difference must be within the scores' own error."""
    parts = subject.parts(HALF, variant, num_gpu_blocks_override=subject.scale.ample)
    core, recorder = record(parts, variant, monkeypatch, subject)
    runs: dict[str, list[list[int]]] = {}
    hits: dict[str, int] = {}
    num_requests = len(subject.prompts)

    # A salt of its own for each request: it finds its own blocks of the run before, or nothing.
    for name, salt, together in (
        ("alone", "a", False),
        ("alone, cached", "a", False),
        ("in a batch", "b", True),
        ("in a batch, cached", "b", True),
    ):
        before, seqs = core.scheduler.num_prefix_hits, []
        for i, (prompt, params) in enumerate(zip(subject.prompts, subject.params, strict=True)):
            salted = dataclasses.replace(params, cache_salt=f"{salt}{i}")
            seqs.append(core.add_request(f"{name} {i}", prompt, salted))
            if not together or i + 1 == num_requests:
                run(core)
        runs[name] = [seq.output_token_ids for seq in seqs]
        hits[name] = core.scheduler.num_prefix_hits - before
    assert hits["alone"] == hits["in a batch"] == core.scheduler.num_preemptions == 0
    assert hits["alone, cached"] > 0 and hits["in a batch, cached"] > 0
    assert max(decode_sizes(core)) >= subject.scale.wide

    unexplained = []
    for one, other in (
        ("alone", "alone, cached"),
        ("in a batch", "in a batch, cached"),
        ("alone", "in a batch"),
        ("alone", "in a batch, cached"),
    ):
        with torch.inference_mode():
            found = list(first_differences(subject, recorder, one, other, runs))
        tokens = sum(map(len, runs[one]))
        label = f"{one} / {other}"
        report(label, f"{len(found)} of {num_requests} requests ({tokens} tokens) differ")
        report(f"{label}: first differences", [dataclasses.asdict(d) for d in found])
        unexplained += [(label, d) for d in found if d.gap > d.error and not d.tie]
    assert unexplained == []


# --- planted faults ------------------------------------------------------------------------------

Plant = Callable[[MonkeyPatch], None]


def after_launch(patch: MonkeyPatch, spoil: Callable[[Any, list[int], bool], None]) -> None:
    """Once a step is launched, call `spoil(runner, slots, decode)` for each part of it."""
    from nanoteach.cuda_graphs import GraphRunner

    def launch(self: GraphRunner, scheduled: list[Scheduled]) -> Any:
        pending = correct(self, scheduled)
        size = self.block_size
        for seq, num_new in scheduled:
            start, table = seq.num_computed_tokens, seq.block_table
            places = range(start, start + num_new)
            slots = [table[place // size] * size + place % size for place in places]
            spoil(self, slots, num_new == 1)
        return pending

    correct = GraphRunner.launch
    patch.setattr(GraphRunner, "launch", launch)


def decoded_kv_zeroed(patch: MonkeyPatch) -> None:
    def spoil(runner: Any, slots: list[int], decode: bool) -> None:
        if decode:
            runner.decoder.pool.k.flatten(1, 2)[:, slots] = 0
            runner.decoder.pool.v.flatten(1, 2)[:, slots] = 0

    after_launch(patch, spoil)


def prompt_v_scrambled(patch: MonkeyPatch) -> None:
    def spoil(runner: Any, slots: list[int], decode: bool) -> None:
        if not decode:
            v = runner.decoder.pool.v.flatten(1, 2)
            v[:, slots] = v[:, slots].roll(1, dims=1)

    after_launch(patch, spoil)


def after_fill(patch: MonkeyPatch, spoil: Callable[[Any, Any, list[Scheduled]], None]) -> None:
    """Call `spoil` with the arrays of a step, those of the step before in them, and its parts."""
    from nanoteach import cuda_graphs

    def fill(to: Any, scheduled: list[Scheduled], *args: Any) -> None:
        before = {name: array.copy() for name, array in to.items()}
        correct(to, scheduled, *args)
        spoil(to, before, scheduled)

    correct = cuda_graphs.fill
    patch.setattr(cuda_graphs, "fill", fill)


def num_decodes(scheduled: list[Scheduled]) -> int:
    """They come first in a step."""
    return sum(num_new == 1 for _, num_new in scheduled)


def decoded_positions_off_by_one(patch: MonkeyPatch) -> None:
    """Where they are read: up to 4 decodes alone go by their lengths."""

    def spoil(to: Any, before: Any, scheduled: list[Scheduled]) -> None:
        to["positions"][: num_decodes(scheduled)] += 1

    after_fill(patch, spoil)


def decode_sees_one_token_less(patch: MonkeyPatch) -> None:
    def spoil(to: Any, before: Any, scheduled: list[Scheduled]) -> None:
        lengths = to["decode_lens"][: num_decodes(scheduled)]
        lengths -= lengths > 1

    after_fill(patch, spoil)


def padding_keeps_its_slots(patch: MonkeyPatch) -> None:
    """Those of an earlier step in the same buffer. Only a step in a graph's buffers is padded."""

    def spoil(to: Any, before: Any, scheduled: list[Scheduled]) -> None:
        num_tokens = sum(num_new for _, num_new in scheduled)
        to["slots"][num_tokens:] = before["slots"][num_tokens:]

    after_fill(patch, spoil)


def stale_block_tables(patch: MonkeyPatch) -> None:
    """A row of the device's tables that belongs to somebody else now is not written again."""
    from nanoteach.step_inputs import BlockTables

    def send(self: BlockTables, turn: int, tables: list[list[int]]) -> None:
        known = self.known[turn]
        for row, table in enumerate(tables):
            known[row] = table, known[row][1]
        correct(self, turn, tables)

    correct = BlockTables.send
    patch.setattr(BlockTables, "send", send)


def promise_of_the_neighbour(patch: MonkeyPatch) -> None:
    """The next step looks up what another request of the running step has sampled."""
    from nanoteach.overlapped import Flight

    def promise(self: Flight, last_too: bool = False) -> None:
        correct(self, last_too)
        for row, (seq, _, _, _) in enumerate(self.parts):
            if seq.token_ids[-1] < 0:
                seq.token_ids[-1] = -1 - (row + 1) % len(self.parts)

    correct = Flight.promise
    patch.setattr(Flight, "promise", promise)


FAULTS: list[Plant] = [
    decoded_kv_zeroed,
    prompt_v_scrambled,
    decoded_positions_off_by_one,
    decode_sees_one_token_less,
    padding_keeps_its_slots,
    stale_block_tables,
    promise_of_the_neighbour,
]


@one_model
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(
    plant: Plant, subject: Subject, report: Report, monkeypatch: MonkeyPatch
) -> None:
    """Without it the same engine is exact, as is proved above."""
    variant = Variant(8, graphs=True, overlapped=True)
    plant(monkeypatch)
    core = build(subject.parts(torch.float32, variant), variant)
    comparison = compare(subject.references, serve(core, subject, check=False))
    report("requests that differ", len(comparison.mismatches))
    assert not comparison.exact
