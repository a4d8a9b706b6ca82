"""Decode steps of nanoplan's sampler with and without shared prompts, for bench/gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanoplan.model import Model, ModelConfig
from nanoplan.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Load:
    """Groups of rows at one prompt each, every row with tokens of its own after it."""

    rows: int
    members: int  # rows of a group
    prompt: int  # tokens
    own: int  # tokens of a row after its prompt
    steps: int = 64  # most steps that are timed


METHODS = ("shared prompts", "shared prompts (again)", "own copies", "own copies, torch")


def make_model(*, layers: int, smoke: bool, device: str) -> Model:
    """Random weights, bf16, in the shape of Qwen3-4B with fewer layers; smoke: a toy."""
    shape = {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
    }
    if smoke:
        shape = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "num_kv_heads": 1,
            "head_dim": 16,
        }
    config = ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=500 if smoke else 151_936, num_layers=layers,
        max_positions=40_960, rope_theta=1e6, norm_eps=1e-6, tied=True, qk_norm=True, **shape,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return Model(config).bfloat16().requires_grad_(False)


def start(model: Model, load: Load, method: str) -> tuple[Sampler, list[int]]:
    """A sampler and its rows, ready to step."""
    generator = torch.Generator().manual_seed(0)

    def ids(num: int) -> list[int]:
        return torch.randint(0, model.num_ids, (num,), generator=generator).tolist()

    max_len = load.prompt + load.own + load.steps + 8
    sampler = Sampler(model, rows=load.rows, max_len=max_len)
    if method.endswith("torch"):
        sampler.cache.kernels = False
    rows = []
    for first in range(0, load.rows, load.members):
        prompt, seeds = ids(load.prompt), range(first, first + load.members)
        if method.startswith("shared"):
            head = sampler.open(prompt, seed=first)
            rows += [head, *(sampler.fork(head, seed=seed) for seed in seeds[1:])]
        else:
            rows += [sampler.open(prompt, seed=seed) for seed in seeds]
    for row in rows:
        sampler.extend(row, ids(load.own))
    return sampler, rows


def stepper(model: Model, load: Load, method: str) -> Callable[[], None]:
    """A call that makes one step; the first one also opens the rows, prefills and captures the graph."""
    ready = []

    def step():
        if not ready:
            ready.append(start(model, load, method))
        sampler, rows = ready[0]
        sampler.step(rows)

    return step


def step_bytes(model: Model, load: Load, method: str) -> int:
    """What a step cannot avoid to read: the weights, and each row's tokens or the shared ones once."""
    c = model.config
    prompts = load.rows // load.members if method.startswith("shared") else load.rows
    tokens = prompts * load.prompt + load.rows * load.own
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return weights + 2 * 2 * c.num_kv_heads * c.head_dim * c.num_layers * tokens
