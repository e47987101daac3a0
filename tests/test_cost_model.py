"""Counts against numbers worked by hand, against transformers' models, and against a FLOP counter.

Bounds for Qwen3-0.6B on an H200 are those of our record of what others reach, in tok/s.
"""

import inspect
import random
import time

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from nanoteach import cost_model
from nanoteach.config import ModelConfig
from nanoteach.cost_model import SHAPES, Clock, Cost, VirtualClock, WallClock, Work
from nanoteach.hardware import Hardware, hardware_named

QWEN = SHAPES["qwen3-0.6b"]
H200 = hardware_named("h200")

# By hand, for Qwen3-0.6B. One layer's matrices: q is 1,024 x (16 x 128 = 2,048) = 2,097,152 values,
# o as many; k is 1,024 x (8 x 128 = 1,024) = 1,048,576, v as many; together 6,291,456. gate, up and
# down are 1,024 x 3,072 = 3,145,728 each, 9,437,184 together. So 15,728,640 a layer.
LAYER_MATRICES = 15_728_640
# Norms: 2 x 1,024 over the hidden state and 2 x 128 over a head of q and of k: 2,304 a layer.
# 28 layers are 440,466,432. The vocabulary, 151,936 x 1,024 = 155,582,464, is there once, as the
# embeddings are tied. The last norm has 1,024.
EMBEDDING = 155_582_464
PARAMETERS = 596_049_920
# K and V, 28 layers, 8 heads of 128 values, 2 bytes each: 2 x 28 x 1,024 x 2.
KV_BYTES = 114_688
# QK^T: 2 FLOPs for each of 128 values, in 16 heads and 28 layers, are 114,688 for one pair of
# tokens. PV takes as many. (That K and V of a token take 114,688 bytes is a coincidence.)
ATTENTION_FLOPS = 229_376


def throughput(work, tokens):
    """Tokens a second if each step took as long as its bound on the H200."""
    return tokens / sum(cost_model.step_cost(QWEN, step).seconds(H200) for step in work)


def test_parameters_by_hand():
    assert cost_model.layer_matrix_parameters(QWEN) == LAYER_MATRICES
    assert cost_model.layer_parameters(QWEN) == LAYER_MATRICES + 2_304
    assert cost_model.embedding_parameters(QWEN) == EMBEDDING
    assert cost_model.num_parameters(QWEN) == PARAMETERS  # 596.0 M


def test_bytes_by_hand():
    # 596,049,920 x 2 bytes, 1.192 GB.
    assert cost_model.weight_bytes_read(QWEN, 2) == 1_192_099_840
    assert cost_model.weight_bytes_read(QWEN, 4) == 2_384_199_680
    assert cost_model.kv_bytes_per_token(QWEN, 2) == KV_BYTES == 112 * 1024
    assert cost_model.kv_bytes_per_token(QWEN, 4) == 224 * 1024


def test_how_many_requests_14_gib_hold():
    # 14 x 2^30 / (112 x 2^10) = 2^20 / 8 = 131,072 tokens; 32 times 4,096 or 128 times 1,024.
    gib14 = 14 * 2**30
    assert cost_model.max_requests(QWEN, gib14, 4096) == 32
    assert cost_model.max_requests(QWEN, gib14, 1024) == 128
    assert cost_model.max_requests(QWEN, gib14 - 1, 1024) == 127
    assert cost_model.max_requests(QWEN, gib14, 1024, bytes_per_value=4) == 64


def test_each_new_token_attends_to_itself_and_all_before():
    assert cost_model.num_attended([]) == 0
    assert cost_model.num_attended([Work(1, 0)]) == 1
    assert cost_model.num_attended([Work(4, 0)]) == 1 + 2 + 3 + 4
    assert cost_model.num_attended([Work(3, 10)]) == 11 + 12 + 13
    assert cost_model.num_attended([Work(1, 1024), Work(3, 10)]) == 1025 + 36
    # In chunks or at once, a prompt costs the same.
    chunks = [Work(3, 0), Work(3, 3), Work(1, 6)]
    assert cost_model.num_attended(chunks) == cost_model.num_attended([Work(7, 0)])


def test_flops_of_a_decode_step_by_hand():
    # 1,024 tokens of history, so the new one attends to 1,025.
    # Layers: 2 x 28 x 15,728,640 = 880,803,840. Attention: 229,376 x 1,025 = 235,110,400.
    # LM head: 2 x 155,582,464 = 311,164,928.
    work = [Work(1, 1024)]
    assert cost_model.attention_flops(QWEN, work) == 235_110_400
    assert cost_model.step_flops(QWEN, work) == 880_803_840 + 235_110_400 + 311_164_928


