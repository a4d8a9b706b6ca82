"""nanoplan.pairs and nanoplan.reference: what is trained on, what is refused, whose the reference is."""

import json
import math
import shutil

import pytest
import torch
from pair import run_pair
from toy import CORPUS, tiny_model, write_tokenizer

from nanoplan import dist, lora, pairs, preference, reference
from nanoplan.batch import pack_pairs
from nanoplan.chat import Chat
from nanoplan.evaluate import write_lines
from nanoplan.pairs import ASK_RATIONALE, read_demonstrations, read_pairs
from nanoplan.weights import load_model, save_model

PROMPT = [{"role": "system", "content": "Plan."}, {"role": "user", "content": "A trip to Zürich, 12 days"}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
}
CALLING = [
    *PROMPT,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "look", "arguments": {"n": 1}}}],
    },
    {"role": "tool", "content": "[]"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("pairs") / "model", corpus=CORPUS)
    save_model(tiny_model(Chat(folder)), folder)
    return folder


@pytest.fixture(scope="module")
def chat(folder):
    return Chat(folder)


def synthetic(number=0, **changes) -> dict:
    """A record of synth's form."""
    broken = {"passed": False, "raw": 50.0, "unit": "USD", "tau": 84.0, "normalised": 0.6, "weight": 0.5}
    fine = {"passed": True, "raw": 0.0, "unit": "USD", "tau": 84.0, "normalised": 0.0, "weight": 0.5}
    return {
        "id": f"toy/{number}", "messages": PROMPT, "chosen": "<plan>{hotel: 1}</plan>",
        "rejected": "<plan>{hotel: 2}</plan>",
        "sft": "<rationale>too dear</rationale>\n<plan>{hotel: 1}</plan>",
        "verdict_chosen": {"cost": fine}, "verdict_rejected": {"cost": broken},
        "soft_chosen": 0.5, "soft_rejected": 0.25, "severity": {"normalised": 0.3, "raw": 25.0, "unit": 1.0},
    } | changes  # fmt: skip


def read(tmp_path, chat, records, **options):
    write_lines(tmp_path / "data.jsonl", records)
    return read_pairs(tmp_path / "data.jsonl", chat, **{"max_tokens": 999} | options)


def shown(chat, side) -> list[tuple[bool, str]]:
    return [(sampled, chat.decode(ids)) for sampled, ids in side.spans()]


def test_a_pair_is_one_prompt_and_two_completions(tmp_path, chat):
    # Catches: a prompt per side, a completion without its stop token, the rationale inside a preference.
    (pair,), refused = read(tmp_path, chat, [synthetic()])
    assert refused == {} and pair.id == "toy/0" and pair.soft_gap == 0.25
    assert pair.severity == {"normalised": 0.3, "raw": 25.0}
    prompt = "<|im_start|>system\nPlan.<|im_end|>\n<|im_start|>user\nA trip to Zürich, 12 days<|im_end|>\n"
    prompt += "<|im_start|>assistant\n"
    assert shown(chat, pair.chosen) == [(False, prompt), (True, "<plan>{hotel: 1}</plan><|im_end|>")]
    assert shown(chat, pair.rejected) == [(False, prompt), (True, "<plan>{hotel: 2}</plan><|im_end|>")]
    assert pair.num_prompt == len(chat.open([pairs.message_of(one) for one in PROMPT]))


def test_plain_pairs_and_trajectories(tmp_path, chat):
    # Catches: tools or calls left out of the prompt; given ids that are decoded and encoded again.
    plain = {"messages": CALLING, "tools": [TOOL], "chosen": "good", "rejected": "bad"}
    odd = chat.encode("h") + chat.encode("e") + chat.encode("llo")  # not what "hello" encodes to
    mask = {"sampled": [0, 1, 1, *[0] * 2, *[1] * len(odd)]}
    ids = {
        "chosen": {"ids": [5, 6, 7, 8, 9, *odd], **mask},
        "rejected": {"ids": [5, 6, 7, 8, 8, *odd], **mask},
    }
    (first, second), refused = read(tmp_path, chat, [plain, ids])
    assert refused == {} and first.severity is None and first.soft_gap == 0.0 and first.id == "line 1"
    text = chat.decode(first.chosen.ids)
    assert (
        '"name": "look", "description": "Look."' in text and "<tool_response>\n[]\n</tool_response>" in text
    )
    assert '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>' in text
    assert second.chosen.ids == ids["chosen"]["ids"] and second.num_prompt == 1
    assert second.rejected.sampled == [bool(one) for one in mask["sampled"]]


