import json
import threading
from dataclasses import replace

import pytest
from llm_server import COMPLETION_TOKENS, PROMPT_TOKENS, Fault, LLMServer, call, say
from toy import ADD, Counter

from envs.base import Message
from nanoplan import agents
from nanoplan.llm import Endpoint
from nanoplan.rollout import Budget

BUDGET = Budget(turns=5, turn_tokens=50, observation_tokens=20, total_tokens=100_000)


def seed_of(id, trial):
    return 7 + trial


def play(answer, method, envs=None, *, trials=1, cache=None, reviewer=None, **setup):
    """Runs of a method against a server that answers with `answer(body)`."""
    with LLMServer(answer) as server:
        endpoint = Endpoint(server.url, "m", retries=0, cache=cache, price_in=1e6, price_out=2e6)
        options = {"endpoint": endpoint, "budget": BUDGET, **setup}
        if reviewer is not None:
            options["reviewer"] = Endpoint(server.url, reviewer, retries=0)
        runs = agents.play(
            agents.Setup(**options), method, envs or [Counter()], trials=trials, seed_of=seed_of
        )
    return runs, server.bodies


def scripted(*replies):
    """An answer for every question, in order; the last one goes on."""
    left, lock = list(replies), threading.Lock()

    def answer(body):
        with lock:
            return left.pop(0) if len(left) > 1 else left[0]

    return answer


def asks(name, **arguments):
    return {"content": "", "tool_calls": [call(name, json.dumps(arguments))]}


def test_tools_talks_with_the_world_and_counts(tmp_path):
    # Catches: results that answer the wrong call, a count that is lost, an answer that the world never sees.
    runs, bodies = play(scripted(asks("add", number=7), asks("look"), "7"), "tools")
    run = runs[0]
    assert run.env.verify().passed and run.trajectory.stop == "answer"
    assert (run.turns, run.calls, run.malformed, run.queries, run.cached) == (3, 2, 0, 3, 0)
    assert run.prompt_tokens == 3 * PROMPT_TOKENS and run.completion_tokens == 3 * COMPLETION_TOKENS
    assert run.usd == 3 * (PROMPT_TOKENS + 2 * COMPLETION_TOKENS) and run.seconds > 0
    assert [tool["function"]["name"] for tool in bodies[0]["tools"]] == ["add", "look"]
    last = bodies[2]["messages"]
    assert [m["role"] for m in last] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert last[3]["tool_call_id"] == last[2]["tool_calls"][0]["id"] and last[3]["content"] == "total 7"
    assert [m.role for m in run.talks[0]] == [*(m["role"] for m in last), "assistant"]
    assert {body["max_tokens"] for body in bodies} == {50} and {body["seed"] for body in bodies} == {7}
    counted = run.counts()
    assert counted["queries"] == 3 and counted["tokens_sampled"] == run.completion_tokens


def test_text_calls_reach_the_world_of_a_server_without_tools():
    # Catches: an API field sent to a server that refuses it, calls that are read as the final answer.
    said = 'Adding.\n<tool_call>{"name": "add", "arguments": {"number": 7}}</tool_call>'
    runs, bodies = play(scripted(said, "<tool_call>broken</tool_call>", "7"), "tools", calling="text")
    assert runs[0].env.verify().passed and (runs[0].calls, runs[0].malformed) == (2, 1)
    assert all("tools" not in body for body in bodies)
    assert '"name": "add"' in bodies[0]["messages"][0]["content"]
    talk = bodies[1]["messages"]
    assert [m["role"] for m in talk] == ["system", "user", "assistant", "user"]
    assert '"number": 7' in talk[2]["content"] and talk[3]["content"].startswith("<tool_response>\ntotal 7")
    assert "malformed" in bodies[2]["messages"][-1]["content"]


class NoTools(Counter):
    """Its first turn is the answer."""

    def __init__(self):
        super().__init__()
        self.tools = []


