"""Model folders in Hugging Face's format, in and out.

The safetensors layout (8 bytes of header length, a JSON header, the tensors' bytes) is read and written here
piece by piece, so that loading and saving need one model's memory and no second copy. Not here: adapters
(lora.py), training state (checkpoint.py), pickled weights.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from torch import Tensor, nn

from nanoplan.chat import Chat
from nanoplan.model import Linear, Model, ModelConfig

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CLASSIFIER = "ForSequenceClassification"  # ends the architecture's name of a folder with a score head
PIECE = 1 << 20  # elements read or written at once
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def fetch(name_or_path: str | Path) -> Path:
    """The folder of a model or adapter: a folder as it is, any other name from the Hugging Face hub.

    raises  ValueError that says what was tried, when it is neither a folder nor to be had from the hub
    """
    if Path(name_or_path).expanduser().is_dir():
        return Path(name_or_path).expanduser()
    name = str(name_or_path)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise ValueError(f"{name!r} is not a folder, and not a name on the Hugging Face hub (owner/model)")
    from huggingface_hub import snapshot_download  # half a second that local folders need not pay

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ValueError(
            f"{name!r} is not a folder here, it is not in the local Hugging Face cache, and it could not be "
            f"downloaded ({type(error).__name__}); give a folder, or connect and check the name"
        ) from error


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where one stored tensor lies."""

    file: Path
    dtype: torch.dtype  # as stored
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file