def test_the_lm_head_works_for_rows_that_need_logits():
    middle = [Work(512, 0, needs_logits=False)]
    both = [Work(512, 0, needs_logits=False), Work(1, 7)]
    # 512 x 513 / 2 = 131,328 pairs.
    flops = 880_803_840 * 512 + ATTENTION_FLOPS * 131_328
    assert cost_model.step_flops(QWEN, middle) == flops
    assert cost_model.step_flops(QWEN, both) == (
        flops + 880_803_840 + ATTENTION_FLOPS * 8 + 2 * EMBEDDING
    )
    # Unread, the head saves its bytes; wanted by one request, it is read once.
    layers = 1_192_099_840 - 2 * EMBEDDING
    assert cost_model.step_bytes(QWEN, middle, 2) == layers + 512 * KV_BYTES
    assert cost_model.step_bytes(QWEN, both, 2) == 1_192_099_840 + (512 + 8) * KV_BYTES


def test_bytes_of_a_decode_step_by_hand():
    # The weights, K/V of 1,024 tokens read and of one written: 1,192,099,840 + 1,025 x 114,688.
    cost = cost_model.step_cost(QWEN, [Work(1, 1024)])
    assert cost.bytes == 1_309_655_040
    # At 4,311 GB/s: 0.30379 ms, 3,291.7 tok/s, which the record rounds to 0.304 ms and 3,290.
    assert cost.limit(H200) == "memory"
    assert cost.seconds(H200) == pytest.approx(0.304e-3, abs=0.0005e-3)
    assert 1 / cost.seconds(H200) == pytest.approx(3290, abs=5)
    # A second request shares the weights and brings its own history.
    two = cost_model.step_cost(QWEN, [Work(1, 1024), Work(1, 1024)])
    assert two.bytes == 1_192_099_840 + 2 * 1_025 * KV_BYTES


def test_an_empty_step_costs_nothing():
    assert cost_model.step_cost(QWEN, []) == Cost(0, 0)


def test_the_bound_is_the_slower_of_the_two():
    machine = Hardware("toy", flops=100.0, read_bandwidth=10.0, copy_bandwidth=5.0, source="")
    assert Cost(flops=200, bytes=10).seconds(machine) == 2.0
    assert Cost(flops=200, bytes=10).limit(machine) == "compute"
    assert Cost(flops=200, bytes=30).seconds(machine) == 3.0
    assert Cost(flops=200, bytes=30).limit(machine) == "memory"


@pytest.mark.parametrize("prompt, recorded", [(256, 3446), (1024, 3220), (3072, 2739)])
def test_decode_limits_on_record(prompt, recorded):
    # Batch 1, 512 decode steps after the prefill. Histories run from the prompt's length to 511
    # more, so with the token that is written a mean step moves the weights and K/V of
    # prompt + 255.5 + 1 tokens. For 256: 1,192,099,840 + 512.5 x 114,688 = 1,250,877,440 bytes, and
    # 4,311e9 / 1,250,877,440 = 3,446.4.
    # (511 steps, the first token being the prefill's, give 3,446.5: a matter of rounding.)
    steps = [[Work(1, prompt + step)] for step in range(512)]
    assert round(throughput(steps, tokens=512)) == recorded


@pytest.mark.parametrize("requests, prompt, recorded", [(16, 1024, 787_000), (4, 4096, 582_000)])
def test_prefill_limits_on_record(requests, prompt, recorded):
    # All in one step. For 16 x 1,024: layers 880,803,840 x 16,384 = 14.431e12 FLOPs; attention
    # 229,376 x 16 x 1,024 x 1,025 / 2 = 1.926e12; head 16 x 0.311e9 = 0.005e12. 16.362e12 in all,
    # 20.8 ms at 786e12 a second.
    step = [Work(prompt, 0)] * requests
    assert cost_model.step_cost(QWEN, step).limit(H200) == "compute"
    assert throughput([step], tokens=requests * prompt) == pytest.approx(recorded, abs=500)


def test_nano_vllm_bench_limit_on_record():
    # nano-vLLM's bench.py draws 256 prompts and outputs of 100 to 1,024 tokens with seed 0. The
    # random tokens are drawn too, since they move the generator on.
    draw = random.Random(0)
    prompts = [
        len([draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))]) for _ in range(256)
    ]
    outputs = [draw.randint(100, 1024) for _ in range(256)]
    assert sum(prompts) == 142_827
    assert sum(outputs) == 133_966  # as its README says

    # One prefill of everything, which gives each request its first token; then all decode together,
    # until the longest is done.
    clock = VirtualClock(QWEN, H200)
    clock.tick([Work(prompt, 0) for prompt in prompts])
    for step in range(max(outputs) - 1):
        clock.tick(
            [Work(1, prompt + step) for prompt, out in zip(prompts, outputs, strict=True)
             if step < out - 1]
        )  # fmt: skip
    # The record says 36,491; this schedule gives 36,493.
    assert sum(outputs) / clock.now() == pytest.approx(36_491, rel=1e-4)


# --- transformers ----------------------------------------------------------------------------