def test_direct_asks_once_and_without_tools():
    # Catches: a baseline without tools that has them, or a world whose prompt speaks of tools asked directly.
    runs, bodies = play(scripted("7"), "direct", [NoTools()])
    assert runs[0].env.verify().passed and len(bodies) == runs[0].queries == 1 and "tools" not in bodies[0]
    with pytest.raises(ValueError, match="method=direct asks without tools"):
        play(scripted("7"), "direct")

    class Both(Counter):
        def direct_messages(self):
            return [Message("user", "all you need")]

    runs, bodies = play(scripted("7"), "direct", [Both()])
    assert runs[0].env.verify().passed and bodies[0]["messages"] == [
        {"role": "user", "content": "all you need"}
    ]


def test_react_thinks_acts_and_answers_behind_its_mark():
    # Catches: a thought that is handed in as the answer, and one that ends the episode without an answer.
    thought = {"content": "Thought: I need 7.", "tool_calls": [call("add", '{"number": 7}')]}
    answer = "Thought: Answer: is not on a line of its own.\n**Answer:** 7\n"
    runs, bodies = play(scripted(thought, "Thought: hm.", answer), "react")
    assert runs[0].env.answer_text == "7" and runs[0].env.verify().passed and runs[0].turns == 3
    assert agents.REACT in bodies[0]["messages"][0]["content"]
    assert bodies[2]["messages"][-1] == {"role": "user", "content": agents.NUDGE}
    assert "I need 7" in json.dumps(bodies[1]["messages"])


def test_reflexion_tries_again_with_what_it_noted_and_without_the_verdict():
    # Catches: the world's verdict leaking into a baseline, lessons that never reach the next attempt, an
    # attempt that goes on in the last one's world.
    replies = ["Answer: 5", "Too small.\nVERDICT: revise", "Add 7 next time.", asks("add", number=7)]
    runs, bodies = play(scripted(*replies, "Answer: 7", "VERDICT: accept"), "reflexion")
    run = runs[0]
    assert run.env.answer_text == "7" and run.env.total == 7 and run.queries == 6 and run.turns == 3
    assert "Add 7 next time." in bodies[3]["messages"][0]["content"]
    assert "Answer: 5" in bodies[1]["messages"][0]["content"] and "tools" not in bodies[1]
    assert len(bodies) == 6 and len(run.talks) == 5
    # without a word of the world, a model that is content with itself stays wrong
    runs, bodies = play(scripted("Answer: 5", "VERDICT: accept"), "reflexion")
    assert not runs[0].env.verify().passed and len(bodies) == 2
    runs, bodies = play(scripted("Answer: 5", "A lesson.", "Answer: 7"), "reflexion", oracle=True)
    assert runs[0].env.verify().passed and len(bodies) == 3 and "A lesson." in str(bodies[2])
    runs, bodies = play(scripted("Answer: 5", "no verdict", "noted"), "reflexion", rounds=2)
    assert runs[0].trajectory.stop == "turns" and runs[0].turns == 1 + BUDGET.turns  # of the second attempt


def test_refine_drafts_until_the_critic_finds_every_constraint_kept():
    # Catches: a critic that sees neither the constraints nor what was found, a revision that is not asked
    # for, a loop without end, a reviewer that is the agent in secret.
    lists = {"content": "1. Reach 7."}
    replies = [
        lists,
        asks("look"),
        "5",
        "5 is not 7.\nVERDICT: revise",
        "7",
        "All kept.\n**Verdict**: Accept",
    ]
    runs, bodies = play(scripted(*replies), "refine", reviewer="critic")
    run = runs[0]
    assert run.env.verify().passed and run.trajectory.stop == "answer" and run.queries == 6
    assert [body["model"] for body in bodies] == ["critic", "m", "m", "critic", "m", "critic"]
    asked = bodies[3]["messages"][0]["content"]
    assert all(text in asked for text in ("1. Reach 7.", "total 0", "Reach 7.", "ANSWER\n5"))
    assert "5 is not 7." in bodies[4]["messages"][-1]["content"]
    runs, bodies = play(scripted(lists, "5", "VERDICT: revise"), "refine", rounds=2)
    assert len(bodies) == 6 and runs[0].env.answer_text == "VERDICT: revise"  # two revisions, then it stays
    # a revision that runs out of turns leaves the draft
    runs, _ = play(scripted(lists, "7", "VERDICT: revise", asks("look")), "refine")
    assert runs[0].env.answer_text == "7" and runs[0].trajectory.stop == "answer"


