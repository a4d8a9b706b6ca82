"""Episodes: exact ids, honest stops, tools beside decoding, forks, groups (B01, B02, B04, B05, B07, B44)."""

import re
import threading
import time

import pytest
import torch
from tokenizers import Tokenizer

from envs.base import Message
from nanoplan.chat import Chat
from nanoplan.rollout import Budget, Rollout
from nanoplan.sampler import Sampler
from nanoplan.trajectory import Trajectory
from tests import toy
from tests.toy import Counter, ScriptedSampler, call_text

BUDGET = Budget(turns=6, turn_tokens=200, observation_tokens=100, total_tokens=2000)
END = "<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy.write_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def chat(folder):
    return Chat(folder)


@pytest.fixture(scope="module")
def say(folder):
    """A sampler that says the given turns, each closed by the stop token; a dict gives them by seed."""

    def build(turns, *, rows=8, max_len=4096, end=END):
        def script(seed, turn):
            texts = turns[seed] if isinstance(turns, dict) else turns
            return toy.model_ids(folder, texts[min(turn, len(texts) - 1)] + end)

        return ScriptedSampler(script, rows=rows, max_len=max_len)

    return build


def budget(**changes) -> Budget:
    values = {name: getattr(BUDGET, name) for name in Budget.__slots__}
    return Budget(**{**values, **changes})


def one(sampler, chat, env=None, limits=BUDGET, **kwargs):
    """One episode to its end, tools between steps."""
    rollout = Rollout(sampler, chat, limits, workers=0, **kwargs)
    episode = rollout.start(env or Counter(), seed=0)
    rollout.advance([episode])
    return episode


def sampled_ids(trajectory: Trajectory) -> list[int]:
    return [id for id, sampled in zip(trajectory.ids, trajectory.sampled, strict=True) if sampled]


TURNS = [call_text("add", number=3), call_text("add", number=4), "7"]


# ---- ids and mask


def test_ids_are_the_samplers_own(chat, say):
    # history kept as text and tokenised again (B01), or calls printed again from JSON (B02)
    sampler = say(TURNS)
    rollout = Rollout(sampler, chat, BUDGET, workers=0)
    episode = rollout.start(Counter(), seed=0)
    state, prompt = sampler.state[episode.row], len(episode.trajectory.ids)
    rollout.advance([episode])
    trajectory = episode.trajectory
    assert trajectory.ids == state["ids"] and sampled_ids(trajectory) == state["said"]
    assert chat.encode(chat.decode(state["said"][:40])) != state["said"][:40]  # else this test shows nothing
    assert (trajectory.stop, episode.turns, episode.calls, episode.malformed) == ("answer", 3, 2, 0)
    assert episode.env.verify().passed and episode.env.total == 7
    # the mask is off by one, covers observations (B05), or a log-prob belongs to another id
    assert not any(trajectory.sampled[:prompt]) and trajectory.sampled[prompt]
    expected = [-(i + 1) / 64 if sampled else 0.0 for i, sampled in enumerate(trajectory.sampled)]
    assert trajectory.logp == expected