TRAJECTORY = {"ids": [1, 2, 3, 4], "sampled": [0, 0, 1, 1]}


def against(*ids, sampled) -> dict:
    """A pair of trajectories, of which the chosen one is given."""
    return {"chosen": {"ids": list(ids), "sampled": sampled}, "rejected": TRAJECTORY}


@pytest.mark.parametrize(("changes", "reason", "words"), [
    ({"verdict_rejected": synthetic()["verdict_chosen"]}, "rejected is feasible", "no hard constraint"),
    ({"severity": {"normalised": 0, "raw": 0}}, "rejected is feasible", "normalised=0"),
    ({"verdict_chosen": synthetic()["verdict_rejected"]}, "chosen is infeasible", "cost"),
    ({"chosen": " \n"}, "empty completion", "chosen has no text"),
    ({"rejected": ""}, "empty completion", "rejected has no text"),
    ({"rejected": None}, "no completion", "rejected is a NoneType"),
    ({"rejected": "<plan>{hotel: 1}</plan>"}, "equal completions", "nothing to prefer"),
    ({"messages": []}, "no prompt", "messages"),
    ({"messages": [{"role": "user"}, 3]}, "no prompt", "OpenAI"),
    ({"messages": [{"role": "narrator", "content": "x"}]}, "no prompt", "narrator"),
    ({"severity": {"normalised": float("nan"), "raw": 1}}, "broken number", "severity.normalised"),
    ({"severity": {"normalised": 1.5, "raw": 1}}, "broken severity", "1.5"),
    ({"severity": {"raw": 1.0}}, "broken number", "None"),
    ({"severity": 3}, "broken severity", "3"),
    ({"verdict_rejected": [1]}, "broken verdict", "verdict_rejected"),
    ({"soft_chosen": None}, "broken number", "soft_chosen"),
    (against(1, 2, 3, 4, sampled=[0, 1, 1, 1]), "unequal prompts", "1 and 2"),
    (against(1, 9, 3, 4, sampled=[0, 0, 1, 1]), "unequal prompts", "2 and 2"),
    (against(1, 2, 3, sampled=[0, 0, 0]), "empty completion", "sampled"),
    (against(1, 2, 3, sampled=[1, 0, 1]), "broken trajectory", "first"),
    (against(1, 2, 3, sampled=[0, 1]), "broken trajectory", "one length"),
    (against(1, 2, 3.5, sampled=[0, 0, 1]), "broken trajectory", "integers"),
    (against(1, 2, 10**6, sampled=[0, 0, 1]), "unknown ids", "1000000"),
    ({"chosen": TRAJECTORY, "rejected": TRAJECTORY}, "equal completions", "prefer"),
    ({"id": "toy/1"}, "an id twice", "first record"),
    ({"chosen": "<plan>" + "x" * 500}, "too long", "tokens of 300"),
])  # fmt: skip
def test_bad_records_are_named_and_counted(changes, reason, words, tmp_path, chat):
    # Catches: a record that is trained on although it teaches the wrong thing, or one that ends the run.
    good, bad = synthetic(1), synthetic(2, **changes)
    kept, refused = read(tmp_path, chat, [good, bad, synthetic(3)], max_tokens=300)
    assert [pair.id for pair in kept] == ["toy/1", "toy/3"]
    assert list(refused) == [reason] and len(refused[reason]) == 1 and words in refused[reason][0], refused
    assert pairs.refusals(refused).startswith("1 records refused: " + reason)
    with pytest.raises(ValueError, match=r"holds nothing to train on; .* records refused"):
        read(
            tmp_path,
            chat,
            [good | changes | {"id": "x"}] if reason != "an id twice" else [{}],
            max_tokens=300,
        )