SMALL = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def small_config(kind, **changes):
    """A transformers config of this family, and ours made from it."""
    theirs = getattr(transformers, f"{kind}Config")(**SMALL | changes)
    ours = ModelConfig.from_dict(theirs.to_dict() | {"architectures": [f"{kind}ForCausalLM"]})
    return theirs, ours


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "kind, changes",
    [
        ("Qwen3", {"head_dim": 32}),  # 4 heads of 32: wider than the hidden state
        ("Qwen3", {"head_dim": 16, "attention_bias": True}),
        ("Qwen2", {}),  # biases on q, k and v
        ("Llama", {"num_key_value_heads": 4}),
        ("Llama", {"attention_bias": True}),
    ],
)
def test_parameters_are_those_of_transformers(kind, changes, tied):
    theirs, ours = small_config(kind, tie_word_embeddings=tied, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    # `parameters` gives a tied matrix once.
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert cost_model.num_parameters(ours) == num_parameters
    # What a step reads: all, less an input embedding that is a matrix of its own.
    looked_up = 0 if tied else model.get_input_embeddings().weight.numel()
    assert cost_model.weight_bytes_read(ours, 4) == 4 * (num_parameters - looked_up)


def test_the_shape_we_ship_is_that_of_the_models_config():
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
    }
    assert ModelConfig.from_dict(raw) == QWEN


def counted_flops(model, tokens, cache):
    """FLOPs of one forward that torch's counter sees, less those of the rotary angles.

    transformers 4 makes the angles by a thin matrix product, 5 element by element; we count none.
    """
    # transformers 5 renames the argument.
    accepted = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in accepted else "past_key_values"
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{name: cache})
    by_module = counter.get_flop_counts()
    rotary = [counts for module, counts in by_module.items() if module.endswith("rotary_emb")]
    return counter.get_total_flops() - sum(sum(counts.values()) for counts in rotary)


@pytest.mark.parametrize("kind", ["Qwen3", "Qwen2", "Llama"])
def test_flops_are_those_that_a_counter_sees(kind):
    """A prefill of 9 tokens, a chunk of 5 on top, and a decode, with attention written out.

    Written out, attention computes the whole rectangle of scores and masks what is not causal. We
    count what must be computed, the part below. A decode masks nothing, so there the counts agree
    as they are.
    """
    theirs, ours = small_config(kind)
    model = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
    model.eval()
    tokens = torch.arange(15)[None]
    cache = transformers.DynamicCache()

    for num_new, num_computed, num_masked in [(9, 0, 36), (5, 9, 10), (1, 14, 0)]:
        chunk = tokens[:, num_computed : num_computed + num_new]
        masked_flops = 4 * ours.num_layers * ours.q_size * num_masked
        step = [Work(num_new, num_computed)]
        counted = counted_flops(model, chunk, cache)
        assert counted == cost_model.step_flops(ours, step) + masked_flops


# --- clocks ----------------------------------------------------------------------------------


def test_the_virtual_clock_shows_these_digits():
    # Worked out by a script of its own, from the constants at the top.
    clock = VirtualClock(QWEN, H200)
    assert clock.now() == 0.0
    clock.tick([Work(512, 0)])  # 481,406,222,336 FLOPs / 786e12
    assert repr(clock.now()) == "0.0006124761098422392"
    clock.tick([Work(1, 512), Work(256, 0, needs_logits=False)])  # 1,280,294,912 bytes / 4,311e9
    assert repr(clock.now()) == "0.0009106198434198473"
    for step in range(100):
        clock.tick([Work(1, 513 + step), Work(1, 256 + step)])
    assert repr(clock.now()) == "0.030877643735788208"


def test_the_virtual_clock_waits_forward_only():
    clock = VirtualClock(QWEN, H200)
    clock.wait_until(2.5)
    assert clock.now() == 2.5
    clock.wait_until(1.0)
    assert clock.now() == 2.5


def test_the_virtual_clock_adds_the_overhead_of_each_step():
    toy = Hardware("toy", flops=1e30, read_bandwidth=1e30, copy_bandwidth=1e30, source="")
    clock = VirtualClock(QWEN, toy, overhead=0.5)
    clock.tick([Work(1, 0)])
    clock.tick([Work(1, 1)])
    assert clock.now() == pytest.approx(1.0, abs=1e-9)
    with pytest.raises(ValueError, match="at least 0, not -0.1"):
        VirtualClock(QWEN, H200, overhead=-0.1)


def test_the_virtual_clock_knows_the_dtype():
    # Bound by bytes, float32 takes twice as long.
    half, full = VirtualClock(QWEN, H200, 2), VirtualClock(QWEN, H200, 4)
    half.tick([Work(1, 1024)])
    full.tick([Work(1, 1024)])
    assert full.now() == 2 * half.now()


def test_clocks_say_what_time_they_show():
    clocks: list[Clock] = [WallClock(), VirtualClock(QWEN, H200)]
    assert [clock.label for clock in clocks] == ["wall clock", "simulated, H200"]


def test_the_wall_clock_passes_by_itself():
    clock = WallClock()
    before = time.perf_counter()
    now = clock.now()
    assert before <= now <= time.perf_counter()
    clock.tick([Work(1, 10**9)])
    clock.wait_until(now + 0.02)
    assert clock.now() >= now + 0.02
    clock.wait_until(now)  # over already: returns at once