def test_text_after_the_stop_token(chat, folder, say):
    # the template's newline after the sampled stop id is dropped, or the stop id is there twice (B04)
    episode = one(say(TURNS), chat)
    expected = (
        "\n<|im_start|>user\n<tool_response>\ntotal 3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    spans = episode.trajectory.spans()
    assert spans[1][1][-1] == chat.end_id and spans[1][0]
    assert spans[2] == (False, encoder.encode(expected, add_special_tokens=False).ids)
    assert [sampled for sampled, _ in spans] == [False, True] * 3


def test_two_calls_in_one_turn(chat, say):
    # only the first call of a turn is run, or results come back in another order
    turns = [call_text("add", number=5) + "\n" + call_text("add", number=2) + "\n" + call_text("look"), "7"]
    episode = one(say(turns), chat)
    observed = chat.decode(episode.trajectory.spans()[2][1])
    assert re.findall(r"<tool_response>\ntotal (\d)\n</tool_response>", observed) == ["5", "7", "7"]
    assert (episode.calls, episode.turns, episode.trajectory.stop) == (3, 2, "answer")


def test_malformed_call_is_answered(chat, say):
    # a broken call ends the episode, or is taken for the final answer
    episode = one(
        say(['<tool_call>\n{"name": "add", oops}\n</tool_call>', call_text("add", number=7), "7"]), chat
    )
    assert (episode.malformed, episode.calls, episode.trajectory.stop) == (1, 2, "answer")
    answer = chat.decode(episode.trajectory.spans()[2][1])
    assert "malformed" in answer and len(answer) < 500 and episode.env.total == 7


def test_append_only_lists_stay_equal():
    # lists of different lengths, or twins that share a list (B07)
    first = Trajectory()
    first.observe([1, 2, 3])
    twin = first.copy()
    first.sample(4, -0.5)
    first.observe([])
    twin.sample(5, -0.25)
    assert (first.ids, first.sampled, first.logp) == ([1, 2, 3, 4], [False] * 3 + [True], [0.0] * 3 + [-0.5])
    assert (twin.ids, twin.logp, twin.num_sampled) == ([1, 2, 3, 5], [0.0] * 3 + [-0.25], 1)
    broken = Trajectory([1], [True, False], [0.0])
    with pytest.raises(AssertionError):
        broken.observe([2])


# ---- budgets


def test_turns_run_out(chat, say):
    # an agent that never answers runs on, or its last call is not carried out
    episode = one(say([call_text("add", number=1)]), chat, limits=budget(turns=3))
    assert (episode.trajectory.stop, episode.turns, episode.env.total) == ("turns", 3, 3)
    assert episode.trajectory.truncated and episode.trajectory.sampled[-1] and episode.row is None


def test_turn_is_cut(chat, say):
    # a turn cut by its budget is taken for an answer, or a stop token that was not sampled appears as sampled
    episode = one(say(["7" * 50]), chat, limits=budget(turn_tokens=5))
    assert (episode.trajectory.stop, episode.trajectory.num_sampled) == ("turn_tokens", 5)
    assert episode.env.answer_text == "" and not episode.env.done and episode.turns == 1
    assert chat.end_id not in sampled_ids(episode.trajectory)


def test_stop_token_on_the_last_allowed_place(chat, say):
    # a turn that ends exactly at its budget is called cut
    assert one(say(["7"]), chat, limits=budget(turn_tokens=2)).trajectory.stop == "answer"
    prompt = len(chat.open(Counter().reset(), Counter().tools))
    assert one(say(["7"]), chat, limits=budget(total_tokens=prompt + 2)).trajectory.stop == "answer"


def test_tokens_run_out(chat, say):
    # an episode grows past total_tokens; or an observation that does not fit is appended in part (B07)
    prompt = len(chat.open(Counter().reset(), Counter().tools))
    episode = one(say(["7" * 50]), chat, limits=budget(total_tokens=prompt + 4))
    assert (episode.trajectory.stop, len(episode.trajectory.ids)) == ("tokens", prompt + 4)

    spans = one(say(TURNS), chat).trajectory.spans()
    before, answer = len(spans[0][1]) + len(spans[1][1]), len(spans[2][1])
    episode = one(say(TURNS), chat, limits=budget(total_tokens=before + answer))  # no room for one more token
    assert episode.trajectory.stop == "tokens" and episode.env.total == 3
    assert len(episode.trajectory.ids) == before and episode.trajectory.sampled[-1]
    episode = one(say(TURNS), chat, limits=budget(total_tokens=before + answer + 1))
    assert episode.trajectory.stop == "tokens" and len(episode.trajectory.ids) == before + answer + 1


def test_prompt_without_room(chat, say):
    # one long request ends the whole run, or takes a row that nobody gives back
    sampler = say(TURNS)
    episode = one(sampler, chat, limits=budget(total_tokens=20))
    assert (episode.trajectory.stop, episode.trajectory.num_sampled, episode.row) == ("tokens", 0, None)
    assert sampler.free == 8 and sampler.num_opened == 0


def test_long_result_is_cut_with_a_mark(chat, say):
    # a result longer than its budget; half a character at the cut; a mark that nobody sees
    for room in range(40, 44):  # an emoji is four ids here: three of the cuts go through one
        env, limits = Counter(look_text="🙂" * 300), budget(observation_tokens=room)
        long = one(say([call_text("look"), "7"]), chat, env, limits)
        shown = chat.decode(long.trajectory.spans()[2][1])
        content = shown.split("<tool_response>\n")[1].split("\n</tool_response>")[0]
        assert room - 4 < len(chat.encode(content)) <= room and content.startswith("🙂🙂")
        assert "\ufffd" not in content and content.endswith("[.. cut, 1200 tokens in all]")
        assert long.cut_results == 1
    short = one(
        say([call_text("look"), "7"]), chat, Counter(look_text="é" * 20), budget(observation_tokens=40)
    )
    assert "é" * 20 + "\n</tool_response>" in chat.decode(short.trajectory.spans()[2][1])
    assert short.cut_results == 0


def test_stop_string_over_an_id_border(chat, folder, say):
    # only one spelling of the stop string in ids ends the turn, or ids are cut with the text (B44)
    sampler = say(["a</plan>\nrest", "7</plan>"], end="")
    episode = one(sampler, chat, limits=budget(turns=1), stop_strings=("</plan>",))
    assert episode.env.answer_text == "a</plan>" and episode.trajectory.stop == "answer"
    assert sampled_ids(episode.trajectory) == toy.model_ids(folder, "a</plan>")
    sampler = say([call_text("look"), "7"], end="")
    episode = one(sampler, chat, limits=budget(turn_tokens=60), stop_strings=("</tool_call>", "7"))
    closing = chat.decode(episode.trajectory.spans()[2][1])  # not sampled, so observed
    assert closing.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>") and episode.calls == 1


# ---- tools beside decoding


def test_slow_tool_does_not_hold_up_others(chat, say):
    # a step waits for every tool: the first episode's tool would wait for ever for the second to end
    others_done = threading.Event()

    def until_the_other_is_done():
        assert others_done.wait(20)

    envs = [Counter(before_call=until_the_other_is_done), Counter()]
    finished = []

    def on_done(episode):
        finished.append(episode.group)
        others_done.set()

    groups = Rollout(say(TURNS), chat, BUDGET).run(envs, group=1, seeds=[[0], [1]], on_done=on_done)
    assert finished == [1, 0]
    assert [group[0].trajectory.stop for group in groups] == ["answer", "answer"]


def test_a_rollout_is_given_up_between_two_steps(chat, say):
    # a run that is asked to leave samples on for minutes
    sampler = say(TURNS)
    rollout = Rollout(sampler, chat, BUDGET)
    until = iter([False] * 4 + [True]).__next__
    (first,), (second,) = rollout.run([Counter(), Counter()], group=1, seeds=[[0], [1]], until=until)
    assert len(sampler.stepped) == 4 and first.trajectory.num_sampled == second.trajectory.num_sampled == 4
    assert first.trajectory.stop == second.trajectory.stop == ""


@pytest.mark.parametrize("workers", [0, 2])
def test_waiting_is_measured(chat, say, workers):
    # time in which every row waits is charged to the model
    rollout = Rollout(say(TURNS), chat, BUDGET, workers=workers)
    rollout.advance([rollout.start(Counter(before_call=lambda: time.sleep(0.03)), seed=0)])
    assert 0.05 < rollout.wait_s  # two calls


def test_threads_change_nothing(chat, say):
    # an episode depends on which tool was faster
    def trajectories(workers, delays):
        envs = [Counter(before_call=lambda d=d: time.sleep(d)) for d in delays]
        rollout = Rollout(say(TURNS, rows=3), chat, BUDGET, workers=workers)
        groups = rollout.run(envs, group=1, seeds=[[seed] for seed in range(5)])
        return [(g[0].trajectory.ids, g[0].trajectory.logp, g[0].env.total) for g in groups]

    still = trajectories(0, [0] * 5)
    assert trajectories(4, [0.02, 0, 0.01, 0, 0.005]) == still
    assert trajectories(2, [0, 0.02, 0, 0.01, 0]) == still


def test_broken_environment(chat, say):
    # an exception of the environment ends the run, or becomes a failure of the model
    def fail():
        raise RuntimeError("database is gone")

    class NoReset(Counter):
        def reset(self):
            raise OSError("no connection")

    sampler = say(TURNS)
    groups = Rollout(sampler, chat, BUDGET).run(
        [Counter(before_call=fail), Counter(), NoReset()], group=2, seeds=[[0, 1], [2, 3], [4, 5]]
    )
    stops = [[episode.trajectory.stop for episode in group] for group in groups]
    assert stops[0] == ["error: step: RuntimeError: database is gone"] * 2
    assert stops[1] == ["answer"] * 2
    assert stops[2] == ["error: reset: OSError: no connection"] * 2
    assert [[e.trajectory.broken for e in group] for group in groups] == [[True] * 2, [False] * 2, [True] * 2]
    assert sampler.free == 8 and groups[2][0].trajectory.ids == []


# ---- forks, pauses, advice


def test_pause_and_fork(chat, say):
    # twins share their world or their record; a pause changes what follows
    turns = {0: TURNS, 1: [TURNS[0], call_text("add", number=90), "93"]}
    sampler = say(turns)
    rollout = Rollout(sampler, chat, BUDGET, workers=0)
    first = rollout.start(Counter(), seed=0)
    rollout.advance([first], turns=1)
    assert (first.turns, first.trajectory.stop, first.env.total) == (1, "", 3)
    assert [message.content for message in first.pending] == ["total 3"] and first.trajectory.sampled[-1]
    second, third = rollout.fork(first, seed=1), rollout.fork(first, seed=0)
    prefix = first.trajectory.ids[:]
    rollout.advance([second])
    assert first.trajectory.ids == prefix and first.env.total == 3 and second.env.total == 93
    assert second.trajectory.ids[: len(prefix)] == prefix and second.env.answer_text == "93"
    rollout.advance([first, third])
    assert first.trajectory.ids == third.trajectory.ids == one(say(turns), chat).trajectory.ids
    assert first.trajectory.logp == third.trajectory.logp and first.env.answer_text == "7"
    rollout.advance([first, second])  # over: nothing happens
    assert sampler.free == 8


def test_advice_is_observed(chat, say):
    # advice replaces the world's answer, moves the world, or is trained on
    seen = []

    def advisor(episode):
        seen.append((episode.turns, [message.content for message in episode.pending]))
        return "Add 4 next." if episode.turns == 1 else None

    sampler = say(TURNS)
    rollout = Rollout(sampler, chat, BUDGET)
    episode = rollout.start(Counter(), seed=0)
    state = sampler.state[episode.row]
    rollout.advance([episode], advisor=advisor)
    assert seen == [(1, ["total 3"]), (2, ["total 7"])]
    spans = episode.trajectory.spans()
    assert spans[2][0] is False and chat.decode(spans[2][1]) == (
        "\n<|im_start|>user\n<tool_response>\ntotal 3\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nAdd 4 next.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.decode(spans[4][1]).count("<|im_start|>user") == 1
    assert episode.env.total == 7 and episode.turns == 3 and episode.trajectory.ids == state["ids"]


def test_failing_advisor(chat, say):
    # an advisor that cannot be reached ends the run, or its episode goes on without advice, uncounted
    def advisor(episode):
        raise TimeoutError("no answer")

    rollout = Rollout(say(TURNS), chat, BUDGET)
    episode = rollout.start(Counter(), seed=0)
    rollout.advance([episode], advisor=advisor)
    assert episode.trajectory.stop == "error: advisor: TimeoutError: no answer" and episode.row is None


# ---- groups


def test_rows_are_refilled_at_once(chat, say):
    # finished rows stay empty until the whole batch is through
    turns = {seed: [call_text("look")] * (seed % 3) + ["7"] for seed in range(8)}
    sampler = say(turns, rows=3)
    order = []
    groups = Rollout(sampler, chat, BUDGET, workers=0).run(
        [Counter(name=f"toy/{i}") for i in range(8)],
        group=1,
        seeds=[[i] for i in range(8)],
        on_done=order.append,
    )
    widths = [len(rows) for rows in sampler.stepped]
    assert widths == sorted(widths, reverse=True) and widths[0] == 3
    assert [group[0].env.task.id for group in groups] == [f"toy/{i}" for i in range(8)]
    assert sorted(episode.group for episode in order) == list(range(8)) and order[0].group == 0
    assert all(group[0].trajectory.stop == "answer" for group in groups) and sampler.free == 3


def test_group_is_forked_at_its_prompt(chat, say):
    # the prompt is prefilled once per member; members share a world or get one another's noise
    turns = {10 * i + j: [call_text("add", number=j + 1), str(j + 1)] for i in range(3) for j in range(3)}
    sampler = say(turns, rows=7)
    seeds = [[10 * i + j for j in range(3)] for i in range(3)]
    groups = Rollout(sampler, chat, BUDGET).run([Counter(2) for _ in range(3)], group=3, seeds=seeds)
    assert (sampler.num_opened, sampler.num_forked) == (3, 6)
    for i, group in enumerate(groups):
        assert [(e.group, e.member, e.seed) for e in group] == [(i, j, seeds[i][j]) for j in range(3)]
        assert [e.env.total for e in group] == [1, 2, 3]
        assert [e.env.verify().passed for e in group] == [False, True, False]


def test_group_larger_than_the_rows(chat, say):
    # a group that needs more rows than there are waits for ever
    turns = {j: [call_text("add", number=j), str(j)] for j in range(5)}
    for rows, opened in ((1, 5), (2, 3), (4, 2)):
        sampler = say(turns, rows=rows)
        (group,) = Rollout(sampler, chat, BUDGET).run([Counter()], group=5, seeds=[list(range(5))])
        assert [e.env.answer_text for e in group] == list("01234") and [e.env.total for e in group] == list(
            range(5)
        )
        assert sampler.num_opened == opened and sampler.free == rows


def test_misuse_has_a_message(chat, say):
    # a wrong call is noticed late or never
    with pytest.raises(ValueError, match=r"total_tokens=2000.*max_len=100"):
        Rollout(say(TURNS, max_len=100), chat, BUDGET)
    with pytest.raises(ValueError, match="turn_tokens=0"):
        budget(turn_tokens=0)
    rollout = Rollout(say(TURNS, rows=1), chat, BUDGET, workers=0)
    with pytest.raises(ValueError, match="seeds must be 1 lists of group=2"):
        rollout.run([Counter()], group=2, seeds=[[1]])
    assert rollout.run([], group=2, seeds=[]) == []
    episode = rollout.start(Counter(), seed=0)
    with pytest.raises(ValueError, match="no free row"):
        rollout.run([Counter()], group=1, seeds=[[1]])
    with pytest.raises(ValueError, match="turns=0"):
        rollout.advance([episode], turns=0)
    rollout.close(episode)
    with pytest.raises(ValueError, match="is closed"):
        rollout.advance([episode])


def test_show(chat, say):
    # a printout that hides who wrote what
    text = one(say([call_text("look"), "7"]), chat).trajectory.show(chat)
    assert text.startswith("<|im_start|>system\nCount.")
    assert '⟦<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>⟧' in text
    assert "<tool_response>\ntotal 0\n</tool_response>" in text
    assert text.endswith("⟦7<|im_end|>⟧\n[stop: answer]")


# ---- with a real model


class Talk(Counter):
    """Answers any text, so that a random model has several turns too."""

    def __init__(self, target: int = 7):
        super().__init__(target)
        self.tools = []

    def step(self, text, calls):
        self.total += 1
        return [Message("user", f"{self.total}: {len(text)} characters, {len(calls)} calls")], self.total == 3


@pytest.fixture(scope="module")
def model(chat):
    model = toy.tiny_model(chat)
    with torch.no_grad():
        model.model.embed_tokens.weight[sorted(chat.stop_ids)] *= 3  # turns of some ten tokens
    return model


def play(model, chat, *, rows, workers=0, group=3):
    rollout = Rollout(Sampler(model, rows=rows, max_len=300), chat, budget(total_tokens=300), workers=workers)
    seeds = [[100 * i + j for j in range(group)] for i in range(3)]
    groups = rollout.run([Talk(5 + i) for i in range(3)], group=group, seeds=seeds)
    return [episode for group in groups for episode in group]


def test_result_ignores_rows_and_threads(model, chat):
    # an episode depends on how many rows there are, on its neighbours, or on threads
    torch.set_num_threads(1)
    wide = play(model, chat, rows=9)
    assert sum(e.turns == 3 for e in wide) > 4 and {e.trajectory.stop for e in wide} <= {"answer", "tokens"}
    assert len({tuple(e.trajectory.ids) for e in wide}) == 9
    for other in (play(model, chat, rows=2), play(model, chat, rows=7, workers=3)):
        for a, b in zip(wide, other, strict=True):
            assert a.trajectory.ids == b.trajectory.ids and a.trajectory.stop == b.trajectory.stop
            assert a.trajectory.sampled == b.trajectory.sampled
            assert a.trajectory.logp == pytest.approx(b.trajectory.logp, abs=1e-4)


def test_same_schedule_same_bits(model, chat):
    # with workers=0 a repeated rollout differs in the last bit, and a resumed run with it
    first, second = play(model, chat, rows=5), play(model, chat, rows=5)
    assert [e.trajectory.logp for e in first] == [e.trajectory.logp for e in second]


def test_forked_row_continues_as_its_twin(model, chat):
    # fork copies the ids but not the cache, or twins of one seed part ways
    rollout = Rollout(Sampler(model, rows=3, max_len=300), chat, budget(total_tokens=300), workers=0)
    first = rollout.start(Talk(), seed=5)
    rollout.advance([first], turns=1)
    twin, other = rollout.fork(first, seed=5), rollout.fork(first, seed=6)
    shared = len(first.trajectory.ids)
    rollout.advance([twin])
    rollout.advance([first, other])
    assert first.trajectory.ids == twin.trajectory.ids and first.turns == 3
    assert first.trajectory.logp == pytest.approx(twin.trajectory.logp, abs=1e-5)
    assert other.trajectory.ids[:shared] == first.trajectory.ids[:shared]
    assert other.trajectory.ids != first.trajectory.ids
