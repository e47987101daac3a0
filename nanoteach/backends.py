"""Which attention backends can run here, and if one can't, what to do about it.

Knows: what each needs of the machine, the model and the options. Imports none of them.
"""

import importlib.util
import os

import torch

from nanoteach.config import EngineConfig
from nanoteach.model import Decoder

Need = tuple[bool, str]
"""Whether it is met, and what to say and do if it is not."""


def problem(backend: str, model: Decoder, config: EngineConfig) -> str | None:
    """Why `triton` or `flash_attn` can't serve this model here; None where it can."""
    needs = {"triton": triton_needs, "flash_attn": flash_attn_needs}[backend](model, config)
    unmet = next((otherwise for met, otherwise in needs if not met), None)
    return unmet and f"attention_backend = {backend!r} {unmet}"


def require(backend: str, model: Decoder, config: EngineConfig) -> None:
    """Raise ValueError, which says what to do, where the backend can't run."""
    reason = problem(backend, model, config)
    if reason:
        raise ValueError(reason)


def triton_needs(model: Decoder, config: EngineConfig) -> list[Need]:
    """What our own kernels run on."""
    device, interpreted = model.device, os.environ.get("TRITON_INTERPRET") == "1"
    on_gpu = device.type == "cuda"
    needs = [
        (
            importlib.util.find_spec("triton") is not None,
            "needs Triton: pip install triton (or 'nanoteach[gpu]')",
        ),
        (
            on_gpu or interpreted,
            "needs an NVIDIA GPU; without one, TRITON_INTERPRET=1 in the environment runs its "
            "kernels on the CPU, slowly",
        ),
        (
            not device.index,
            f"runs on the first GPU, not on {device}: choose another with CUDA_VISIBLE_DEVICES",
        ),
    ]
    if on_gpu:
        from nanoteach.tiled_attention import TILE_KEYS, TILE_ROWS

        gpu = torch.cuda.get_device_properties(device)
        # A program of the prompts' kernel holds its queries, and two tiles of keys and values.
        takes = (TILE_ROWS + 2 * 2 * TILE_KEYS) * model.config.head_dim * model.dtype.itemsize
        has = getattr(gpu, "shared_memory_per_block_optin", takes)  # older torch does not tell
        needs += [
            (gpu.major >= 8, "needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer"),
            (
                takes <= has,
                f"takes {takes} bytes of shared memory for this head_dim in {model.dtype}, and "
                f"this GPU has {has}: try dtype='bfloat16'",
            ),
        ]
    return needs


def flash_attn_needs(model: Decoder, config: EngineConfig) -> list[Need]:
    """What the library can compute. It is not imported: without a GPU, it need not be there."""
    size, dtype, head_dim = config.block_size, model.dtype, model.config.head_dim
    return [
        (
            model.device.type == "cuda"
            and torch.cuda.get_device_capability(model.device) >= (8, 0),
            "needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer: set "
            "attention_backend='sdpa', which runs anywhere",
        ),
        (
            size % 256 == 0,
            f"reads blocks of a multiple of 256 tokens, not of {size}: set block_size=256, or "
            "attention_backend='triton', which takes any",
        ),
        (
            dtype in (torch.float16, torch.bfloat16),
            f"computes in float16 or bfloat16, not in {dtype}: set dtype='bfloat16'",
        ),
        (
            head_dim <= 256,
            f"takes a head_dim of at most 256, and this model's is {head_dim}: set "
            "attention_backend='sdpa', which takes any",
        ),
    ]
