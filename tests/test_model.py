"""The decoder against transformers, and the ways in which decoders have gone wrong elsewhere."""

import copy
import dataclasses
import math

import pytest
import torch
import transformers

from nanoplan.model import Model, ModelConfig, Packed, inverse_frequencies, rotate, route
from nanoplan.weights import init_model, load_model
from tests.smollm2 import smollm2_folder

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 3e4}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MOE = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3}
HF_CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, rope_parameters=ROPE),
    "llama3_scaling": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, rope_parameters=ROPE, tie_word_embeddings=True),
    "qwen3_untied": transformers.Qwen3Config(**SIZES, rope_parameters=ROPE, tie_word_embeddings=False),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **MOE, rope_parameters=ROPE, norm_topk_prob=True),
    "qwen3_moe_mixed": transformers.Qwen3MoeConfig(
        **SIZES, **MOE, rope_parameters=ROPE, norm_topk_prob=False, mlp_only_layers=[1], decoder_sparse_step=1
    ),
}
TINY = ModelConfig(
    architecture="Qwen3ForCausalLM", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=12, max_positions=128, rope_theta=1e4, norm_eps=1e-6, tied=True,
    qk_norm=True,
)  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "rope_scaling": None, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
QWEN3_4B = QWEN3_30B_A3B | {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip


def random_hf_model(name: str) -> transformers.PreTrainedModel:
    """Weights of a size that makes every part matter: norms apart from 1, attention apart from uniform."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(HF_CONFIGS[name]).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_(1.0 if "norm" in parameter_name else 0.0)
    return model


def packed_batch(lengths: list[int], vocab: int, *, seed: int = 1):
    """ids, positions, attend of sequences laid end to end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return ids, positions, Packed(cu_seqlens, max(lengths))


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_logits_equal_transformers_packed_and_alone(name, tmp_path):
    # a wrong norm, head width, RoPE layout or scaling, tie or router; sequences of a pack that see each other
    reference = random_hf_model(name)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    lengths = [20, 1, 90, 7]
    ids, positions, attend = packed_batch(lengths, 61)
    with torch.no_grad():
        want = torch.cat([reference(part[None]).logits[0] for part in ids.split(lengths)])
        got = model(ids, positions, attend)
        alone = model(ids[21:111], positions[21:111], Packed(torch.tensor([0, 90]), 90))
    assert want.std() > 1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(alone, want[21:111], rtol=1e-4, atol=1e-4)


def test_smollm2_logits_equal_transformers():
    # what random weights hide: real outlier activations, 30 layers, a real config.json
    folder = smollm2_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["The capital of France is Paris. Plan three days there for at most $87.", "One, two, three,"]
    parts = [torch.tensor(tokenizer.encode(text)) for text in texts]
    lengths = [len(part) for part in parts]
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        want = torch.cat([reference(part[None]).logits[0] for part in parts])
        del reference
        model = load_model(folder)
        got = model(torch.cat(parts), positions, Packed(torch.tensor([0, *lengths]).cumsum(0), max(lengths)))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert tokenizer.decode(got[-1].argmax()) == " four"


def test_rows_targets_and_num_ids_agree_with_the_logits():
    # targets one row off; ids beyond the tokenizer in one softmax and not in the other; logp divided by T
    model = init_model(TINY, seed=0)
    model.num_ids = 50
    ids, positions, attend = packed_batch([9, 14], 50)
    rows = torch.tensor([3, 4, 9, 22])
    targets = torch.tensor([7, 0, 49, 12])
    logits = model(ids, positions, attend)
    assert logits.shape == (23, 50)
    torch.testing.assert_close(model(ids, positions, attend, rows=rows), logits[rows])
    logp, entropy = model(ids, positions, attend, targets, rows=rows, temperature=0.7)
    want = (logits[rows] / 0.7).log_softmax(-1)
    torch.testing.assert_close(logp, want[range(4), targets], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, -(want.exp() * want).sum(-1), rtol=1e-5, atol=1e-5)


def test_rotation_is_half_split():
    # interleaved RoPE, which Hugging Face checkpoints do not use
    model = Model(dataclasses.replace(TINY, head_dim=4))
    cos, sin = model.rope(torch.tensor([1]))
    got = rotate(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), cos, sin)[0, 0]
    torch.testing.assert_close(got, torch.tensor([-1.9841, 1.9599, 2.4624, 4.0198]), rtol=0, atol=1e-4)


def test_bf16_model_rotates_by_exact_positions():
    # positions or frequencies in bf16: 257 becomes 256 and 4095 becomes 4096
    model = init_model(TINY, seed=0).to(torch.bfloat16)
    positions = torch.tensor([0, 257, 259, 4095, 15962])
    cos, sin = model.rope(positions)
    exact = positions[:, None].double() * TINY.rope_theta ** -(torch.arange(0, 12, 2).double() / 12)
    assert cos.dtype == torch.float32
    torch.testing.assert_close(cos[:, 0, :6], exact.cos().float(), rtol=0, atol=1e-3)
    torch.testing.assert_close(sin[:, 0, 6:], exact.sin().float(), rtol=0, atol=1e-3)
    assert torch.equal(cos, init_model(TINY, seed=0).rope(positions)[0])