def test_truncation_never_empties_a_completion(tmp_path, chat):
    # Catches B30: a slice with a bound of 0, a prompt cut to the length of the other side, equal leftovers.
    record = synthetic(chosen="<plan>ab1" + "x" * 50, rejected="<plan>ab2")
    (whole,), _ = read(tmp_path, chat, [record])
    n = whole.num_prompt
    enough = n + next(i for i in range(99) if whole.chosen.ids[n + i] != whole.rejected.ids[n + i]) + 1
    (short,), _ = read(tmp_path, chat, [record], max_tokens=enough, truncate=True)
    assert short.chosen.ids == whole.chosen.ids[:enough] and short.rejected.ids == whole.rejected.ids[:enough]
    assert short.num_prompt == n and short.chosen.num_sampled == enough - n
    for limit, words in (
        (enough - 1, "tells its completions apart"),
        (n, "leaves nothing"),
        (3, "leaves nothing"),
    ):
        with pytest.raises(ValueError, match=f"pair toy/0: max_tokens={limit} .*{words}"):
            read(tmp_path, chat, [record], max_tokens=limit, truncate=True)


def demonstrations(tmp_path, chat, records, **options):
    write_lines(tmp_path / "data.jsonl", records)
    return read_demonstrations(tmp_path / "data.jsonl", chat, **{"max_tokens": 999} | options)


def test_demonstrations_of_pairs(tmp_path, chat):
    # Catches: a rationale where none was asked for, so that the plain prompt brings one in evaluation.
    plan, traced = "<plan>{hotel: 1}</plan><|im_end|>", synthetic()["sft"] + "<|im_end|>"
    wanted = {"always": [traced] * 2, "never": [plan] * 2, "asked": [plan, traced]}
    for rationale, texts in wanted.items():
        found, _ = demonstrations(tmp_path, chat, [synthetic(0), synthetic(1)], rationale=rationale)
        assert [shown(chat, one)[-1] for one in found] == [(True, text) for text in texts]
        asked = [ASK_RATIONALE in shown(chat, one)[0][1] for one in found]
        assert asked == [rationale == "asked" and text is traced for text in texts]
    with pytest.raises(ValueError, match="rationale='sometimes'"):
        demonstrations(tmp_path, chat, [synthetic()], rationale="sometimes")


def test_demonstrations_of_other_kinds(tmp_path, chat):
    # Catches: loss on what the world said, only the last turn in the loss, ids of a run's log encoded again.
    talk = {"messages": [*CALLING, {"role": "assistant", "content": "Done."}], "tools": [TOOL]}
    logged = {"step": 3, "ids": [9, 8, 7, 6], "sampled": [0, 1, 0, 1], "text": "?", "id": "train/1"}
    plain = {"messages": PROMPT, "chosen": "good", "rejected": "bad"}
    bad = [{"messages": PROMPT}, {"ids": [1], "sampled": [0]}, {"messages": "x"}]
    found, refused = demonstrations(tmp_path, chat, [talk, logged, plain, *bad])
    assert [len(one.ids) == len(one.sampled) == len(one.logp) for one in found] == [True] * 3
    told = [text for sampled, text in shown(chat, found[0]) if sampled]
    assert told == [
        '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call><|im_end|>',
        "Done.<|im_end|>",
    ]
    assert found[0].ids == chat.open(
        [pairs.message_of(m) for m in CALLING], [pairs.tool_of(TOOL)]
    ) + chat.encode("Done.") + [chat.end_id]
    assert found[1].ids == [9, 8, 7, 6] and found[1].sampled == [False, True, False, True]
    assert shown(chat, found[2])[-1] == (True, "good<|im_end|>")
    assert {reason: len(texts) for reason, texts in refused.items()} == {
        "empty completion": 2,
        "no prompt": 1,
    }


# margins