@pytest.mark.parametrize(("answer", "stop"), [
    (asks("look"), "turns"),
    (lambda body: {"choices": [say("7")["choices"][0] | {"finish_reason": "length"}]}, "turn_tokens"),
    (Fault(400, body=b"This model's maximum context length is 4096"), "tokens"),
    (Fault(401), "error: agent: EndpointError"),
    ("", "empty"),
])  # fmt: skip
def test_every_end_has_its_reason(answer, stop):
    # Catches: a cut turn that is handed in; a full context or a dead server counted as a bad plan.
    runs, _ = play(answer if callable(answer) else lambda body: answer, "tools")
    assert runs[0].trajectory.stop.startswith(stop) and runs[0].env.answer_text == ""
    assert runs[0].trajectory.broken == stop.startswith("error")


def test_the_token_budget_ends_a_talk():
    # Catches: a limit that a remote agent does not keep.
    small = replace(BUDGET, total_tokens=2 * (PROMPT_TOKENS + COMPLETION_TOKENS) - 5, turns=9)
    runs, bodies = play(lambda body: asks("look"), "tools", budget=small)
    # 110 of 215 are used after each reply, and 105 are left: the server counts the same prompt each time
    assert runs[0].trajectory.stop == "turns" and bodies[1]["max_tokens"] == 50
    runs, _ = play(lambda body: asks("look"), "tools", budget=replace(small, total_tokens=110))
    assert runs[0].trajectory.stop == "tokens" and runs[0].queries == 1
    runs, bodies = play(lambda body: asks("look"), "tools", [Counter(look_text="x" * 500)])
    assert len(bodies[1]["messages"][-1]["content"]) == 4 * BUDGET.observation_tokens


def test_a_world_that_fails_is_not_the_models_fault():
    # Catches: an exception that ends the whole run, or a failing world counted as a failing plan.
    def fail():
        raise OSError("no database")

    class NoStart(Counter):
        def reset(self):
            raise OSError("no world")

    answer = scripted(asks("add", number=1))
    for env, stop in ((Counter(before_call=fail), "error: step: OSError"), (NoStart(), "error: reset")):
        for method in ("tools", "react", "reflexion", "refine"):
            runs, _ = play(answer, method, [env])
            assert runs[0].trajectory.stop.startswith(stop) and runs[0].trajectory.broken, method


def test_trials_are_samples_of_their_own_and_cached_ones_cost_no_time(tmp_path):
    # Catches: k trials that are one reply k times, a shared world, replies paid twice after a kill.
    def answer(body):
        return str(body["seed"])

    envs = [Counter(7), Counter(8, name="toy/1")]
    runs, bodies = play(answer, "tools", envs, trials=2, cache=tmp_path)
    assert [(run.env.task.id, run.trial, run.env.answer_text) for run in runs] == [
        ("toy/0", 0, "7"), ("toy/0", 1, "8"), ("toy/1", 0, "7"), ("toy/1", 1, "8"),
    ]  # fmt: skip
    assert len(bodies) == 4 and not any(run.cached for run in runs)
    with LLMServer(answer) as server:
        endpoint = Endpoint(server.url, "m", cache=tmp_path)
        setup = agents.Setup(endpoint, BUDGET)
        for _ in range(2):
            again = agents.play(setup, "tools", envs, trials=2, seed_of=seed_of)
        assert [run.env.answer_text for run in again] == ["7", "8", "7", "8"]
        assert all(run.cached == run.queries == 1 for run in again) and len(server.bodies) == 4


def test_the_tool_of_the_toy_world_is_offered_as_it_is():
    # Catches: a schema that is rewritten on its way to the server.
    _, bodies = play(scripted("7"), "tools")
    assert bodies[0]["tools"][0] == ADD.schema()