def test_llama3_scaling_by_hand():
    # scaling the fast channels, or blending by wavelength instead of by turns
    scaling = {
        "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = dataclasses.replace(TINY, head_dim=4, rope_theta=1e4, rope_scaling=scaling)
    # channel 0: 1 rad/position, 10.2 turns in 64 positions, kept; channel 1: 0.01, 0.1 turns, divided by 8
    torch.testing.assert_close(inverse_frequencies(config), torch.tensor([1.0, 0.01 / 8]))
    halfway = 2.5 * 2 * math.pi / 64  # rad/position: 2.5 turns, halfway from 1 to 4
    config = dataclasses.replace(config, rope_theta=halfway**-2)
    torch.testing.assert_close(inverse_frequencies(config)[1].item(), halfway * (0.5 + 0.5 / 8))


def test_bf16_model_gives_fp32_logits():
    # logits rounded to bf16 after the head move most importance ratios
    model = init_model(TINY, seed=0, dtype=torch.bfloat16)
    ids, positions, attend = packed_batch([30], 61)
    logits = model(ids, positions, attend)
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9
    targets = ids.roll(-1)
    logp, _ = model(ids, positions, attend, targets)
    want = logits.log_softmax(-1)[range(30), targets]
    torch.testing.assert_close(logp, want, rtol=1e-5, atol=1e-5)


def test_tied_head_stays_one_parameter():
    # to_empty and deepcopy untie; two optimizer states for one matrix
    model = init_model(TINY, seed=0)
    with torch.device("meta"):
        meta = Model(TINY)
    for changed in (model, copy.deepcopy(model), model.to(torch.bfloat16), meta.to_empty(device="cpu")):
        assert changed.lm_head.weight is changed.model.embed_tokens.weight
        assert "lm_head.weight" not in dict(changed.named_parameters())
    cos, _ = meta.rope(torch.tensor([5]))
    assert torch.equal(cos, model.rope(torch.tensor([5]))[0])


def test_checkpointing_changes_no_gradient():
    # a recompute that differs from the forward, or a block left out of it
    ids, positions, attend = packed_batch([12, 20], 61)
    grads = []
    for checkpointing in (False, True):
        model = init_model(TINY, seed=0)
        model.checkpointing = checkpointing
        logp, _ = model(ids, positions, attend, ids.roll(-1))
        logp.sum().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in grads[0].items():
        assert grad.abs().max() > 0, name
        assert torch.equal(grad, grads[1][name]), name


def test_router_by_hand():
    # renormalising always or never; softmax over the chosen experts only
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    weights, experts = route(logits, 2, renormalise=False)
    torch.testing.assert_close(weights, torch.tensor([[0.6439, 0.2369]]), rtol=0, atol=1e-4)
    assert experts.tolist() == [[0, 1]]
    weights, _ = route(logits, 2, renormalise=True)
    torch.testing.assert_close(weights, torch.tensor([[0.7311, 0.2689]]), rtol=0, atol=1e-4)
    # bf16 probabilities tie where fp32 ones do not
    close = torch.tensor([[1.0, 1.0078125, 0.0]], dtype=torch.bfloat16)
    assert route(close, 1, renormalise=False)[1].item() == 1


def test_every_expert_has_a_gradient():
    # ranks of a sharded run disagree on which gradients exist when an expert saw no token
    model = init_model(ModelConfig.from_hf(HF_CONFIGS["qwen3_moe"].to_dict()), seed=0)
    ids, positions, attend = packed_batch([2], 61)
    logp, _ = model(ids, positions, attend, ids)
    logp.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    idle = [p for name, p in model.named_parameters() if ".experts." in name and not p.grad.any()]
    assert idle  # two tokens reach at most six of eight experts


def test_real_configs_have_the_real_sizes():
    # head_dim taken as D / H: Qwen3-4B has 2560 / 32 = 80 but 128
    with torch.device("meta"):
        model = Model(ModelConfig.from_hf(QWEN3_4B))
    assert sum(parameter.numel() for parameter in model.parameters()) == 4_022_468_096
    assert model.model.layers[0].self_attn.o_proj.weight.shape == (2560, 4096)
    assert ModelConfig.from_hf(QWEN3_30B_A3B).norm_topk_prob is True


@pytest.mark.parametrize(
    "field", sorted(QWEN3_30B_A3B.keys() - {"architectures", "rope_scaling", "attention_bias"})
)
def test_missing_field_is_an_error(field):
    # class defaults differ from checkpoints: rope_theta 1e4, norm_topk_prob false
    config = {key: value for key, value in QWEN3_30B_A3B.items() if key != field}
    with pytest.raises(ValueError, match=f"no '{field}'"):
        ModelConfig.from_hf(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}, "given twice"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"num_key_value_heads": 5}, "num_kv_heads=5"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok=129"),
    ],
)
def test_what_is_not_built_is_refused(change, message):
    # a setting read and not obeyed gives a model that runs and is wrong
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(QWEN3_30B_A3B | change)


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_config_round_trip(name):
    # a field lost on the way out changes the model that transformers builds from our folder
    config = ModelConfig.from_hf(HF_CONFIGS[name].to_dict())
    assert ModelConfig.from_hf(config.to_hf()) == config
    rebuilt = type(HF_CONFIGS[name])(**config.to_hf())
    for field in (
        "rope_parameters",
        "head_dim",
        "tie_word_embeddings",
        "hidden_size",
        "num_experts",
        "norm_topk_prob",
    ):
        assert getattr(rebuilt, field, None) == getattr(HF_CONFIGS[name], field, None), field


@pytest.mark.skipif(not torch.cuda.is_available(), reason="fp32 output of a bf16 product exists on CUDA only")
def test_cuda_logits_do_not_depend_on_grad_mode():
    # the product without an fp32 copy of the head
    model = init_model(TINY, seed=0, dtype=torch.bfloat16).cuda()
    ids, positions, attend = packed_batch([30], 61)
    attend = Packed(attend.cu_seqlens.cuda(), attend.max_len)
    want = model(ids.cuda(), positions.cuda(), attend)
    with torch.no_grad():
        got = model(ids.cuda(), positions.cuda(), attend)
    torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)