def test_margin_sources(tmp_path, chat):
    # Catches: a scale of another unit, lengths that make a negative margin, a draw that depends on the order.
    records = [
        synthetic(i, severity={"normalised": s, "raw": 100 * s}) for i, s in enumerate((0.01, 0.87, 1.0))
    ]
    records[1]["chosen"] = "<plan>{hotel: 1, and more}</plan>"
    found, _ = read(tmp_path, chat, records)

    def of(source, **options):
        return pairs.margins(found, source=source, **{"scale": 0.01, "seed": 0} | options).tolist()

    tanh = [math.tanh(x) for x in (0.01, 0.87, 1.0)]
    assert of("normalised") == pytest.approx(tanh, abs=1e-6)
    assert of("raw") == pytest.approx(tanh, abs=1e-6)
    assert of("unit") == pytest.approx([math.tanh(x / 100) for x in (0.01, 0.87, 1.0)], abs=1e-6)
    sizes = [abs(p.chosen.num_sampled - p.rejected.num_sampled) for p in found]
    assert sizes[0] == 0 < sizes[1] and of("length") == pytest.approx([math.tanh(n / 100) for n in sizes])
    assert of("reward_model", rewards=[2.0, -1.0, 0.0]) == pytest.approx([math.tanh(1.0), 0.0, 0.0])
    drawn = of("random")
    assert drawn == of("random") != of("random", seed=1) and all(0 <= m < 1 for m in drawn)
    assert pairs.margins(found[::-1], source="random", scale=1, seed=0).tolist() == drawn[::-1]
    for source, words in (("random ", "wanted one of"), ("reward_model", "--reward_model")):
        with pytest.raises(ValueError, match=words):
            of(source)
    plain, _ = read(tmp_path, chat, [{"messages": PROMPT, "chosen": "a", "rejected": "b"}])
    with pytest.raises(ValueError, match="1 pairs have no severity, first line 1; use --loss dpo"):
        pairs.margins(plain, source="normalised", scale=0.01, seed=0)
    assert pairs.margins(plain, source="length", scale=0.01, seed=0).tolist() == [0.0]


def test_mismatches_have_another_prompt(tmp_path, chat):
    # Catches B33: KTO's z0 from a completion of the same prompt.
    other = [PROMPT[0], {"role": "user", "content": "Another trip"}]
    records = [synthetic(0), synthetic(1), synthetic(2, messages=other)]
    found, _ = read(tmp_path, chat, records)
    mixed = pairs.mismatches(found)
    for pair, one, (who, side) in zip(found, mixed, ((2, 0), (2, 1), (0, 0)), strict=True):
        wanted = found[who].sides[side]
        assert one.ids == pair.chosen.ids[: pair.num_prompt] + wanted.ids[found[who].num_prompt :]
        assert one.sampled.index(True) == pair.num_prompt and all(one.sampled[pair.num_prompt :])
    with pytest.raises(ValueError, match="at least two prompts"):
        pairs.mismatches(found[:2])


# the reference


@pytest.fixture(scope="module")
def many(tmp_path_factory, chat):
    records = [
        synthetic(i, chosen=f"<plan>{'a' * (i % 7)} {i}</plan>", rejected=f"<plan>{i} {'b' * (i % 3)}</plan>")
        for i in range(13)
    ]
    return read(tmp_path_factory.mktemp("many"), chat, records)[0]


def chunks(num, size):
    return [list(range(at, min(at + size, num))) for at in range(0, num, size)]


