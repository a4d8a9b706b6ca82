"""LoRA adapters on any linear of a model, and their folders in PEFT's format.

An adapted linear computes x W^T + s (x A^T) B^T with W frozen and s = alpha / r. The product B A is never
added to W: in bf16 most small updates would round away. A and B are fp32 whatever W's dtype, and are cast to
it for the product. Measured with W in bf16 and an update of 1/5000 of the product: 99 % of it reaches the
output; merged into W, 16 %; added to the finished product, 15 %. Not here: dropout, DoRA, several adapters at
once; a PEFT folder that needs one of them is refused.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nanoplan.model import Linear, Model

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT's wrapper modules, part of its key names
# what a PEFT config may say only in these ways (a missing field is off, too)
REFUSED = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None,),
    "init_lora_weights": (True, False, "gaussian", None),  # others (PiSSA, ...) change the base as well
}


@dataclass(frozen=True, slots=True)
class Lora:
    """The size of an adapter."""

    r: int  # rank
    alpha: float  # numerator of the scale, unitless
    rslora: bool = False  # scale alpha / sqrt(r) instead of alpha / r

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


class LoraLinear(Linear):
    """A frozen linear plus its adapter: lora_A (r, in) and lora_B (out, r), both fp32."""

    def __init__(self, base: Linear, lora: Lora, generator: torch.Generator):
        with torch.device("meta"):
            super().__init__(base.in_features, base.out_features)
        self.weight = base.weight  # the same Parameter: a tied head stays tied
        self.lora = lora
        self.on = True
        bound = base.in_features**-0.5  # PEFT's start: A uniform, B zero
        a = torch.empty(lora.r, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(a.to(base.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, lora.r, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        if not self.on:
            return F.linear(x, self.weight)
        low = F.linear(x, self.lora_A.to(x.dtype)) * self.lora.scale  # (N, r)
        delta = F.linear(low, self.lora_B.to(x.dtype))  # (N, out)
        # The frozen product is accumulated onto delta and rounded once. The other way round, a delta below
        # half a bf16 step of the finished product would round away.
        return torch.addmm(delta, x, self.weight.t())

    def widened(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.on:
            return x, self.weight
        low = F.linear(x, self.lora_A.to(x.dtype)) * self.lora.scale  # (N, r)
        return torch.cat([x, low], -1), torch.cat([self.weight, self.lora_B.to(self.weight.dtype)], -1)


def _adapted(model: Model) -> dict[str, LoraLinear]:
    """The linears that have an adapter, by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def _wrap(model: Model, names: Iterable[str], lora: Lora, *, seed: int) -> None:
    """Freeze the model and put an adapter on each named linear."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LoraLinear(model.get_submodule(name), lora, generator))


def add_lora(
    model: Model,
    *,
    r: int,
    alpha: float,
    targets: tuple[str, ...] = TARGETS,
    seed: int = 0,
    rslora: bool = False,
) -> Model:
    """Freeze the model and add an adapter to every linear whose name, or last part of it, is a target.

    r, alpha  rank and numerator of the scale alpha / r (alpha / sqrt(r) with rslora), unitless
    returns   the same model; its outputs are unchanged, because B starts at zero
    raises    ValueError for a rank below 1, a target that names no linear, and a model that has adapters
    source    LoRA (arXiv:2106.09685); rslora arXiv:2312.03732
    """
    if r < 1:
        raise ValueError(f"r={r}: the rank of an adapter must be at least 1")
    if _adapted(model):
        raise ValueError("the model has adapters; a second set is not supported, load the base model again")
    linears = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    names = [name for name in linears if name in targets or name.rpartition(".")[2] in targets]
    reached = {*names, *(name.rpartition(".")[2] for name in names)}
    if unknown := [target for target in targets if target not in reached]:
        known = sorted({name.rpartition(".")[2] for name in linears})
        raise ValueError(f"targets={unknown} name no linear of the model; it has {', '.join(known)}")
    _wrap(model, names, Lora(r, alpha, rslora), seed=seed)
    return model


@contextmanager
def adapters_off(model: Model) -> Iterator[Model]:
    """Inside, the model is the one it was before add_lora, bit for bit: the reference model.

    raises  ValueError if the model has no adapters, because then it is no reference
    """
    modules = list(_adapted(model).values())
    if not modules:
        raise ValueError("the model has no adapters to switch off; a reference needs a model of its own")
    before = [module.on for module in modules]
    for module in modules:
        module.on = False
    try:
        yield model
    finally:
        for module, on in zip(modules, before, strict=True):
            module.on = on


def trainable(model: Model) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def save_adapter(
    model: Model, folder: str | Path, *, base_name: str, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write the adapters as a folder that PEFT and `load_adapter` read.

    base_name  the model the adapter belongs to, as PEFT should find it: a hub name or a folder
    state      plain tensors by parameter name, where they are not the model's own (gathered from ranks)
    raises     ValueError for a model without adapters and for a state that lacks some; OSError (full disk):
               the adapter that was in the folder is unchanged
    """
    modules = _adapted(model)
    if not modules:
        raise ValueError(f"saving {folder}: the model has no adapters; save_model writes whole models")
    source = dict(model.named_parameters()) if state is None else state
    wanted = [f"{name}.{leaf}" for name in modules for leaf in ("lora_A", "lora_B")]
    if missing := [name for name in wanted if name not in source]:
        raise ValueError(f"saving {folder}: state lacks {len(missing)} adapter tensors, first {missing[0]}")
    tensors = {f"{PREFIX}{name}.weight": source[name].detach().cpu().contiguous() for name in wanted}
    lora = next(iter(modules.values())).lora
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": _target_modules(model),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, folder / f"{WEIGHTS}.tmp", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"saving {folder}: {error}; the files there are unchanged") from error
    (folder / f"{CONFIG}.tmp").write_text(json.dumps(config, indent=2) + "\n")
    for name in (WEIGHTS, CONFIG):
        os.replace(folder / f"{name}.tmp", folder / name)


