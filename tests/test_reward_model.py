"""Reward models: sequence-classification folders, against transformers on tiny random ones."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from envs.base import PlanView
from nanoplan.judge import judge_all, judge_both, score_all
from nanoplan.judges import open_judge
from nanoplan.reward_model import RewardModel
from tests.toy import write_tokenizer

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "num_labels": 1,
    "tie_word_embeddings": False, "initializer_range": 0.2,
}  # fmt: skip
CLASSES = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForSequenceClassification),
    "llama": (transformers.LlamaConfig, transformers.LlamaForSequenceClassification),
}
TEXTS = [
    "Day 1\nVisit Pine Bridge",
    "Day 1",
    "No plan. <|im_end|>",
    "Day 1\nEat at Melon Wok\nTotal: ¥1785 of ¥1800",
]
VIEWS = [PlanView(text, {}, "A trip from Belor to Tavek") for text in TEXTS]


def write_folder(folder, kind="qwen3", *, seed=0, **changes):
    """A random reward model with the toy tokenizer, as transformers saves it."""
    write_tokenizer(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    make_config, make_model = CLASSES[kind]
    config = make_config(**{"vocab_size": len(tokenizer), "pad_token_id": 0, **SIZES, **changes})
    torch.manual_seed(seed)
    make_model(config).save_pretrained(folder)
    return folder


def expected(folder, ids):
    """transformers' score of one text."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, 0].item()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
def test_scores_are_those_of_transformers(kind, tied, tmp_path):
    # Catches: the score of another token, a head that is read as the embedding, texts that see each other.
    folder = write_folder(tmp_path, kind, tie_word_embeddings=tied)
    judge = RewardModel(folder)
    ids = [judge.ids(view) for view in VIEWS]
    wanted = [expected(folder, one) for one in ids]
    assert judge.score_many(VIEWS) == pytest.approx(wanted, abs=1e-4)
    assert [judge.score(view) for view in VIEWS] == pytest.approx(wanted, abs=1e-4)
    assert len({round(score, 4) for score in wanted}) == len(VIEWS)


def test_the_text_is_the_one_of_the_chat_template(tmp_path):
    # Catches: a prompt for another turn at the end, or a template's last tokens left out, which are scored.
    folder = write_folder(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        chat_template=(folder / "chat_template.jinja").read_text(),
    )
    view = VIEWS[0]
    talk = [{"role": "user", "content": view.request}, {"role": "assistant", "content": view.text}]
    ids = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False)
    assert RewardModel(folder).ids(view) == ids
    (folder / "chat_template.jinja").unlink()
    plain = RewardModel(folder).ids(view)
    assert tokenizer.decode(plain) == f"{view.request}\n\n{view.text}"


def test_padding_at_the_end_is_not_scored(tmp_path):
    # Catches: another token than transformers scores where the template ends in the pad token, as Llama 3's.
    folder = write_folder(tmp_path, "llama")
    ids = RewardModel(folder).ids(VIEWS[0])
    for pad in (ids[-1], ids[-2], None):
        config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": pad}
        (folder / "config.json").write_text(json.dumps(config))
        assert RewardModel(folder).score(VIEWS[0]) == pytest.approx(expected(folder, ids), abs=1e-4)


def test_batches_do_not_change_scores(tmp_path, monkeypatch):
    # Catches: scores that depend on the batch they are in, or that come back in another order.
    judge = RewardModel(write_folder(tmp_path))
    alone = [judge.score(view) for view in VIEWS]
    for tokens in (1, 40, 16384):
        monkeypatch.setattr("nanoplan.reward_model.BATCH_TOKENS", tokens)
        assert judge.score_many(VIEWS + VIEWS[::-1]) == pytest.approx(alone + alone[::-1], abs=1e-6)


def test_it_judges_without_regard_to_order(tmp_path):
    # Catches: a winner that depends on `swap`; a plan that is too long and silently loses.
    judge = open_judge(f"rm:{write_folder(tmp_path)}")
    assert (judge.name, judge.kind) == (f"rm:{tmp_path.name}", "rm")
    best, worst = max(VIEWS, key=judge.score), min(VIEWS, key=judge.score)
    records = judge_both(judge, [(best, worst), (worst, best), (best, best)])
    assert [r["outcomes"] for r in records] == [["win"] * 2, ["loss"] * 2, ["tie"] * 2]
    assert records[0]["own"] == [pytest.approx(judge.score(best), abs=1e-6)] * 2
    assert judge.compare(best, worst, swap=True) == "win"
    long, errors = PlanView("Visit " * 300, {}), []
    outcomes = judge_all(judge, [(long, worst), (best, worst)], seed=0, on_error=errors.append)
    assert outcomes == ["error", "win"] and "reads 1 to 256" in errors[0]
    assert score_all(judge, [best, long]) == [pytest.approx(judge.score(best), abs=1e-6), None]
    with pytest.raises(ValueError, match="reads 1 to 256"):
        judge.score(long)


def test_other_folders_are_refused(tmp_path):
    # Catches: a language model, a classifier of three labels or a folder without its head that judges anyway.
    folder = write_folder(tmp_path / "three", num_labels=3)
    with pytest.raises(ValueError, match="a score head of 3 labels"):
        RewardModel(folder)
    folder = write_folder(tmp_path / "headless")
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "score.weight"}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="no score"):
        RewardModel(folder)
    save_file({**tensors, "lm_head.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    RewardModel(folder)  # a leftover head is not read by transformers either
    save_file({**tensors, "v_head.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"no parameters for v_head\.weight"):
        RewardModel(folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="ForSequenceClassification"):
        RewardModel(folder)
