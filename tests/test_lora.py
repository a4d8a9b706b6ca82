"""Adapters: what they change, what they must never change, and PEFT's format."""

import dataclasses
import json
import resource

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from nanoplan.lora import TARGETS, adapters_off, add_lora, load_adapter, save_adapter, trainable
from nanoplan.model import ModelConfig, Packed
from nanoplan.weights import init_model

TIED = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=12, max_positions=128, rope_theta=1e4, norm_eps=1e-6, tied=True,
    qk_norm=True,
)  # fmt: skip
UNTIED = dataclasses.replace(TIED, tied=False)
MOE = dataclasses.replace(
    UNTIED, architecture="Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=16, norm_topk_prob=True,
)  # fmt: skip
EVERY = (*TARGETS, "lm_head")
IDS = torch.arange(24) * 5 % 61
POSITIONS = torch.cat([torch.arange(10), torch.arange(14)])
ATTEND = Packed(torch.tensor([0, 10, 24]), 14)


def logits(model):
    with torch.no_grad():
        return model(IDS, POSITIONS, ATTEND)


def logp(model):
    return model(IDS, POSITIONS, ATTEND, IDS.roll(-1))[0]


def trained(config, *, targets=EVERY, dtype=torch.float32, rslora=False):
    """A model whose adapters are far from zero."""
    model = add_lora(init_model(config, seed=0, dtype=dtype), r=3, alpha=6, targets=targets, rslora=rslora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.normal_(std=0.1, generator=generator)
    return model


def test_fresh_adapters_change_nothing_and_freeze_the_base():
    # B at random instead of zero; a base that still learns
    base = init_model(TIED, seed=0)
    model = add_lora(init_model(TIED, seed=0), r=4, alpha=8)
    assert torch.equal(logits(model), logits(base))
    names = trainable(model)
    assert len(names) == 2 * 7 * TIED.num_layers
    assert all(name.rpartition(".")[2] in ("lora_A", "lora_B") for name in names)
    assert all(parameter.dtype == torch.float32 for parameter in names.values())


def test_first_step_moves_every_b_and_nothing_else():
    # adapters on which no gradient arrives; A moves although B is zero
    model = add_lora(init_model(TIED, seed=0), r=4, alpha=8)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=1e-2, weight_decay=0.0)
    (-logp(model).mean()).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (not name.endswith("lora_B")), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_reaches_adapters_under_a_frozen_embedding(checkpointing):
    # reentrant checkpointing drops the graph when the block's input needs no gradient
    model = add_lora(init_model(TIED, seed=0), r=4, alpha=8, targets=EVERY)
    model.checkpointing = checkpointing
    logp(model).sum().backward()
    for name, parameter in trainable(model).items():
        if name.endswith("lora_B"):
            assert parameter.grad.abs().max() > 0, name
    assert all(p.grad is None for name, p in model.named_parameters() if "lora" not in name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_off_is_the_base_bit_for_bit(dtype):
    # a reference model that is off by the rounding of a merge and unmerge
    base = init_model(TIED, seed=0, dtype=dtype)
    model = trained(TIED, dtype=dtype)
    on = logits(model)
    with adapters_off(model):
        assert torch.equal(logits(model), logits(base))
        with torch.no_grad():
            assert torch.equal(logp(model), logp(base))
    assert torch.equal(logits(model), on) and not torch.equal(on, logits(base))
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    assert torch.equal(logits(model), on)
    with pytest.raises(ValueError, match="no adapters"), adapters_off(base):
        pass


@pytest.mark.parametrize(("config", "rslora"), [(UNTIED, False), (UNTIED, True), (MOE, False)])
def test_unmerged_equals_merged(config, rslora):
    # the scale applied twice or not at all, A and B swapped, the head or an expert left out
    model = trained(config, rslora=rslora)
    scale = 6 / 3**0.5 if rslora else 6 / 3
    state = {name: value.clone() for name, value in init_model(config, seed=0).state_dict().items()}
    adapters = {name: value for name, value in model.state_dict().items() if "lora" in name}
    for name in {name.rpartition(".")[0] for name in adapters}:
        state[f"{name}.weight"] += scale * adapters[f"{name}.lora_B"] @ adapters[f"{name}.lora_A"]
    merged = init_model(config, seed=0)
    merged.load_state_dict(state)
    torch.testing.assert_close(logits(model), logits(merged), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logp(model), logp(merged), rtol=1e-4, atol=1e-5)


def test_adapter_on_a_tied_head_leaves_the_embedding_alone():
    # the tie broken, the embedding changed with the head, or the head's adapter dropped on one path
    model = trained(TIED)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, init_model(TIED, seed=0).lm_head.weight)
    want = logits(model).log_softmax(-1)[range(24), IDS.roll(-1)]
    torch.testing.assert_close(logp(model).detach(), want, rtol=1e-5, atol=1e-5)
    model.num_ids = 50
    targets = IDS.roll(-1).clamp(max=49)
    want = logits(model).log_softmax(-1)[range(24), targets]
    got, _ = model(IDS, POSITIONS, ATTEND, targets)
    torch.testing.assert_close(got.detach(), want, rtol=1e-5, atol=1e-5)
    got.sum().backward()
    assert model.lm_head.lora_A.grad.abs().max() > 0 and model.lm_head.weight.grad is None