def _target_modules(model: Model) -> list[str]:
    """What PEFT should match: last parts of names where all such linears are adapted, else whole names."""
    modules = _adapted(model)
    short = {name.rpartition(".")[2] for name in modules}
    matched = {
        name
        for name, module in model.named_modules()
        if isinstance(module, Linear) and name.rpartition(".")[2] in short
    }
    return sorted(short if matched == set(modules) else modules)


def load_adapter(model: Model, folder: str | Path) -> Model:
    """Fill the model's adapters from a PEFT folder, adding them first where the model has none.

    returns  the same model
    raises   ValueError, before anything is changed, for a folder that is incomplete, needs a feature that is
             not built here, or does not fit the model or the adapters it has
    """
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}; an adapter folder in PEFT's format is wanted")
    lora = _read_config(folder)
    tensors = {}  # parameter name -> tensor
    for key, tensor in load_file(folder / WEIGHTS).items():
        if not (key.startswith(PREFIX) and key.endswith((".lora_A.weight", ".lora_B.weight"))):
            raise ValueError(f"{folder / WEIGHTS}: {key} is no LoRA tensor of PEFT's format")
        tensors[key.removeprefix(PREFIX).removesuffix(".weight")] = tensor
    _check_fit(model, lora, tensors, where=str(folder))
    if not _adapted(model):
        _wrap(model, sorted({name.rpartition(".")[0] for name in tensors}), lora, seed=0)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
    return model


def _read_config(folder: Path) -> Lora:
    """The size that an adapter_config.json gives, refusing what LoraLinear does not do."""
    file = folder / CONFIG
    config = json.loads(file.read_text())
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type={config.get('peft_type')!r}; only 'LORA' is supported")
    for field, off in REFUSED.items():
        if config.get(field) not in off:
            raise ValueError(f"{file}: {field}={config[field]!r} is not supported, only {off[0]!r}")
    for field in ("r", "lora_alpha"):
        if field not in config:
            raise ValueError(f"{file} has no {field!r}; without it the adapter's scale is unknown")
    return Lora(config["r"], config["lora_alpha"], bool(config.get("use_rslora")))


def _check_fit(model: Model, lora: Lora, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Raise ValueError unless the stored adapter is the model's, or can become it."""
    adapted = _adapted(model)
    names = {name.rpartition(".")[0] for name in tensors}
    if adapted:
        if differ := sorted(names ^ adapted.keys()):
            raise ValueError(
                f"{where}: the model and the adapter differ in {len(differ)} targets, {differ[0]}"
            )
        size = next(iter(adapted.values())).lora
        if lora != size:
            raise ValueError(
                f"{where}: the adapter is {lora}, the model's is {size}; give the same r and alpha"
            )
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    for name in sorted(names):
        if name not in linears:
            raise ValueError(f"{where}: the model has no linear {name}; is this adapter for another model?")
        shapes = {
            "lora_A": (lora.r, linears[name].in_features),
            "lora_B": (linears[name].out_features, lora.r),
        }
        for leaf, shape in shapes.items():
            if f"{name}.{leaf}" not in tensors:
                raise ValueError(f"{where}: {name}.{leaf} is missing; fetch the adapter again")
            if (got := tuple(tensors[f"{name}.{leaf}"].shape)) != shape:
                raise ValueError(f"{where}: {name}.{leaf} is {got}, the model and r={lora.r} want {shape}")
