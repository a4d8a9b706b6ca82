"""A local model behind an endpoint's surface: batches, seeds, refusals, and as a judge.

Two models: random weights, whose replies are noise but the same noise every time; and a bigram table, which
says what a test wants: its next token depends on the last one alone.
"""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from envs.base import Call, Message, PlanView
from nanoplan.chat import Chat
from nanoplan.judge import judge_both, score_all, win_rates
from nanoplan.judges import open_judge
from nanoplan.llm import EndpointError, Reply, to_openai
from nanoplan.llm_judge import LLMJudge
from nanoplan.local import Local, from_openai, open_model
from nanoplan.weights import init_model, save_model
from tests.toy import tiny_model, write_tokenizer

ASKED = [[{"role": "user", "content": f"number {i} " + "add " * i}] for i in range(7)]


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("noisy"))
    save_model(tiny_model(Chat(folder)), folder, extra_files_from=None)
    return folder


def write_bigrams(folder, bigrams: dict[str, str]):
    """A model that says bigrams[last token] after any token, greedily; all others are followed by the end."""
    chat = Chat(write_tokenizer(folder))
    width = -(-chat.num_ids // 8) * 8
    config = dataclasses.replace(
        tiny_model(chat).config, hidden_size=width, intermediate_size=8, num_layers=1, tied=False
    )
    model = init_model(config, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()  # nothing is added to the embedding
        model.model.embed_tokens.weight.copy_(torch.eye(width)[: chat.num_ids])
        model.lm_head.weight.zero_()
        model.lm_head.weight[chat.end_id] = 1.0
        for last, following in bigrams.items():
            (column,), (row,) = chat.encode(last), chat.encode(following)
            model.lm_head.weight[row, column] = 9.0
    save_model(model, folder)
    return folder


def test_a_reply_does_not_depend_on_its_batch(noisy):
    # Catches: replies in the order of finishing, or noise that depends on the neighbours or the rows.
    options = {"seeds": list(range(7)), "max_tokens": 12}
    wide = Local(noisy, rows=7, max_len=200).chat_many(ASKED, **options)
    narrow = Local(noisy, rows=2, max_len=200)
    assert [reply.text for reply in narrow.chat_many(ASKED, **options)] == [reply.text for reply in wide]
    assert narrow.chat(ASKED[3], seed=3, max_tokens=12).text == wide[3].text
    assert len({reply.text for reply in wide}) == 7
    assert narrow.chat(ASKED[3], seed=4, max_tokens=12).text != wide[3].text
    prompt = Chat(noisy).open([Message("user", ASKED[3][0]["content"])])
    assert wide[3].prompt_tokens == len(prompt) and 0 < wide[3].completion_tokens <= 12
    assert (
        narrow.usage["calls"] - narrow.usage["retried"] == 9
        and narrow.usage["usd"] == 0
        and narrow.usage["seconds"] > 0
    )


def test_threads_take_turns(noisy):
    # Catches: two threads in one cache, whose replies are mixed.
    model = Local(noisy, rows=2, max_len=200)
    alone = [model.chat(messages, seed=1, max_tokens=6).text for messages in ASKED]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda messages: model.chat(messages, seed=1, max_tokens=6).text, ASKED))
    assert together == alone


def test_refused_replies_are_sampled_again(noisy):
    # Catches: the same reply sampled again; a greedy one repeated for nothing; a refusal that ends the batch.
    seen = []

    def check(reply):
        seen.append(reply.text)
        if len(seen) <= 3:
            raise ValueError("not good")

    model = Local(noisy, rows=1, max_len=200, retries=2)
    replies = model.chat_many(ASKED[:2], max_tokens=8, check=check)
    assert [type(reply) for reply in replies] == [Reply, Reply]
    assert len(set(seen)) == len(seen) == 5 and model.usage["retried"] >= 3  # and more for empty ones
    with pytest.raises(EndpointError, match=r"not JSON at all.*\(tries: 1\)"):
        model.chat(ASKED[0], temperature=0.0, max_tokens=4, check=_refuse)
    with pytest.raises(EndpointError, match=r"\(tries: 3\)"):
        model.chat(ASKED[0], temperature=1.0, max_tokens=4, schema={"type": "object"})
    assert model.chat(ASKED[0], max_tokens=4).text  # the row was given back