def test_small_updates_survive_a_bf16_base():
    # an update below half a bf16 step rounds away: merged into W, or added to the finished bf16 product
    model = add_lora(init_model(UNTIED, seed=0, dtype=torch.bfloat16), r=4, alpha=4)
    layer = model.model.layers[0].mlp.up_proj
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        layer.lora_B.normal_(std=2e-4, generator=generator)
        x = torch.randn(4000, 32, generator=generator).bfloat16()
        delta = x.float() @ layer.lora_A.T @ layer.lora_B.T
        base = x.float() @ layer.weight.float().T
        change = layer(x).float() - base
        merged = F.linear(x, (layer.weight + layer.lora_B @ layer.lora_A).bfloat16()).float()
    assert delta.std() / base.std() < 2**-9
    assert ((change * delta).sum() / delta.square().sum()).item() == pytest.approx(1, abs=0.1)
    assert (((merged - base) * delta).sum() / delta.square().sum()).item() < 0.5


@pytest.mark.parametrize("rslora", [False, True])
def test_adapter_folder_round_trip(rslora, tmp_path):
    # key names or scale that PEFT does not share
    model = trained(TIED, rslora=rslora)
    save_adapter(model, tmp_path, base_name="owner/base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (3, 6, rslora)
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == "owner/base"
    assert config["target_modules"] == sorted(EVERY)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (3, 32)
    assert stored["base_model.model.lm_head.lora_B.weight"].shape == (61, 3)
    adapted = add_lora(init_model(TIED, seed=0), r=3, alpha=6, targets=EVERY, rslora=rslora)
    for fresh in (init_model(TIED, seed=0), adapted):
        assert torch.equal(logits(load_adapter(fresh, tmp_path)), logits(model))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_adapters_on_some_layers_keep_their_places(tmp_path):
    # last parts of names put adapters on layers that had none
    model = trained(TIED, targets=("model.layers.1.self_attn.q_proj", "down_proj"))
    save_adapter(model, tmp_path, base_name="base")
    targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert targets == [
        "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj",
    ]  # fmt: skip
    again = load_adapter(init_model(TIED, seed=0), tmp_path)
    assert trainable(again).keys() == trainable(model).keys()
    assert torch.equal(logits(again), logits(model))


def test_gathered_state_is_what_is_saved(tmp_path):
    # a rank's own shard written instead of the whole
    model = trained(TIED)
    state = {name: parameter.detach() * 2 for name, parameter in trainable(model).items()}
    save_adapter(model, tmp_path, base_name="base", state=state)
    again = load_adapter(init_model(TIED, seed=0), tmp_path)
    assert all(torch.equal(parameter, state[name]) for name, parameter in trainable(again).items())
    del state["lm_head.lora_A"]
    with pytest.raises(ValueError, match=r"lacks 1 adapter tensors, first lm_head\.lora_A"):
        save_adapter(model, tmp_path, base_name="base", state=state)


def test_full_disk_keeps_the_old_adapter(tmp_path):
    # the adapter of the last save truncated before the new one is written
    model = trained(TIED)
    save_adapter(model, tmp_path, base_name="base")
    doubled = {name: parameter.detach() * 2 for name, parameter in trainable(model).items()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # bytes a file may have
    try:
        with pytest.raises(OSError, match="files there are unchanged"):
            save_adapter(model, tmp_path, base_name="base", state=doubled)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(logits(load_adapter(init_model(TIED, seed=0), tmp_path)), logits(model))
    save_adapter(model, tmp_path, base_name="base", state=doubled)
    assert not torch.equal(logits(load_adapter(init_model(TIED, seed=0), tmp_path)), logits(model))


def set_config(**fields):
    def change(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def set_tensors(change):
    def apply(folder):
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return apply


HEAD_A = "base_model.model.lm_head.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_config(peft_type="IA3"), "peft_type='IA3'"),
        (set_config(use_dora=True), "use_dora=True"),
        (set_config(init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (set_config(bias="all"), "bias='all'"),
        (set_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (set_config(rank_pattern={"q_proj": 8}), "rank_pattern"),
        (set_config(r=4), r"is \(3, 32\), .* r=4"),
        (set_tensors(lambda t: t.pop(HEAD_A)), r"lm_head\.lora_A is missing"),
        (set_tensors(lambda t: t.update({HEAD_A: torch.zeros(3, 64)})), r"lm_head\.lora_A is \(3, 64\)"),
        (
            set_tensors(lambda t: t.update({"base_model.model.wpe.lora_A.weight": torch.zeros(3, 3)})),
            "linear wpe",
        ),
        (set_tensors(lambda t: t.update({"lm_head.weight": torch.zeros(3, 3)})), "no LoRA tensor"),
        (lambda folder: (folder / "adapter_config.json").unlink(), r"no adapter_config\.json"),
    ],
)
def test_adapters_that_do_not_fit_change_nothing(change, message, tmp_path):
    # half an adapter on the model after the error, or a setting read and not obeyed
    save_adapter(trained(TIED), tmp_path, base_name="base")
    change(tmp_path)
    model = init_model(TIED, seed=0)
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path)
    assert torch.equal(logits(model), logits(init_model(TIED, seed=0)))
    assert trainable(model).keys() == dict(model.named_parameters()).keys()


def test_a_second_adapter_must_be_the_same_size(tmp_path):
    # alpha of the flags applied to weights trained with another
    save_adapter(trained(TIED), tmp_path, base_name="base")
    with pytest.raises(ValueError, match="r=3, alpha=6"):
        load_adapter(add_lora(init_model(TIED, seed=0), r=3, alpha=12, targets=EVERY), tmp_path)
    with pytest.raises(ValueError, match=r"differ in 1 targets, lm_head"):
        load_adapter(add_lora(init_model(TIED, seed=0), r=3, alpha=6), tmp_path)


def test_bad_requests():
    # a misspelled target trains fewer layers in silence
    model = init_model(TIED, seed=0)
    with pytest.raises(ValueError, match=r"targets=\['query'\] name no linear .* q_proj"):
        add_lora(model, r=4, alpha=8, targets=("q_proj", "query"))
    with pytest.raises(ValueError, match="r=0"):
        add_lora(model, r=0, alpha=8)
    with pytest.raises(ValueError, match="no adapters"):
        save_adapter(model, "nowhere", base_name="base")
    add_lora(model, r=4, alpha=8)
    with pytest.raises(ValueError, match="has adapters"):
        add_lora(model, r=4, alpha=8)
