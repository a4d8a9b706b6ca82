"""Critiques and their rules, protocols, self-call, branches, rewards, remote agents, tables of advice."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from envs.base import Call, Message
from nanoplan import advice, critic
from nanoplan.chat import Chat
from nanoplan.critic import Plan, Protocol, SelfCall, advised, explore, parse_protocol, turns_until
from nanoplan.critique import Critique, Review, advice_kind, critic_messages, read_critique, transcript
from nanoplan.draw import noise_keys
from nanoplan.llm import Endpoint
from nanoplan.remote import RemoteRollout, write_remotely
from nanoplan.rollout import Budget, Rollout
from nanoplan.sampler import Sampler
from tests import toy
from tests.toy import ADD, LOOK, Counted, Counter, ScriptedSampler, call_text

GOOD = "Analysis: the bridge is known.\nAdvice: Search for Mara Voss."
BUDGET = Budget(turns=6, turn_tokens=200, observation_tokens=100, total_tokens=2000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy.write_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def chat(folder):
    return Chat(folder)


@pytest.fixture(scope="module")
def say(folder):
    """A rollout that says the given turns, by seed where a dict is given."""

    def build(turns, *, rows=16, budget=BUDGET):
        def script(seed, turn):
            texts = turns(seed) if callable(turns) else turns
            return toy.model_ids(folder, texts[min(turn, len(texts) - 1)] + "<|im_end|>")

        return Rollout(ScriptedSampler(script, rows=rows), Chat(folder), budget, workers=0)

    return build


# ---- the rules


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        ("form", "Search for Mara Voss.", GOOD),
        ("form", "Advice: search.\nAnalysis: no.", "\n  Analysis: x\n  Advice: y"),
        ("form", f"Well.\n{GOOD}", GOOD),
        ("form", f"{GOOD}\nAdvice: and another.", f"{GOOD} The part headed advice comes last."),
        ("empty_analysis", "Analysis: \nAdvice: look again", "Analysis: ok\nAdvice: look again"),
        ("empty_advice", "Analysis: fine\nAdvice: ...", "Analysis: fine\nAdvice: go on"),
        ("tool_call", GOOD + ' <tool_call>\n{"name": "look"}\n</tool_call>', GOOD),
        ("tool_call", GOOD + ' {"name": "add", "arguments": {"number": 2}}', GOOD + " The sum is off by 2."),
        ("tool_call", "Analysis: low\nAdvice: add(3)", "Analysis: low\nAdvice: add three to it"),
        ("solution", "Analysis: a\nAdvice: The answer is Mara Voss.", "Analysis: a\nAdvice: Answer now."),
        (
            "solution",
            "Analysis: final answer: 7\nAdvice: go on",
            "Analysis: the answer is not known\nAdvice: go on",
        ),
        ("solution", 'Analysis: a\nAdvice: say [{"day": 1}]', "Analysis: a\nAdvice: plan day 1 [again]"),
        ("solution", "Analysis: a\nAdvice: ```\nplan\n```", "Analysis: a\nAdvice: write the plan"),
        (
            "sequence",
            "Analysis: a\nAdvice: 1. go to fridge 1\n2. open fridge 1\n3. take egg 1 from fridge 1",
            "Analysis: a\nAdvice: 1. go to fridge 1\n2. open it; the egg may be there",
        ),
        (
            "sequence",
            "Analysis: a\nAdvice: Search for Ann, then search for Bo, and finally answer.",
            "Analysis: searched, then searched, then answered early\nAdvice: Search for Bo, then answer.",
        ),
        ("long", GOOD + "x" * 4000, GOOD + "x" * 100),
    ],
)
def test_every_rule_has_both_sides(rule, bad, good):
    # Catches: a rule that lets its own example pass, or that forbids what the paper's critics do.
    faults = read_critique(bad, tools=[ADD, LOOK]).faults
    assert [fault.split(":")[0] for fault in faults] == [rule], faults
    assert read_critique(good, tools=[ADD, LOOK]).faults == []


def test_a_critique_that_was_cut_is_malformed():
    # Catches: half a sentence that is passed on as advice, since its form happens to be whole.
    assert read_critique(GOOD, finished=False).faults[0].startswith("cut")
    review = Review("t", [Message("user", "?")], [])
    assert review.read().faults[0].startswith("cut")
    review.step(GOOD, [])
    assert review.read().faults == [] and review.verify().passed
    review.step("Analysis: a\nAdvice: b", [Call("look", {})])  # the parser takes the call out of the text
    assert review.read().faults == ["tool_call: the turn held one"]


def test_hostile_critiques_raise_nothing():
    # Catches: an exception, or minutes of backtracking, because of what a critic wrote.
    head = "Analysis:\nAdvice: "
    texts = ["", "\x00", "Analysis:" * 400, "Advice:\n" * 400, head + "to " * 1300, head + "first, " * 500]
    for text in [*texts, head + "1. " * 1200, head + "\n" * 3900, head + "answer " * 500, head + "{" * 3900]:
        critique = read_critique(text, tools=[ADD])
        assert isinstance(critique, Critique)
        advice_kind(critique.advice)


def test_the_critic_sees_all_and_no_more():
    # Catches: a last observation that the critic misses, calls that it cannot read, a style that is ignored.
    talk = [
        Message("system", "Count."), Message("user", "Reach 7."),
        Message("assistant", "I add.", [Call("add", {"number": 3})]), Message("tool", "total 3"),
        Message("user", "Feedback\nAnalysis: a\nAdvice: b"),
    ]  # fmt: skip
    assert transcript(talk, [ADD, LOOK]) == (
        "Tools: add, look\nInstructions: Count.\nTask: Reach 7.\n"
        'Agent: I add. add {"number": 3}\nResult: total 3\nUser: Feedback\nAnalysis: a\nAdvice: b'
    )
    texts = {
        style: critic_messages(talk, style=style)[0].content for style in ("advise", "review", "checklist")
    }
    assert len(set(texts.values())) == 3 and all("Analysis:" in text for text in texts.values())
    with pytest.raises(ValueError, match="style='kind'"):
        critic_messages(talk, style="kind")
    assert len(transcript([Message("tool", "x" * 9000)])) < 4100


# ---- protocols


def test_protocols_by_their_flag():
    # Catches: a form that parses to another protocol, or to none without a word.
    assert parse_protocol("step:4") == Protocol("window", (4,), most=1)
    assert parse_protocol("window:1-10").steps == tuple(range(1, 11))
    assert parse_protocol("prob:0.3") == Protocol("prob", chance=0.3, most=3)
    assert parse_protocol("prob:1:2").most == 2 and parse_protocol("self").most == 3
    for text in (
        "",
        "window",
        "window:5-2",
        "window:0-3",
        "prob:2",
        "prob:0.5:0",
        "self:0",
        "none:1",
        "step:x",
    ):
        with pytest.raises(ValueError, match="wanted none, step:K"):
            parse_protocol(text)


def calls_of(protocol: Protocol, *, seed: int, length: int = 12) -> list[int]:
    """Turns after which the critic speaks in an episode of `length` turns."""
    turn, found = 0, []
    while (ahead := turns_until(protocol, turn=turn, used=len(found), seed=seed)) is not None:
        turn += ahead
        if turn >= length:
            break
        found.append(turn)
    return found


def test_protocols_draw_what_they_say():
    # Catches: a window whose ends are never drawn, chances that depend on each other, a limit off by one.
    window = [calls_of(parse_protocol("window:2-5"), seed=seed) for seed in range(400)]
    counts = np.bincount([turns[0] for turns in window], minlength=6)
    assert all(len(turns) == 1 for turns in window) and counts[:2].sum() == 0 and min(counts[2:]) > 70
    assert {tuple(calls_of(parse_protocol("step:4"), seed=seed)) for seed in range(20)} == {(4,)}
    chance = [calls_of(parse_protocol("prob:0.3:100"), seed=seed) for seed in range(400)]
    assert np.mean([len(turns) for turns in chance]) / 11 == pytest.approx(0.3, abs=0.03)
    assert max(len(calls_of(parse_protocol("prob:0.9:2"), seed=seed)) for seed in range(50)) == 2
    assert calls_of(parse_protocol("prob:0"), seed=1) == [] == calls_of(parse_protocol("none"), seed=1)


ASK = call_text("ask_critic")


def test_self_call_leaves_the_world_alone(say):
    # Catches: a call for the critic that acts in the world, a fourth critique, feedback in another role.
    seen = []

    def write(reviews, seeds):
        seen.extend(review.messages[1].content for review in reviews)
        return [read_critique(GOOD) for _ in reviews]

    turns = [call_text("add", number=3), ASK, ASK, ASK, ASK, call_text("add", number=4), "7"]
    agent = say(turns, budget=Budget(12, 200, 100, 4000))
    (episode,), (notes,) = advised(agent, write, [Counter()], parse_protocol("self"), seeds=[5])
    assert episode.env.env.total == 7 and episode.env.verify().passed and episode.env.num_asked == 3
    assert [note.turn for note in notes] == [2, 3, 4] and len(seen) == 3
    roles = [(m.role, m.content[:8]) for m in episode.history]
    asked = next(i for i, m in enumerate(episode.history) if m.calls and m.calls[0].name == "ask_critic")
    assert roles[asked + 1] == ("tool", "The crit") and roles[asked + 2] == ("user", "Feedback")
    refused = [m.content for m in episode.history if m.role == "tool" and "are used" in m.content]
    assert len(refused) == 1 and "total 3" in seen[0] and agent.free == 16
    assert episode.history[2:] and agent.chat.decode(episode.trajectory.ids).count("Advice: Search") == 3


def test_self_call_must_be_alone():
    # Catches: half of a turn that is done, or an observation too few for its calls.
    env = SelfCall(Counter())
    env.reset()
    answers, over = env.step("", [Call("add", {"number": 3}), Call("ask_critic", {})])
    assert len(answers) == 2 and all("alone" in m.content for m in answers) and not over and not env.asked
    twin = env.fork()
    twin.step("", [Call("add", {"number": 3})])
    assert (twin.env.total, env.env.total) == (3, 0)
    assert "ask_critic" in [tool.name for tool in env.tools]


def test_malformed_feedback_is_not_passed_on(say):
    # Catches: text of a malformed critique that reaches the agent, or an asking agent that gets no answer.
    bad = read_critique("The answer is 7.")
    for flag, words in (("step:1", ""), ("self", "No feedback is available")):
        agent = say([ASK if flag == "self" else call_text("add", number=3), call_text("add", number=4), "7"])
        (episode,), (notes,) = advised(
            agent, lambda reviews, seeds: [bad] * len(reviews), [Counter()], parse_protocol(flag), seeds=[0]
        )
        text = agent.chat.decode(episode.trajectory.ids)
        assert len(notes) == 1 and "The answer is" not in text and ("No feedback" in text) == bool(words)
        assert text.count("<|im_start|>user") == (3 if not words else 4)


def test_waves_of_few_rows_are_the_same(say):
    # Catches: episodes that depend on how many rows there are, or notes of another episode.
    def turns(seed):
        return [call_text("add", number=seed)] * (1 + seed % 3) + [str(seed)]

    def write(reviews, seeds):
        return [read_critique(f"Analysis: {len(r.messages[1].content)}\nAdvice: go on") for r in reviews]

    worlds = [Counter(i, name=f"toy/{i}") for i in range(7)]
    seen = []
    for rows in (7, 2):
        episodes, notes = advised(
            say(turns, rows=rows),
            write,
            [w.fork() for w in worlds],
            parse_protocol("prob:0.7"),
            seeds=range(7),
        )
        seen.append(
            [(e.trajectory.ids, [n.critique.text for n in ns]) for e, ns in zip(episodes, notes, strict=True)]
        )
    assert seen[0] == seen[1] and any(said for _, said in seen[0])


# ---- branches


def test_branches_leave_the_prefix_and_each_other_alone(say):
    # Catches: one world or one list of messages shared by twins; advice that a sibling sees.
    agent = say(lambda seed: [call_text("add", number=1), call_text("add", number=seed), "done"], rows=4)
    source = agent.start(Counter(), seed=0)
    agent.advance([source], turns=1)
    jobs = [(source, f"Say {i}" if i % 2 else "", i) for i in range(6)]
    twins = agent.branch(jobs)  # six twins in three rows
    assert [twin.env.total for twin in twins] == [1 + i for i in range(6)]
    assert source.env.total == 1 and source.pending == [Message("tool", "total 1")] and source.row is not None
    for i, twin in enumerate(twins):
        said = [m.content for m in twin.history if m.role == "user"][1:]
        assert said == ([f"Say {i}"] if i % 2 else []) and twin.trajectory.stop == "answer"
        ids = twin.trajectory.ids[: len(source.trajectory.ids)]
        assert ids == source.trajectory.ids and (f"Say {i}" in agent.chat.decode(twin.trajectory.ids)) == (
            i % 2
        )
    agent.close(source)
    assert agent.free == 4
    with pytest.raises(ValueError, match="is not paused"):
        agent.branch([(source, "", 1)])


def test_each_episode_has_its_own_number_of_turns(say):
    # Catches: one pause for all, so that prefixes of another length than drawn are trained on.
    agent = say([call_text("add", number=1)] * 9)
    episodes = [agent.start(Counter(), seed=i) for i in range(4)]
    agent.advance(episodes, turns=[1, 3, 2, None])
    assert [e.turns for e in episodes] == [1, 3, 2, 6] and episodes[3].trajectory.stop == "turns"
    with pytest.raises(ValueError, match="4 episodes"):
        agent.advance(episodes, turns=[1, 2])


class Talk(Counter):
    """Answers any text, three times; so that a random model has several turns."""

    def step(self, text, calls):
        self.total += 1
        return [Message("user", f"{self.total}: {len(text)} characters")], self.total == 3


@pytest.fixture(scope="module")
def model(chat):
    model = toy.tiny_model(chat)
    with torch.no_grad():
        model.model.embed_tokens.weight[sorted(chat.stop_ids)] *= 3  # turns of some ten tokens
    return model


def test_tokens_computed_are_those_of_the_model(model, chat):
    # Catches: a prefix that every branch computes again, or counters that only claim that it does not.
    counted = Counted(model)
    agent = Rollout(Sampler(counted, rows=20, max_len=700), chat, Budget(4, 30, 60, 700), workers=0)
    source = agent.start(Talk(), seed=3)
    agent.advance([source], turns=1)
    assert source.pending is not None
    prefix = len(source.trajectory.ids)
    before = counted.tokens
    twins = agent.branch([(source, "Try something else.", 10 + i) for i in range(16)])
    own = sum(len(twin.trajectory.ids) - prefix for twin in twins)
    assert counted.tokens - before <= own + 1 and prefix > 30  # one: the prefix's last token, once
    agent.close(source)
    assert agent.computed == counted.tokens and agent.reused == 16 * (prefix - 1)


def test_noise_is_shared_position_by_position(model, chat):
    # Catches: counterfactual twins whose noise is shifted by the length of the critique.
    keys = [noise_keys(np.array([seed], np.uint64), np.array([at])) for seed, at in (
        (7, 40), (critic.shifted_seed(7, 25), 65), (critic.shifted_seed(7, 24), 65))]  # fmt: skip
    assert (keys[0] == keys[1]).all() and (keys[0] != keys[2]).any()
    assert critic.shifted_seed(12345, 0) == 12345 and critic.shifted_seed(2**63 - 9, 1) < 2**64
    agent = Rollout(Sampler(model, rows=3, max_len=700), chat, Budget(4, 30, 60, 700), workers=0)
    source = agent.start(Talk(), seed=3)
    agent.advance([source], turns=1)
    shift = agent.cost(source, "Try again.")
    plain, told = agent.branch([(source, "", 5), (source, "Try again.", critic.shifted_seed(5, shift))])
    lengths = [next(len(ids) for s, ids in t.trajectory.spans()[2:] if not s) for t in (plain, told)]
    assert lengths[1] - lengths[0] == shift > 5


# ---- rewards


def script(feedback_helps: bool):
    """An agent that adds 3, then answers 3; after feedback 7."""
    return [call_text("add", number=3), "7" if feedback_helps else "3"]


class Heeding(Rollout):
    """Says 7 after feedback that holds "seven", else 3: an agent with a mind, for rewards."""

    def _act(self, episode):
        told = any("seven" in m.content for m in episode.history if m.role == "user")
        super()._act(episode)
        if episode.env.done:
            episode.env.answer("7" if told else "3")


@pytest.fixture
def heeding(folder):
    sampler = ScriptedSampler(
        lambda seed, turn: toy.model_ids(folder, script(False)[min(turn, 1)] + "<|im_end|>"), rows=40
    )
    return Heeding(sampler, Chat(folder), BUDGET, workers=0)


WORDS = ["say seven", "say three", "The answer is 7.", "say seven"]


@pytest.fixture
def writing(folder):
    """A critic that writes WORDS in turn, by member."""

    def build(words=WORDS):
        texts = [w if "is 7" in w else f"Analysis: a\nAdvice: {w}" for w in words]
        count = iter(range(10**6))
        rows = {}

        def script(seed, turn):
            i = rows.setdefault(seed, next(count))
            return toy.model_ids(folder, texts[i % len(texts)] + "<|im_end|>")

        return Rollout(ScriptedSampler(script, rows=16), Chat(folder), Budget(1, 400, 1, 2000), workers=0)

    return build


def test_rewards_are_mean_outcomes(heeding, writing):
    # Catches: a malformed critique that costs a continuation or gets 0, a mean over the wrong branches.
    plan = Plan(group=4, continuations=3, low=1, high=1)
    (state,) = explore(heeding, writing(), plan, [(0, 0, Counter())], key=(0, 1))
    assert state.rewards == [1.0, 0.0, -1.0, 1.0] and state.kept
    assert [len(row) for row in state.branches] == [3, 3, 0, 3] and heeding.free == 40
    mean, std = 0.25, math.sqrt((0.75**2 * 2 + 0.25**2 + 1.25**2) / 4)
    assert state.advantages == pytest.approx([(r - mean) / std for r in state.rewards], abs=1e-5)
    same = writing(["say three"])
    (state,) = explore(heeding, same, plan, [(0, 0, Counter())], key=(0, 1))
    assert state.rewards == [0.0] * 4 and not state.kept


def test_alternatives_of_the_appendix(heeding, writing):
    # Catches: a counterfactual that has no pair for each branch, a baseline of the group's own mean.
    gumbel = Plan(group=4, continuations=2, low=1, high=1, reward="gumbel")
    (state,) = explore(heeding, writing(), gumbel, [(0, 0, Counter())], key=(0, 1))
    assert state.rewards == [1.0, 0.0, -1.0, 1.0]  # 7 instead of 3; 3 instead of 3; malformed
    assert [len(row) for row in state.plain] == [2, 2, 0, 2]
    assert all(told.seed != alone.seed for told, alone in zip(state.branches[0], state.plain[0], strict=True))
    bare = Plan(group=4, continuations=1, low=1, high=1, baseline="none", baseline_n=5)
    (state,) = explore(heeding, writing(), bare, [(0, 0, Counter(3))], key=(0, 1))
    assert [len(row) for row in state.plain] == [5] and state.rewards == [0.0, 1.0, -1.0, 0.0]
    assert state.advantages == [-1.0, 0.0, -2.0, -1.0]  # without a critique the agent always succeeds
    assert not any(m.role == "user" for m in state.plain[0][0].history[2:])


def test_what_no_critique_is_to_blame_for(heeding, writing):
    # Catches: a context that overflows, or a world that fails, counted as a failure of the critique.
    def fail():
        raise OSError("no retrieval")

    plan = Plan(group=4, continuations=1, low=1, high=1)
    probe = heeding.start(Counter(), seed=0)
    heeding.budget = Budget(6, 200, 100, len(probe.trajectory.ids) + 260)
    heeding.close(probe)
    critic_rollout = writing(["say three", "say seven " + "x" * 300, "The answer is 7.", "say seven"])
    (state,) = explore(heeding, critic_rollout, plan, [(0, 0, Counter())], key=(0, 1))
    stops = [row[0].trajectory.stop if row else "" for row in state.branches]
    assert stops[1] == "tokens" and state.rewards[1] is None and state.advantages[1] == 0.0, stops
    value = critic.outcome(state.branches[1][0], overflow="fail")
    assert value == 0.0
    broken = Counter(before_call=fail)
    (state,) = explore(heeding, writing(), plan, [(0, 0, broken)], key=(0, 1))
    assert not state.live and state.episode.trajectory.stop.startswith("error: step: OSError")
    assert critic.outcome(state.episode, overflow="fail") is None


def test_states_where_the_agent_asks(folder, writing):
    # Catches: self-call states that are drawn turns after all, or a loop when the agent never asks.
    turns = [call_text("add", number=3), ASK, "3"]
    agent = Rollout(
        ScriptedSampler(lambda seed, turn: toy.model_ids(folder, turns[min(turn, 2)] + "<|im_end|>"), rows=9),
        Chat(folder), BUDGET, workers=0,
    )  # fmt: skip
    plan = Plan(group=4, continuations=1, low=1, high=1, states="self")
    (state,) = explore(agent, writing(), plan, [(0, 0, Counter(3))], key=(0, 1))
    assert state.turn == 2 and state.live and state.rewards == [1.0, 1.0, -1.0, 1.0]
    turns[1] = call_text("look")
    (state,) = explore(agent, writing(), plan, [(0, 0, Counter(3))], key=(0, 1))
    assert not state.live and state.episode.trajectory.stop == "answer" and agent.free == 9


# ---- an agent elsewhere


class Server(BaseHTTPRequestHandler):
    """Chat completions: adds 3, then answers 7 if it was told "seven", else 3. Breaks on demand."""

    asked, fail = [], ""

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.reply(200, {"data": [{"id": "toy"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append(body)
        talk = body["messages"]
        told = any(m["role"] == "user" and "seven" in m["content"] for m in talk)
        if self.fail and told:
            return self.reply(400, {"error": {"message": self.fail}})
        acted = any(m["role"] == "assistant" for m in talk)
        if acted or not body.get("tools"):
            message = {"content": "7" if told else "3"}
        else:
            call = {"name": "add", "arguments": json.dumps({"number": 3})}
            message = {"content": None, "tool_calls": [{"id": "a", "type": "function", "function": call}]}
        usage = {"prompt_tokens": 50, "completion_tokens": 5}
        choice = {"message": {"role": "assistant", **message}, "finish_reason": "stop"}
        return self.reply(200, {"choices": [choice], "usage": usage})

    def reply(self, code, value):
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server():
    Server.asked, Server.fail = [], ""
    http = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield Endpoint(f"http://127.0.0.1:{http.server_port}/v1", "toy", retries=0)
    http.shutdown()


def test_an_agent_elsewhere_is_forked_by_replay(server, writing):
    # Catches: a fork that shares its world or its messages; a seed that never reaches the server.
    plan = Plan(group=4, continuations=2, low=1, high=1)
    agent = RemoteRollout(server, BUDGET)
    (state,) = explore(agent, writing(), plan, [(0, 0, Counter())], key=(0, 1))
    assert state.rewards == [1.0, 0.0, -1.0, 1.0] and agent.computed == 55 * len(Server.asked)
    assert len(Server.asked) == 1 + 6 and len({body["seed"] for body in Server.asked}) == 7
    talk = Server.asked[-1]["messages"]
    assert [m["role"] for m in talk] == ["system", "user", "assistant", "tool", "user"]
    assert talk[-1]["content"].startswith("Feedback\nAnalysis: a")
    agent.computed = 0
    assert agent.computed == 0


def test_an_endpoint_that_fails_is_no_failure_of_the_critique(server, writing):
    # Catches: rewards of 0 for critiques whose continuation never ran.
    plan, agent = Plan(group=4, continuations=1, low=1, high=1), RemoteRollout(server, BUDGET)
    for text, stop in (("model is down", "error: agent"), ("maximum context length is 99", "tokens")):
        Server.fail = text
        (state,) = explore(agent, writing(), plan, [(0, 0, Counter(3))], key=(0, 1))
        assert state.branches[0][0].trajectory.stop.startswith(stop)
        assert state.rewards == [None, 1.0, -1.0, None]
    gone = Endpoint("http://127.0.0.1:9/v1", "toy", retries=0)
    (critique,) = write_remotely(gone, [Review("t", [Message("user", "?")], [])], [0], max_tokens=9)
    assert critique.faults[0].startswith("endpoint: ")


# ---- advice and tables


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Search for Mara Voss.", "search"), ("Next, look up the river.", "search"),
        ("Answer with what you have found.", "answer"), ("You have enough. Submit your answer.", "answer"),
        ("Verify the order's status before you act.", "verify"), ("Ask the user for the date.", "ask"),
        ("Go to the fridge 1.", "act"), ("1. heat the egg with the microwave", "act"),
        ("Stay calm.", "other"), ("", "other"), ("It would help to search again.", "search"),
    ],
)  # fmt: skip
def test_advice_by_kind(text, kind):
    # Catches: a table H.2 whose rows hold other advice than they are named for.
    assert advice_kind(text) == kind


@pytest.mark.parametrize(
    ("text", "turn", "how"),
    [
        ("Search for Mara Voss.", Call("search", {"query": "mara voss"}), "exactly"),
        ("Search for Mara Voss.", Call("search", {"query": "Mara Voss birthplace"}), "partly"),
        ("Search for Mara Voss.", Call("answer", {"answer": "Oslo"}), "not"),
        ("Answer now.", Call("answer", {"answer": "Oslo"}), "exactly"),
        ("Answer now.", "Oslo", "exactly"),
        ("Go to fridge 1.", Call("act", {"command": "go to fridge 1"}), "exactly"),
        ("Go to fridge 1.", Call("act", {"command": "go to cabinet 4"}), "partly"),
        ("Ask the user for the date.", "Which date do you mean?", "exactly"),
        ("Ask the user for the date.", Call("book", {"id": "x"}), "not"),
        ("Check order 77.", Call("get_order_details", {"order_id": "77"}), "exactly"),
    ],
)
def test_whether_advice_was_followed(text, turn, how):
    # Catches: a turn that counts as taken advice because it is of the same kind only, or never counts.
    message = Message("assistant", turn) if isinstance(turn, str) else Message("assistant", "", [turn])
    assert advice.followed(text, message) == how


def item(id, success, *notes, trial=0):
    return {"id": id, "trial": trial, "success": success, "notes": list(notes), "stop": "answer"}


def note(kind="search", how="exactly", faults=()):
    return {"turn": 1, "faults": list(faults), "advice": "x", "kind": kind, "followed": how}


def test_rates_by_hand():
    # Catches: a standard error over episodes instead of tasks, trials that failed to run counted as lost.
    items = [
        item("a", True),
        item("a", True),
        item("b", True),
        item("b", False),
        item("c", None),
        item("c", False),
    ]
    mean, sem = advice.success_sem(items)
    assert mean == pytest.approx(0.5) and sem == pytest.approx(math.sqrt(0.25 / 3))
    assert advice.pass_hat(items, 1) == pytest.approx(0.5) and advice.pass_hat(items, 2) == pytest.approx(0.5)
    eight = [item("a", i < 6) for i in range(8)]
    assert advice.pass_hat(eight, 4) == pytest.approx(15 / 70)
    with pytest.raises(ValueError, match="k=9"):
        advice.pass_hat(eight, 9)
    told = [item("a", True, note()), item("b", False), item("b", True, note(faults=["form: x"]))]
    alone = [item("a", False), item("b", True)]
    assert advice.feedback_rates(told, alone) == {"with": 1.0, "without": 0.0, "tasks": 1, "episodes": 1}
    told = [item | {"turns": 1} for item in told]
    assert "1 tasks with feedback: solved 1.000, these tasks without a critic 0.000" in advice.report(
        told, alone=alone
    )
    assert "feedback" not in advice.report([item | {"turns": 1} for item in alone], alone=alone)
    assert math.isnan(advice.mean_success([]))


def test_tables_by_hand():
    # Catches: shares over the wrong total, malformed advice among the kinds.
    items = [
        item("a", True, note(), note("answer", "partly")), item("b", False, note("search", "not")),
        item("c", True), item("d", False, note(faults=["form: x"])),
    ]  # fmt: skip
    assert [(r["critiques"], r["share"], r["success"]) for r in advice.calls_table(items)] == [
        (0, 0.25, 1.0), (1, 0.5, 0.0), (2, 0.25, 1.0)]  # fmt: skip
    rows = {row["kind"]: row for row in advice.advice_table(items)}
    search = rows["search"]
    assert (search["advice"], search["exactly"], search["not"], search["success"]) == (2, 0.5, 0.5, 0.5)
    assert rows["answer"]["partly"] == 1.0 and math.isnan(rows["act"]["success"])
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    sweep = advice.sweep_table({4: items, 3: items[:2]})
    assert [row["step"] for row in sweep] == [3, 4] and sweep[1]["advised"] == 0.75


def test_items_hold_what_the_agent_did_next(say):
    # Catches: a turn before the advice that is taken for the agent's answer to it.
    write = lambda reviews, seeds: [read_critique("Analysis: a\nAdvice: Look again.")] * len(reviews)  # noqa: E731
    agent = say([call_text("add", number=3), call_text("look"), call_text("add", number=4), "7"])
    episodes, notes = advised(agent, write, [Counter()], parse_protocol("prob:1:2"), seeds=[0])
    (row,) = advice.items_of(episodes, notes)
    assert row["success"] is True and [n["turn"] for n in row["notes"]] == [1, 2]
    assert [n["followed"] for n in row["notes"]] == ["partly", "not"]