def _read_header(file: Path) -> dict[str, _Entry]:
    """The tensors of one safetensors file; raises ValueError if it is cut short or malformed."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 + length or length == 0:
            raise ValueError(f"{file}: {size} bytes, shorter than its own header; fetch or copy it again")
        header = json.loads(stream.read(length))
    entries = {}
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        if tensor["dtype"] not in DTYPES:
            raise ValueError(f"{file}: {name} is stored as {tensor['dtype']}; wanted {', '.join(DTYPES)}")
        start, end = tensor["data_offsets"]
        entry = _Entry(file, DTYPES[tensor["dtype"]], tuple(tensor["shape"]), 8 + length + start)
        if end - start != math.prod(entry.shape) * entry.dtype.itemsize or 8 + length + end > size:
            raise ValueError(f"{file}: {name} is cut short ({size} bytes in all); fetch or copy it again")
        entries[name] = entry
    return entries


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a folder and, if it has an index, the file each tensor should be in."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE], {}
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}; only safetensors weights are read")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {len(names)} shards that {INDEX} names are missing: "
            f"{_listed(set(missing))}; fetch them again"
        )
    return [folder / name for name in names], weight_map


def _find_tensors(folder: Path) -> dict[str, _Entry]:
    """All tensors of a folder by name; each lies in one file, and in the one that the index says."""
    files, weight_map = _weight_files(folder)
    found: dict[str, _Entry] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            if name in found:
                raise ValueError(f"{name} is stored twice, in {found[name].file} and in {file}")
            found[name] = entry
    for name, file in weight_map.items():
        if name not in found or found[name].file.name != file:
            raise ValueError(f"{folder / INDEX} says that {name} is in {file}, which does not hold it")
    return found


def _listed(names: set[str], *, most: int = 8) -> str:
    """Names for an error message, the first few spelled out."""
    shown = sorted(names)[:most]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def _check_names(wanted: Mapping[str, Tensor], found: Mapping[str, _Entry | Tensor], *, where: str) -> None:
    """Raise ValueError unless both have the same names and shapes."""
    if unknown := found.keys() - wanted.keys():
        raise ValueError(f"{where}: the model has no parameters for {_listed(unknown)}; wrong config.json?")
    if missing := wanted.keys() - found.keys():
        raise ValueError(f"{where}: no weights for {_listed(missing)}; incomplete, or wrong config.json?")
    for name, tensor in wanted.items():
        if tuple(found[name].shape) != tuple(tensor.shape):
            raise ValueError(
                f"{where}: {name} is {tuple(found[name].shape)}, the model wants {tuple(tensor.shape)}"
            )


def _read_tensor(entry: _Entry, out: Tensor) -> Tensor:
    """Fill `out` with a stored tensor, converted to its dtype and device, a piece at a time."""
    with entry.file.open("rb") as stream:
        stream.seek(entry.start)
        for part in out.view(-1).split(PIECE):
            piece = bytearray(part.numel() * entry.dtype.itemsize)
            stream.readinto(piece)
            part.copy_(torch.frombuffer(piece, dtype=entry.dtype))
    return out


def _named_weights(model: Model) -> dict[str, nn.Parameter]:
    """Parameters by their name in a file: a tied head has none of its own."""
    return dict(model.named_parameters())  # named_parameters names a shared one once, by the embedding


def _set_parameter(model: Model, name: str, value: Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(value))


def dtype_named(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a --dtype flag: torch's name, or "auto", float32 on a CPU and bfloat16 on a GPU."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, auto if name == "auto" else name)


def load_policy(
    name_or_path: str | Path, *, dtype: torch.dtype, device: torch.device | str, checkpointing: bool = False
) -> tuple[Chat, Model]:
    """A model that can act, and its chat, whose `folder` is where they lie.

    raises  ValueError for what cannot be fetched or loaded, and for a chat template that rollouts cannot keep
            ids with (see Chat.check)
    """
    folder = fetch(name_or_path)
    chat = Chat(folder)
    chat.check()
    options = {"dtype": dtype, "device": device, "checkpointing": checkpointing}
    return chat, load_model(folder, num_ids=chat.num_ids, **options)


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    num_ids: int | None = None,
    checkpointing: bool = False,
) -> Model:
    """Build the model of a Hugging Face folder and fill every parameter from it.

    dtype    of the parameters, whatever the file's; a CPU wants float32
    num_ids  the tokenizer's length; None: every row of the embedding is a token
    raises   ValueError that names the tensors or files that are missing, unknown, double, cut short or of
             another shape, and for a config.json that is incomplete or not supported
    Memory: the parameters and one piece of a file; the model is built without storage first.
    """
    folder = Path(folder)
    config = ModelConfig.from_hf(_read_config(folder))
    if num_ids is not None and not 0 < num_ids <= config.vocab_size:
        raise ValueError(
            f"num_ids={num_ids}: the tokenizer's length, wanted 1 to vocab_size={config.vocab_size}"
        )
    with torch.device("meta"):
        model = Model(config, checkpointing=checkpointing)
    entries = _find_tensors(folder)
    head = entries.pop("lm_head.weight", None) if config.tied else None
    _fill(model, entries, folder, dtype, device)
    if head is not None:
        _check_stored_head(model, head)
    model.num_ids = config.vocab_size if num_ids is None else num_ids
    return model


def load_scorer(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Model:
    """The model of a sequence-classification folder with one label: a trunk, and a `score` head (1, D) in the
    place of lm_head. What it gives for a row, where a language model gives logits, is its score: (N, 1) fp32.

    raises  ValueError as load_model does, and for a head of more labels
    """
    folder = Path(folder)
    fields = _read_config(folder)
    names = [name for name in fields.get("architectures") or [] if name.endswith(CLASSIFIER)]
    if len(names) != 1:
        raise ValueError(f"{folder}: architectures={fields.get('architectures')}; wanted one ...{CLASSIFIER}")
    causal = {"architectures": [names[0].removesuffix(CLASSIFIER) + "ForCausalLM"]}
    config = ModelConfig.from_hf(fields | causal | {"tie_word_embeddings": False})
    entries = _find_tensors(folder)
    entries.pop("lm_head.weight", None)  # of the model that the trunk was trained from; nothing reads it
    head = entries.pop("score.weight", None)
    if head is None or head.shape[:1] != (1,):
        found = "no score.weight" if head is None else f"a score head of {head.shape[0]} labels"
        raise ValueError(f"{folder} has {found}; a reward model has one label")
    with torch.device("meta"):
        model = Model(config)
        model.lm_head = Linear(config.hidden_size, 1)
    _fill(model, entries | {"lm_head.weight": head}, folder, dtype, device)
    model.num_ids = 1
    return model


def _read_config(folder: Path) -> dict:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; a Hugging Face model folder is wanted")
    return json.loads((folder / "config.json").read_text())


def _fill(model: Model, entries: dict[str, _Entry], folder: Path, dtype, device) -> None:
    """Read every parameter of a model without storage from its entry."""
    _check_names(_named_weights(model), entries, where=str(folder))
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].file, item[1].start)):
        _set_parameter(model, name, _read_tensor(entry, torch.empty(entry.shape, dtype=dtype, device=device)))
    model.tie()


def _check_stored_head(model: Model, head: _Entry) -> None:
    """A tied model's file may repeat the embedding as lm_head.weight; anything else there is refused."""
    embedding = model.model.embed_tokens.weight
    if head.shape != tuple(embedding.shape) or not torch.equal(
        _read_tensor(head, torch.empty_like(embedding)), embedding
    ):
        raise ValueError(
            f"{head.file}: lm_head.weight differs from the embedding, yet config.json has tie_word_embeddings"
        )