def test_a_policy_that_has_not_moved_is_its_reference(many, folder):
    # Catches B31: another packing, dtype or mode for the reference: DPO at step 0 is then only nearly ln 2.
    model = load_model(folder)
    steps = chunks(13, 4)
    stored = reference.score_pairs(model, many, steps, max_tokens=250)
    for step in steps:
        batches = pack_pairs([many[i].sides for i in step], max_tokens=250)
        for batch in batches:
            sums = reference.sequence_sums(reference.forward(model, batch), batch)
            assert sums.requires_grad
            at = [step[index // 2] for index in batch.index[::2]]
            ref = [torch.tensor([side[i] for i in at]) for side in stored]
            logps = preference.PairLogps(sums[::2], sums[1::2], *ref, batch.lengths[::2], batch.lengths[1::2])
            assert torch.equal(preference.dpo(logps, beta=0.1), torch.full((len(at),), math.log(2)))
            assert (logps.delta == 0).all()
    alone = reference.score_pairs(model, many, chunks(13, 1), max_tokens=250)
    for a, b in zip(alone, stored, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert max(stored[0]) < -1 and len(set(stored[0])) == 13


def test_adapters_off_is_the_reference(many, folder):
    # Catches: a reference that learns with the adapters, or a base that does.
    model = load_model(folder)
    before = reference.score_pairs(model, many, chunks(13, 4), max_tokens=250)
    lora.add_lora(model, r=2, alpha=4.0)
    assert reference.score_pairs(model, many, chunks(13, 4), max_tokens=250) == before
    for p in lora.trainable(model).values():
        p.data += 0.1
    assert reference.score_pairs(model, many, chunks(13, 4), max_tokens=250) != before
    with lora.adapters_off(model):
        assert reference.score_pairs(model, many, chunks(13, 4), max_tokens=250) == before


def test_a_stored_reference_is_checked(many, folder, tmp_path):
    # Catches: scores of other weights, or of the same pairs in another order, taken for this run's.
    model = load_model(folder)
    keys = {"model": reference.fingerprint(model), "data": pairs.fingerprint(many)}
    scores = reference.score_pairs(model, many, chunks(13, 4), max_tokens=250)
    made = reference.Reference(*keys.values(), *scores, [])
    made.save(tmp_path / "reference.json")
    assert reference.load(tmp_path / "reference.json", **keys) == made  # floats survive bit for bit
    assert reference.fingerprint(load_model(folder)) == keys["model"]
    with torch.no_grad():
        model.model["norm"].weight[3] += 1e-6
    for name, key in (("model", reference.fingerprint(model)), ("data", pairs.fingerprint(many[::-1]))):
        with pytest.raises(ValueError, match=f"reference.json was scored on other .*\\({name} "):
            reference.load(tmp_path / "reference.json", **keys | {name: key})
    (tmp_path / "reference.json").write_text(json.dumps({"model": "x"}))
    with pytest.raises(ValueError, match="is no stored reference"):
        reference.load(tmp_path / "reference.json", **keys)
    with pytest.raises(ValueError, match="does not exist"):
        reference.load(tmp_path / "none.json", **keys)


def score_on_two(folder, many, sharded):
    model = dist.shard(load_model(folder), lora=not sharded)
    mine = [step[dist.rank() :: 2] for step in chunks(len(many), 4)]
    return reference.fingerprint(model), reference.score_pairs(model, many, mine, max_tokens=250)


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_score_as_one(many, folder, sharded):
    # Catches: scores of the wrong pair, a rank that waits for another, a hash that depends on the sharding.
    model = load_model(folder)
    alone = reference.score_pairs(model, many, chunks(13, 4), max_tokens=250)
    for key, scores in run_pair(score_on_two, folder, many, sharded):
        assert key == reference.fingerprint(model)
        for a, b in zip(scores, alone, strict=True):
            assert a == pytest.approx(b, abs=1e-4)


def test_a_file_that_is_no_jsonl_says_where(tmp_path, chat):
    # Catches: a stack trace from json, an empty file taken for a world without faults.
    for text, words in (("{", "line 1 is no JSON"), ("", "no line"), ("[]\n", "wanted an object")):
        (tmp_path / "x.jsonl").write_text(text)
        with pytest.raises(ValueError, match=words):
            read_pairs(tmp_path / "x.jsonl", chat, max_tokens=9)
    shutil.rmtree(tmp_path)


def test_a_verifier_has_the_last_word(tmp_path, chat):
    # Catches: a record trained on because it says itself that it is right.
    kept, refused = read(
        tmp_path, chat, [synthetic(0), synthetic(1)], check=lambda r: "late" * (r["id"] == "toy/1")
    )
    assert [pair.id for pair in kept] == ["toy/0"] and refused == {"verified again": ["toy/1: late"]}
