"""Llama, Qwen3 and Qwen3-MoE: one decoder over a flat batch of tokens.

A batch is T tokens without padding; which token sees which is the business of `attend`, which the caller
passes in: `Packed` for training, the sampler's cache for decoding. Attribute names are those of a Hugging
Face state dict. Not here: sliding windows, biases, RoPE scaling other than llama3; a config that asks for
one is refused. Shape letters: kernels/__init__.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.attention import packed_causal
from kernels.linear_logp import linear_logp

# architecture -> model_type, RMSNorm on queries and keys, mixture of experts, head_dim may be left out
ARCHITECTURES = {
    "LlamaForCausalLM": {"model_type": "llama", "qk_norm": False, "moe": False, "head_dim_derived": True},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "qk_norm": True, "moe": False, "head_dim_derived": False},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe", "qk_norm": True, "moe": True, "head_dim_derived": False,
    },
}  # fmt: skip
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# what the code below does not do: field -> the values that switch it off (a missing field is off, too)
REFUSED = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers that define a model; no field has a value from memory, `from_hf` wants them all."""

    architecture: str  # a key of ARCHITECTURES
    vocab_size: int  # V, rows of the embedding; may exceed the tokenizer's length
    hidden_size: int  # D
    intermediate_size: int  # F of dense layers
    num_layers: int
    num_heads: int  # H
    num_kv_heads: int  # J
    head_dim: int  # E; H * E need not be D
    max_positions: int  # tokens of context the checkpoint was made for
    rope_theta: float
    norm_eps: float
    tied: bool  # lm_head.weight is embed_tokens.weight
    qk_norm: bool  # RMSNorm over E on queries and keys, before RoPE
    rope_scaling: dict[str, Any] | None = None  # the fields LLAMA3_SCALING, or None
    num_experts: int = 0  # 0 = dense; the fields below are for num_experts > 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # F of one expert
    norm_topk_prob: bool = False  # whether the chosen experts' weights are scaled to sum to 1
    decoder_sparse_step: int = 1  # layer i has experts when (i + 1) is a multiple of it
    mlp_only_layers: tuple[int, ...] = ()  # layers that stay dense

    def __post_init__(self):
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"architecture={self.architecture!r}; nanoplan knows {', '.join(ARCHITECTURES)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs, use an even width")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok}; wanted 1 to num_experts={self.num_experts}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read the contents of a config.json.

        raises  ValueError naming the field, for an architecture, activation or RoPE type that is not built
                here and for every missing field: class defaults differ from checkpoints, so none is filled in
        """
        architecture = _architecture(config)
        flags = ARCHITECTURES[architecture]
        for field, off in REFUSED.items():
            if config.get(field, off[0]) not in off:
                raise ValueError(f"config.json: {field}={config[field]!r} is not supported, only {off[0]!r}")
        if (act := _need(config, "hidden_act")) != "silu":
            raise ValueError(f"config.json: hidden_act={act!r} is not supported, only 'silu'")
        theta, scaling = _rope_fields(config)
        heads, hidden = _need(config, "num_attention_heads"), _need(config, "hidden_size")
        if config.get("head_dim") is None and flags["head_dim_derived"]:
            if hidden % heads:
                raise ValueError(
                    f"config.json: hidden_size={hidden} is no multiple of num_attention_heads={heads}; "
                    "head_dim must be given"
                )
            head_dim = hidden // heads  # Llama's definition where the field is absent
        else:
            head_dim = _need(config, "head_dim")
        return cls(
            architecture=architecture,
            vocab_size=_need(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_need(config, "intermediate_size"),
            num_layers=_need(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_need(config, "num_key_value_heads"),
            head_dim=head_dim,
            max_positions=_need(config, "max_position_embeddings"),
            rope_theta=theta,
            norm_eps=_need(config, "rms_norm_eps"),
            tied=_need(config, "tie_word_embeddings"),
            qk_norm=flags["qk_norm"],
            rope_scaling=scaling,
            **(_moe_fields(config) if flags["moe"] else {}),
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model: `from_hf(to_hf(c)) == c`, and transformers builds the same model."""
        config = {
            "architectures": [self.architecture],
            "model_type": ARCHITECTURES[self.architecture]["model_type"],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rope_scaling": {"rope_type": "llama3", **self.rope_scaling} if self.rope_scaling else None,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "attention_bias": False,
        }
        if self.num_experts:
            config |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.num_experts_per_tok,
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.norm_topk_prob,
                "decoder_sparse_step": self.decoder_sparse_step,
                "mlp_only_layers": list(self.mlp_only_layers),
            }
        return config

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer` (from 0) is a mixture of experts."""
        if not self.num_experts or layer in self.mlp_only_layers:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0


def _need(config: Mapping[str, Any], field: str, *, where: str = "config.json") -> Any:
    """config[field], or a ValueError that says why nothing is filled in."""
    if config.get(field) is None:
        raise ValueError(
            f"{where} has no {field!r}: it is part of the architecture and never guessed; "
            "copy it from the original checkpoint's config.json"
        )
    return config[field]


def _architecture(config: Mapping[str, Any]) -> str:
    """The key of ARCHITECTURES that a config.json names, by `architectures` or else by `model_type`."""
    by_type = {flags["model_type"]: name for name, flags in ARCHITECTURES.items()}
    named = config.get("architectures") or [by_type.get(config.get("model_type"))]
    if len(named) != 1 or named[0] not in ARCHITECTURES:
        raise ValueError(
            f"config.json: architectures={config.get('architectures')!r}, "
            f"model_type={config.get('model_type')!r}; nanoplan knows {', '.join(ARCHITECTURES)}"
        )
    return named[0]


def _rope_fields(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and the llama3 scaling, from `rope_parameters` or the older pair of fields."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    thetas = {source["rope_theta"] for source in (config, rope) if source.get("rope_theta") is not None}
    if len(thetas) > 1:
        raise ValueError(f"config.json: rope_theta is given twice and differs, {sorted(thetas)}; keep one")
    theta = float(thetas.pop() if thetas else _need({}, "rope_theta"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if (partial := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor={partial!r} is not supported, only 1.0")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"config.json: rope type {kind!r} is not supported, only 'default' and 'llama3'")
    where = "config.json: llama3 rope scaling"
    return theta, {field: _need(rope, field, where=where) for field in LLAMA3_SCALING}


def _moe_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Qwen3-MoE; the number of experts goes by two names."""
    experts = config.get("num_experts", config.get("num_local_experts"))
    return {
        "num_experts": _need({"num_experts": experts}, "num_experts"),
        "num_experts_per_tok": _need(config, "num_experts_per_tok"),
        "moe_intermediate_size": _need(config, "moe_intermediate_size"),
        "norm_topk_prob": _need(config, "norm_topk_prob"),
        "decoder_sparse_step": _need(config, "decoder_sparse_step"),
        "mlp_only_layers": tuple(_need(config, "mlp_only_layers")),
    }


class Attend(Protocol):
    """What decides which tokens a query sees. Called once per layer, after qk-norm and RoPE."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, H, E), k and v (T, J, E) -> (T, H, E)."""
        ...


class Packed:
    """Attend for training: each token sees its own sequence up to itself.

    cu_seqlens  (S + 1,) int, first token of each sequence and T at the end
    max_len     tokens of the longest sequence
    """

    def __init__(self, cu_seqlens: Tensor, max_len: int):
        self.cu_seqlens = cu_seqlens
        self.max_len = max_len

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_causal(q, k, v, self.cu_seqlens, max_len=self.max_len)


def inverse_frequencies(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Radians per position of each pair of channels: theta^(-2i/E), (E / 2,) fp32.

    llama3 scaling divides the slow ones by `factor`, leaves the fast ones, and blends in between.
    source  Llama 3.1's reference; equal to transformers' `llama3` rope type
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponent
    if config.rope_scaling is None:
        return inv_freq
    factor, low, high, original = (config.rope_scaling[field] for field in LLAMA3_SCALING)
    turns = original * inv_freq / (2 * math.pi)  # rotations within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0 = slower than `low` turns, 1 = faster than `high`
    return keep * inv_freq + (1 - keep) * inv_freq / factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split RoPE: channel i turns together with channel i + E/2.

    x (T, heads, E); cos and sin (T, 1, E) fp32, sin with its first half negated. Computed in fp32, cast last.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def product(x: Tensor, w: Tensor) -> Tensor:
    """x (N, in), w (out, in) -> x @ w^T, (N, out).

    A decode step on a CPU has few rows and reads large weights: w @ x^T is about a third faster there.
    """
    narrow = x.dim() == 2 and 8 <= len(x) <= 64 and w.numel() >= 2**17
    if narrow and x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_grad_enabled():
        return torch.mm(w, x.t()).t()
    return F.linear(x, w)


class Linear(nn.Linear):
    """x (N, in) -> (N, out), no bias. What LoRA replaces; lora.py has the other half."""

    def __init__(self, num_in: int, num_out: int):
        super().__init__(num_in, num_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight)

    def widened(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(features, weight) with self(x) = features @ weight^T; an adapter adds r columns to both."""
        return x, self.weight


class Attention(nn.Module):
    """Grouped-query attention up to and after `attend`."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q = self.q_proj(x).view(len(x), -1, self.head_dim)  # (T, H, E)
        k = self.k_proj(x).view(len(x), -1, self.head_dim)  # (T, J, E)
        v = self.v_proj(x).view(len(x), -1, self.head_dim)  # (T, J, E)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v)  # (T, H, E)
        return self.o_proj(out.reshape(len(x), -1))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), (T, D) -> (T, D)."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj = Linear(hidden, width)
        self.up_proj = Linear(hidden, width)
        self.down_proj = Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def route(logits: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Choose k experts per token: softmax over all of them in fp32, then the k largest.

    logits   (T, experts)
    returns  weights (T, k) fp32, unitless, summing to 1 if `renormalise`; experts (T, k) int64
    """
    weights, experts = logits.float().softmax(-1).topk(k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


class Experts(nn.Module):
    """Each token through its k experts, weighted by the router.

    Tokens are sorted by expert, so an expert is one call. Their number is data: one host sync per layer on a
    GPU. While gradients are recorded, experts without tokens get an empty slice, so that every rank of a
    sharded run has a gradient for every expert.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.k = config.num_experts_per_tok
        self.renormalise = config.norm_topk_prob
        self.gate = Linear(config.hidden_size, config.num_experts)
        self.experts = nn.ModuleList(
            SwiGLU(config.hidden_size, config.moe_intermediate_size) for _ in range(config.num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = route(self.gate(x), self.k, renormalise=self.renormalise)  # (T, k) each
        order = chosen.flatten().argsort(stable=True)  # (T * k,) slots sorted by expert
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        parts = x[order // self.k].split(counts)
        every = torch.is_grad_enabled()
        out = torch.cat(
            [expert(part) for expert, part in zip(self.experts, parts, strict=True) if every or len(part)]
        )
        slots = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        out = out[slots].view(len(x), self.k, -1)  # (T, k, D), back in the tokens' order
        return (out * weights[..., None].to(x.dtype)).sum(1)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        dense = not config.is_sparse(layer)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size) if dense else Experts(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


def logits(h: Tensor, w: Tensor) -> Tensor:
    """h (N, D), w (V, D) of one dtype -> h @ w^T, (N, V) fp32: never rounded to bf16 on the way."""
    if h.is_cuda and h.dtype != torch.float32 and not torch.is_grad_enabled():
        return torch.mm(h, w.t(), out_dtype=torch.float32)  # no fp32 copy of w in every decode step
    return product(h.float(), w.float())


class Model(nn.Module):
    """A causal language model over T packed tokens.

    num_ids        ids below it are the tokenizer's; the softmax runs over these alone, in sampling and in
                   training, because matrices are often padded beyond the tokenizer
    checkpointing  keep one activation per layer and recompute the rest in backward
    """

    def __init__(self, config: ModelConfig, *, checkpointing: bool = False):
        super().__init__()
        self.config = config
        self.checkpointing = checkpointing
        self.num_ids = config.vocab_size
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Block(config, layer) for layer in range(config.num_layers)),
            "norm": nn.RMSNorm(config.hidden_size, config.norm_eps),
        })  # fmt: skip
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.tie()
        self._inv_freq: Tensor | None = None  # no buffer: .to(bfloat16) and to_empty must not reach it

    def tie(self) -> None:
        """Make the head's weight the embedding's Parameter, where the config says so."""
        if self.config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)  # to_empty gives each module its own Parameter
        self.tie()
        return self

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (T, 1, E) fp32 for `rotate`, of positions (T,) int64; made once for all layers."""
        if self._inv_freq is None or self._inv_freq.device != positions.device:
            self._inv_freq = inverse_frequencies(self.config, positions.device)
        angles = positions[:, None, None].float() * self._inv_freq  # (T, 1, E / 2) radians
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        targets: Tensor | None = None,
        *,
        rows: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits of the rows asked for, or the log-probs of their targets.

        ids, positions  (T,) int64, a token's id and its place in its own sequence from 0
        rows            (N,) int64 places in the batch whose next token is wanted; None: all T
        targets         (N,) int64 below num_ids, the token after each row
        returns         without targets: logits (N, num_ids) fp32, not divided by the temperature;
                        with targets: logp (N,) and entropy (N,), fp32, nats, of
                        softmax(logits / temperature), without building (N, num_ids)
        """
        cos, sin = self.rope(positions)
        x = self.model.embed_tokens(ids)  # (T, D)
        recompute = self.checkpointing and torch.is_grad_enabled()
        for block in self.model.layers:
            if recompute:
                # not reentrant: a frozen embedding gives an input without grad, adapters must still learn
                x = checkpoint(block, x, cos, sin, attend, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin, attend)
        if rows is not None:
            x = x[rows]
        h, w = self.lm_head.widened(self.model.norm(x))
        w = w[: self.num_ids]
        if targets is None:
            return logits(h, w)
        return linear_logp(h, w, targets, temperature=temperature)