def init_model(config: ModelConfig, *, seed: int, dtype: torch.dtype = torch.float32) -> Model:
    """A model with random weights: the same for a seed whatever the dtype and the global generator.

    Norms are 1. Matrices are normal with variance 1 / inputs; those that write into the residual stream are
    divided by sqrt(2 * num_layers), so that its variance does not grow with depth (GPT-2).
    """
    with torch.device("meta"):
        model = Model(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in _named_weights(model).items():
        if parameter.dim() == 1:
            value = torch.ones(parameter.shape)
        else:
            value = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value /= math.sqrt(2 * config.num_layers)
        _set_parameter(model, name, value.to(dtype))
    model.tie()
    return model


def save_model(
    model: Model,
    folder: str | Path,
    *,
    state: Mapping[str, Tensor] | None = None,
    extra_files_from: str | Path | None = None,
    max_shard_gb: float = 5.0,
) -> None:
    """Write a Hugging Face folder that transformers and `load_model` read.

    state             plain tensors by name, where they are not the model's own (gathered from ranks)
    extra_files_from  a model folder whose tokenizer, chat template and generation settings are copied, and
                      whose other config.json fields (eos_token_id, ...) are kept
    max_shard_gb      a file's largest size in 1e9 bytes; more than one file gets an index
    raises            ValueError when names or shapes are not the model's, or adapters would be lost;
                      OSError (full disk): what was in the folder before is unchanged
    Everything is written under temporary names first and renamed when all of it is on the disk.
    """
    folder = Path(folder)
    tensors = dict(state if state is not None else model.state_dict())
    if model.config.tied:
        tensors.pop("lm_head.weight", None)
    if adapters := {name for name in tensors if ".lora_" in name}:
        raise ValueError(f"saving {folder}: adapters like {min(adapters)} need lora.save_adapter")
    wanted = {name: weight for name, weight in _named_weights(model).items() if ".lora_" not in name}
    _check_names(wanted, tensors, where=f"saving {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    drafts = folder / "saving.tmp"
    shutil.rmtree(drafts, ignore_errors=True)  # of a run that was killed
    try:
        drafts.mkdir()
        _write_files(drafts, model.config, tensors, extra_files_from, max_shard_gb)
    except OSError as error:
        shutil.rmtree(drafts, ignore_errors=True)
        raise OSError(error.errno, f"saving {folder}: {error}; the files there are unchanged") from error
    _publish(drafts, folder)
    drafts.rmdir()


def _write_files(
    drafts: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    extra_files_from: str | Path | None,
    max_shard_gb: float,
) -> None:
    """All files of a model folder, into an empty one."""
    fields = {}
    if extra_files_from is not None:
        source = Path(extra_files_from)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, drafts / name)
        fields = json.loads((source / "config.json").read_text())
        for other_spelling in ("rope_parameters", "dtype", "num_local_experts"):
            fields.pop(other_spelling, None)
    dtype = str(tensors["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    fields |= config.to_hf() | {"torch_dtype": dtype}
    (drafts / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    shards = _split(tensors, max_shard_gb)
    if len(shards) == 1:
        _write_safetensors(drafts / SINGLE, shards[0])
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_safetensors(drafts / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (drafts / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _split(tensors: Mapping[str, Tensor], max_shard_gb: float) -> list[dict[str, Tensor]]:
    """Neighbours into shards of at most max_shard_gb; a larger tensor gets a shard of its own."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0  # bytes in the last shard
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        if shards[-1] and size + num_bytes > max_shard_gb * 1e9:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes
    return shards


def _write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, flushed to the disk; tensors may lie on any device."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants tensors aligned
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for piece in tensor.detach().reshape(-1).split(PIECE):
                stream.write(memoryview(piece.cpu().contiguous().view(torch.uint8).numpy()))
        stream.flush()
        os.fsync(stream.fileno())


def _publish(drafts: Path, folder: Path) -> None:
    """Move finished files into the folder and remove the weights they replace."""
    new = {file.name for file in drafts.iterdir()}
    if INDEX in new and (folder / INDEX).exists():
        (folder / INDEX).unlink()  # a kill between the renames leaves no index, never a mixture of two models
    for name in sorted(new, key=lambda name: name in (SINGLE, INDEX)):
        os.replace(drafts / name, folder / name)
    for file in list(folder.iterdir()):
        if file.name not in new and (file.name in (SINGLE, INDEX) or SHARD.fullmatch(file.name)):
            file.unlink()
