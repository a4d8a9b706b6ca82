"""Model folders: nothing missing, nothing twice, nothing lost."""

import dataclasses
import json
import resource
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoplan.lora import add_lora
from nanoplan.model import ModelConfig, Packed
from nanoplan.weights import fetch, init_model, load_model, save_model

TIED = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=12, max_positions=128, rope_theta=1e4, norm_eps=1e-6, tied=True,
    qk_norm=True,
)  # fmt: skip
MOE = ModelConfig(
    architecture="Qwen3MoeForCausalLM", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=12, max_positions=128, rope_theta=1e4, norm_eps=1e-6, tied=False,
    qk_norm=True, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
    mlp_only_layers=(0,),
)  # fmt: skip
IDS = torch.arange(20) * 3


def logits(model):
    with torch.no_grad():
        return model(IDS, torch.arange(20), Packed(torch.tensor([0, 20]), 20))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("config", [TIED, MOE], ids=["tied", "moe"])
@pytest.mark.parametrize("max_shard_gb", [5.0, 2e-5], ids=["one_file", "sharded"])
def test_saved_folder_loads_here_and_in_transformers(config, max_shard_gb, tmp_path):
    # a key name, the tie or the index differs from Hugging Face's: the export loads nowhere else
    model = init_model(config, seed=0)
    save_model(model, tmp_path, max_shard_gb=max_shard_gb)
    again = load_model(tmp_path)
    for (name, weight), (name_again, weight_again) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert name == name_again and torch.equal(weight, weight_again)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_gb < 1)
    stored = set().union(*(load_file(file) for file in files))
    assert ("lm_head.weight" in stored) == (not config.tied)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(logits(again), reference(IDS[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_folder_sharded_by_transformers_loads(tmp_path):
    # an index of another writer's making
    save_model(init_model(MOE, seed=0), tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    assert torch.equal(logits(load_model(tmp_path / "theirs")), logits(load_model(tmp_path / "ours")))


def test_dtype_is_the_one_asked_for(tmp_path):
    # a bf16 file read as fp32 is exact; the norms or the head left in the file's dtype
    save_model(init_model(TIED, seed=0, dtype=torch.bfloat16), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    model = load_model(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(logits(model), logits(init_model(TIED, seed=0, dtype=torch.bfloat16).float()))
    half = load_model(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half.lm_head.weight is half.model.embed_tokens.weight


def test_saving_again_leaves_no_old_weights(tmp_path):
    # a loader that prefers the single file reads the model of yesterday
    for seed, max_shard_gb in enumerate([5.0, 2e-5, 1e-5, 5.0]):
        model = init_model(TIED, seed=seed)
        save_model(model, tmp_path, max_shard_gb=max_shard_gb)
        assert torch.equal(logits(load_model(tmp_path)), logits(model))
    assert sorted(contents(tmp_path)) == ["config.json", "model.safetensors"]


def test_tokenizer_files_and_other_config_fields_are_kept(tmp_path):
    # an export without its stop ids or chat template
    source = tmp_path / "source"
    save_model(init_model(TIED, seed=0), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": [7, 9], "dtype": "float64"}))
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (source / name).write_text(name)
    save_model(init_model(TIED, seed=1), tmp_path / "out", extra_files_from=source)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == [7, 9] and config["torch_dtype"] == "float32" and "dtype" not in config
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == name


def test_gathered_state_is_saved_and_adapters_are_not_lost(tmp_path):
    # the model's own sharded tensors written instead of the gathered ones; an export silently without LoRA
    model = init_model(TIED, seed=0)
    state = dict(init_model(TIED, seed=1).state_dict())
    save_model(model, tmp_path, state=state)
    assert torch.equal(logits(load_model(tmp_path)), logits(init_model(TIED, seed=1)))
    with pytest.raises(ValueError, match=r"no weights for model\.norm\.weight"):
        save_model(model, tmp_path, state={k: v for k, v in state.items() if k != "model.norm.weight"})
    with pytest.raises(ValueError, match="save_adapter"):
        save_model(add_lora(model, r=2, alpha=4), tmp_path)


def edit(folder, change):
    """Apply `change` to the tensors of a folder's single file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(extra=torch.zeros(1)), "no parameters for extra"),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "no weights for model.layers.1.mlp.up_proj"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), r"model.norm.weight is \(31,\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}), "stored as I8"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(61, 32)}), "lm_head.weight differs"),
    ],
    ids=["unknown", "missing", "shape", "dtype", "tied_but_different"],
)
def test_tensors_that_do_not_fit_are_named(change, message, tmp_path):
    # a parameter left at its random start, or a weight dropped in silence
    save_model(init_model(TIED, seed=0), tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_repeated_tied_head_is_accepted_when_equal(tmp_path):
    # tied checkpoints in the wild that store the head as well
    model = init_model(TIED, seed=0)
    save_model(model, tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    again = load_model(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


def test_shards_missing_cut_short_or_double(tmp_path):
    # a download that stopped half-way loads as a model with random layers
    save_model(init_model(TIED, seed=0), tmp_path, max_shard_gb=2e-5)
    shards = sorted(tmp_path.glob("*.safetensors"))
    whole = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(ValueError, match=f"1 of {len(shards)} shards .* missing: {shards[1].name}"):
        load_model(tmp_path)
    for length in (4, 100, len(whole) - 1):
        shards[1].write_bytes(whole[:length])
        with pytest.raises(ValueError, match="short"):
            load_model(tmp_path)
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(ValueError, match="stored twice"):
        load_model(tmp_path)
    shards[1].write_bytes(whole)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = shards[0].name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is in .*, which does not hold it"):
        load_model(tmp_path)


def test_folders_without_a_model(tmp_path):
    # a stack trace about a missing key instead of the file that is missing
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TIED.to_hf()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="only safetensors weights are read"):
        load_model(tmp_path)
    save_model(init_model(TIED, seed=0), tmp_path)
    with pytest.raises(ValueError, match="num_ids=62"):
        load_model(tmp_path, num_ids=62)
    assert load_model(tmp_path, num_ids=60).num_ids == 60


@pytest.mark.parametrize("max_shard_gb", [5.0, 2e-5], ids=["one_file", "sharded"])
def test_full_disk_loses_nothing(max_shard_gb, tmp_path):
    # the old model truncated before the new one is written
    save_model(init_model(TIED, seed=0), tmp_path, max_shard_gb=max_shard_gb)
    before = contents(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, hard))  # bytes a file may have, less than any shard
    try:
        with pytest.raises(OSError, match="files there are unchanged"):
            save_model(init_model(TIED, seed=1), tmp_path, max_shard_gb=max_shard_gb)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path) == before


def test_killed_save_leaves_a_loadable_folder(tmp_path):
    # temporary files of a killed run taken for weights, or in the way of the next save
    save_model(init_model(TIED, seed=0), tmp_path)
    (tmp_path / "saving.tmp").mkdir()
    (tmp_path / "saving.tmp" / "model.safetensors").write_bytes(b"torn")
    assert torch.equal(logits(load_model(tmp_path)), logits(init_model(TIED, seed=0)))
    save_model(init_model(TIED, seed=1), tmp_path)
    assert torch.equal(logits(load_model(tmp_path)), logits(init_model(TIED, seed=1)))
    assert not (tmp_path / "saving.tmp").exists()


PEAK = """
import re, sys, torch
from nanoplan.weights import load_model
def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
for folder in sys.argv[1:]:
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
    model = load_model(folder)
    size = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    print((status("VmHWM") - before) / size)
    del model
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_loading_needs_the_memory_of_one_model(tmp_path):
    # the file mapped or read whole beside the model: the ranks of a machine do not fit into its memory
    config = dataclasses.replace(TIED, vocab_size=20_000, hidden_size=384, intermediate_size=2048, tied=False)
    for dtype in (torch.bfloat16, torch.float32):
        save_model(init_model(config, seed=0, dtype=dtype), tmp_path / str(dtype))
    run = [sys.executable, "-c", PEAK, *map(str, tmp_path.iterdir())]
    ratios = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    assert len(ratios) == 2
    assert all(0.9 < float(ratio) < 1.15 for ratio in ratios), ratios


def test_names_that_cannot_be_fetched(tmp_path):
    # fifty lines of connection errors; a mistyped path taken for a name on the hub
    assert fetch(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="is not a folder, and not a name"):
        fetch(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"'nobody/no-such-model' is not a folder here, .* downloaded"):
        fetch("nobody/no-such-model")


def test_random_init_depends_on_the_seed_alone():
    # ranks that start from different weights because one drew a random number before
    torch.manual_seed(1)
    first = init_model(TIED, seed=3).state_dict()
    torch.manual_seed(2)
    again = init_model(TIED, seed=3).state_dict()
    other = init_model(TIED, seed=4).state_dict()
    half = init_model(TIED, seed=3, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name].bfloat16(), half[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