def _refuse(reply):
    raise ValueError("not JSON at all")


def test_what_does_not_fit_is_an_error_of_its_own(noisy):
    # Catches: one long prompt that ends a batch of comparisons.
    model = Local(noisy, rows=2, max_len=60)
    long = [{"role": "user", "content": "add " * 100}]
    first, second = model.chat_many([long, ASKED[0]], max_tokens=8)
    assert isinstance(first, EndpointError) and "no room in max_len=60" in str(first) and second.text
    assert model.usage["failed"] == 1


def test_a_reply_ends_where_the_model_ends_it(tmp_path):
    # Catches: a stop token in the text; a reply without the beginning that it was given.
    model = Local(write_bigrams(tmp_path, {"a": "b", "b": "c"}), begin="xa", max_len=100)
    reply = model.chat(ASKED[0], temperature=0.0)
    assert (reply.text, reply.stop, reply.completion_tokens) == ("xabc", "stop", 3)
    cut = model.chat(ASKED[0], temperature=0.0, max_tokens=1)
    assert (cut.text, cut.stop) == ("xab", "length")
    model = Local(tmp_path, begin="xa", max_len=reply.prompt_tokens + 2)
    assert model.chat(ASKED[0], temperature=0.0).text == "xabc"  # the end did not fit


def test_a_local_judge_that_likes_the_first_plan(tmp_path):
    # Catches: B37 for local judges, and a prompt for them that differs from the one sent to servers.
    folder = write_bigrams(tmp_path, {" ": "3", "3": "}"})
    judge = LLMJudge(Local(folder, begin='{"plan_a": 4, "plan_b": ', max_len=4096), name="first")
    pairs = [(PlanView(f"mine {i}", {}, "a trip"), PlanView("theirs", {}, "a trip")) for i in range(3)]
    judge.probe()
    assert win_rates(judge, pairs) == [0.5] * 3
    (record, *_) = judge_both(judge, pairs)
    assert record["own"] == [4.0, 3.0] and record["reference"] == [3.0, 4.0] and record["kind"] == "llm"


def test_a_local_judge_that_talks_nonsense(noisy):
    # Catches: noise that is read as a score.
    judge = open_judge(f"local:{noisy}?rows=3&retries=0&rubric=overall")
    assert judge.name == f"{noisy.name}/overall" and judge.family == ""
    pairs, errors = [(PlanView("a", {}), PlanView("b", {}))] * 2, []
    assert win_rates(judge, pairs, on_error=errors.append) == [None, None] and len(errors) == 4
    assert score_all(judge, [PlanView("a", {})]) == [None]
    with pytest.raises(EndpointError, match=noisy.name):
        judge.probe()


def test_flags_name_models(noisy):
    # Catches: a flag that opens something else than it says, options that are ignored.
    model = open_model(f"local:{noisy}?rows=3&max_len=99&begin={{")
    assert (model.rows, model.max_len, model.begin) == (3, 99, "{")
    assert open_model("http://host/v1#m?retries=1").retries == 1
    for text in ("rubric", "http://host/v1", "#m", f"local:{noisy}?row=3"):
        with pytest.raises(ValueError):
            open_model(text)


def test_openai_messages_and_back():
    # Catches: calls that a local model is shown differently from what a server is shown.
    messages = [
        Message("system", "s"), Message("user", "u"), Message("assistant", "", [Call("add", {"n": 1})]),
        Message("tool", "total 1"), Message("assistant", "7"),
    ]  # fmt: skip
    assert from_openai(to_openai(messages)) == messages
    with pytest.raises(ValueError, match="text only"):
        from_openai([{"role": "user", "content": [{"type": "image_url"}]}])
