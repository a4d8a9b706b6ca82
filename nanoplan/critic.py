"""A critic beside an agent: when it is called, how its words reach the agent, and what they are worth.

Four protocols say when (Caddie, section 2.1): "window:1-10" draws one step of an episode from a window,
"step:4" is the window of one step, "prob:0.3:3" calls with a chance before every turn, "self:3" lets the
agent call a tool; the last number is the most critiques of an episode. A critique is worth the mean outcome
of continuations of the frozen agent, forked where it was given (section 2.2): `explore` measures that.

An agent is anything with start, advance, branch, close, free: nanoplan.rollout.Rollout or, for an endpoint,
nanoplan.remote.RemoteRollout. No gradients here.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from envs.base import Call, Env, Message, Tool, Verdict, error_text
from nanoplan.critique import NO_FEEDBACK, Critique, Review, critic_messages
from nanoplan.draw import GOLDEN
from nanoplan.evaluate import seed_for
from nanoplan.lora import adapters_off
from nanoplan.model import Model
from nanoplan.reward import group_advantages
from nanoplan.rollout import Episode, Rollout

MALFORMED = -1.0  # reward of a malformed critique, without a continuation; Caddie appendix B
MAX_CALLS = 3  # critiques an agent may call for in an episode; Caddie appendix B
ASKED = "The critic's feedback follows."  # answers the call; templates want a result for each
MASK64 = 2**64 - 1

Writer = Callable[[list[Review], list[int]], list[Critique]]  # prompts and seeds -> critiques


# when


@dataclass(frozen=True, slots=True)
class Protocol:
    kind: str  # none | window | prob | self
    steps: tuple[int, ...] = ()  # window: the turns after which the critic may speak, one of them drawn
    chance: float = 0.0  # prob: before every turn but the first
    most: int = MAX_CALLS  # critiques of one episode


def parse_protocol(text: str) -> Protocol:
    """The protocol of a flag: none, step:4, window:1-10, prob:0.3, prob:0.3:3, self, self:3.

    raises  ValueError that shows these forms
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "none" and not rest:
            return Protocol("none", most=0)
        if kind == "step":
            return _window(int(rest), int(rest))
        if kind == "window":
            low, _, high = rest.partition("-")
            return _window(int(low), int(high))
        if kind == "prob":
            chance, _, most = rest.partition(":")
            if 0 <= float(chance) <= 1 and int(most or MAX_CALLS) >= 1:
                return Protocol("prob", chance=float(chance), most=int(most or MAX_CALLS))
        if kind == "self" and int(rest or MAX_CALLS) >= 1:
            return Protocol("self", most=int(rest or MAX_CALLS))
    except ValueError:
        pass
    raise ValueError(
        f"protocol={text!r}; wanted none, step:K, window:LOW-HIGH, prob:CHANCE[:MOST], self[:MOST]"
    )


def _window(low: int, high: int) -> Protocol:
    if not 1 <= low <= high:
        raise ValueError(f"window {low}-{high}: the critic speaks after turn 1 at the earliest")
    return Protocol("window", tuple(range(low, high + 1)), most=1)


def turns_until(protocol: Protocol, *, turn: int, used: int, seed: int) -> int | None:
    """After how many more turns of the agent the critic may speak next; None: not in this episode.

    turn  turns that have ended; used  critiques given; seed  draws the step or the chances of this episode
    """
    if used >= protocol.most:
        return None
    if protocol.kind == "self":
        return 1
    if protocol.kind == "window":
        at = protocol.steps[seed_for(seed, "window") % len(protocol.steps)]
        return at - turn if at > turn else None
    draws = (seed_for(seed, "prob", turn + ahead) / 2**63 < protocol.chance for ahead in range(1, 1000))
    return next((ahead for ahead, drawn in enumerate(draws, start=1) if drawn), None)


# the tool of an agent that asks by itself


def ask_tool(most: int) -> Tool:
    text = f"Ask a critic for feedback on your work so far, at most {most} times."
    return Tool("ask_critic", text, {"type": "object", "properties": {}})


class SelfCall(Env):
    """A world in which the agent may call for a critique: a turn of its own, in which the world stands still.

    After `most` calls only the world's actions are accepted; another call is answered with an error text.
    asked  the agent's last turn was such a call; the answer is the critique, a user turn
    """

    def __init__(self, env: Env, *, most: int = MAX_CALLS):
        self.ask = ask_tool(most)
        super().__init__(env.task, [*env.tools, self.ask])
        self.env, self.most, self.num_asked, self.asked = env, most, 0, False

    def reset(self) -> list[Message]:
        self.num_asked, self.asked, self.answer_text, self.done = 0, False, "", False
        return self.env.reset()

    def step(self, text: str, calls: list[Call]) -> tuple[list[Message], bool]:
        self.asked = False
        if not any(call.name == self.ask.name and not call.error for call in calls):
            messages, over = self.env.step(text, calls)
            self.answer_text, self.done = self.env.answer_text, self.env.done
            return messages, over
        if len(calls) > 1:
            reason = f"call {self.ask.name} alone, in a turn without other calls; nothing was done"
        elif self.num_asked >= self.most:
            reason = f"all {self.most} calls of {self.ask.name} are used; act in the world"
        else:
            self.num_asked, self.asked = self.num_asked + 1, True
            return [Message("tool", ASKED)], False
        return [Message("tool", error_text(reason)) for _ in calls], False

    def fork(self) -> "SelfCall":
        twin = copy.copy(self)
        twin.env = self.env.fork()
        return twin

    def verify(self) -> Verdict:
        return self.env.verify()

    def official(self) -> dict[str, bool | None] | None:
        return self.env.official()

    def view(self):
        return self.env.view()

    def reference_view(self):
        return self.env.reference_view()


# episodes with a critic


@dataclass(slots=True)
class Note:
    turn: int  # turns that the agent had ended
    critique: Critique
    at: int  # length of the episode's history then: the agent's next turn comes after it


def review_of(episode: Episode, *, style: str) -> Review:
    """The critic's world for a paused episode: all that the agent has seen, the last answer included."""
    seen = [*episode.history, *episode.pending]
    return Review(
        episode.env.task.id, critic_messages(seen, episode.env.tools, style=style), episode.env.tools
    )


def write_locally(critic: Rollout, reviews: list[Review], seeds: list[int]) -> list[Critique]:
    """One critique for each prompt by a local model."""
    critic.run(reviews, group=1, seeds=[[seed] for seed in seeds])
    return [review.read() for review in reviews]


def advised(
    agent, write: Writer | None, envs: list[Env], protocol: Protocol, *, seeds: list[int],
    style: str = "advise",
) -> tuple[list[Episode], list[list[Note]]]:  # fmt: skip
    """One episode of each environment to its end, with the critic called as the protocol says.

    write    the critic; may be None with protocol none
    seeds    one per environment: of the agent's noise, of the protocol's draws, and of the critic's noise
    style    key of critique.PROMPTS
    returns  episodes, and what the critic said in each. A malformed critique is not passed on: the agent goes
             on as if it had not been called, or is told so if it asked
    """
    if protocol.kind == "self":
        envs = [SelfCall(env, most=protocol.most) for env in envs]
    episodes: list[Episode] = []
    notes: list[list[Note]] = [[] for _ in envs]
    size = agent.free
    if envs and size < 1:
        raise ValueError("no free row for the agent; close the episodes that are still open")
    for first in range(0, len(envs), size):
        part = [
            agent.start(envs[i], seed=seeds[i], group=i) for i in range(first, min(first + size, len(envs)))
        ]
        episodes += part
        _advise_wave(agent, write, part, protocol, seeds, notes, style)
    return episodes, notes


def _advise_wave(agent, write, part, protocol, seeds, notes, style) -> None:
    calls = {episode: 0 for episode in part}  # critiques so far, malformed ones included
    while live := [episode for episode in part if not episode.trajectory.stop]:
        turns = [turns_until(protocol, turn=e.turns, used=calls[e], seed=seeds[e.group]) for e in live]
        agent.advance(live, turns=turns)
        due = [e for e in live if not e.trajectory.stop and (protocol.kind != "self" or e.env.asked)]
        reviews = [review_of(e, style=style) for e in due]
        said = write(reviews, [seed_for(seeds[e.group], "critic", e.turns) for e in due]) if due else []
        for episode, critique in zip(due, said, strict=True):
            calls[episode] += 1
            notes[episode.group].append(Note(episode.turns, critique, len(episode.history)))
            if not critique.faults:
                episode.pending.append(Message("user", critique.feedback))
            elif protocol.kind == "self":
                episode.pending.append(Message("user", NO_FEEDBACK))


# what a critique is worth


def outcome(episode: Episode, *, overflow: str) -> float | None:
    """1.0 for success, 0.0 for failure, None for what no critique is to blame for.

    overflow  "drop": an episode that outgrew the context is None; "fail": it has failed (ALFWorld)
    A world, a retrieval service or an endpoint that failed is always None; a turn that was cut at its limit
    is malformed output and has failed.
    """
    if episode.trajectory.broken or (overflow == "drop" and episode.trajectory.stop == "tokens"):
        return None
    return float(episode.env.verify().passed)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a state is explored; the names are Caddie's."""

    group: int  # G, critiques of a state
    continuations: int  # N of each critique
    low: int  # the critic speaks after a turn drawn from [low, high]
    high: int
    states: str = "window"  # "window": a turn drawn beforehand; "self": where the agent calls for it
    step_seed: str = "draw"  # what the turn is drawn from: the draw, or the task's id (ALFWorld)
    reward: str = "outcome"  # "gumbel": minus the outcome without the critique, at the same positional noise
    baseline: str = "group"  # "none": the mean of baseline_n continuations without a critique is subtracted
    baseline_n: int = 4  # M
    scale: bool = True  # divide by the group's standard deviation; with baseline "group" only
    overflow: str = "drop"  # see outcome
    style: str = "advise"  # key of critique.PROMPTS


@dataclass(slots=True)
class State:
    """A point of an agent's episode, the critiques given there, and what came of them."""

    id: str  # of the task
    slot: int  # place in the step, over all ranks
    draw: int  # 0, or how often the slot was drawn again
    turn: int  # turns of the agent before the critiques
    episode: Episode  # the agent's, paused there; over if it ended before
    reviews: list[Episode] = field(default_factory=list)  # (G,) the critic's
    critiques: list[Critique] = field(default_factory=list)  # (G,)
    branches: list[list[Episode]] = field(default_factory=list)  # (G, N); [] for a malformed one
    plain: list[list[Episode]] = field(default_factory=list)  # without a critique: (G, N) gumbel, (1, M) none
    outcomes: list[list[float | None]] = field(default_factory=list)  # (G, N) of the branches, see outcome
    rewards: list[float | None] = field(default_factory=list)  # (G,)
    advantages: list[float] = field(default_factory=list)  # (G,)

    @property
    def live(self) -> bool:
        """The agent was still at work when the critics were to speak."""
        return not self.episode.trajectory.stop

    @property
    def kept(self) -> bool:
        """Some critique has a gradient."""
        return any(self.advantages)


def explore(agent, critic: Rollout, plan: Plan, states: list[tuple[int, int, Env]], *, key, until=None):
    """Prefixes, critiques and continuations of some slots.

    states   (slot, draw, environment) each
    key      (seed of the run, step): every seed is a function of it, the slot and the draw, so that what is
             found doesn't depend on the rank
    until    asked between steps; True gives up, and what is returned is not to be used
    returns  a State each, rewarded, in order
    """
    found = reach(agent, plan, states, key=key)
    live = [state for state in found if state.live]
    reviews = [review_of(state.episode, style=plan.style) for state in live]
    seeds = [
        [seed_for(*key, "critic", state.slot, state.draw, i) for i in range(plan.group)] for state in live
    ]
    for state, group in zip(
        live, critic.run(reviews, group=plan.group, seeds=seeds, until=until), strict=True
    ):
        state.reviews = group
        state.critiques = [episode.env.read() for episode in group]
    if not (until and until()):
        branch_out(agent, plan, live, key=key, until=until)
        for state in live:
            value(state, plan)
    for state in found:
        agent.close(state.episode)
    return found


def reach(agent, plan: Plan, states: list[tuple[int, int, Env]], *, key) -> list[State]:
    """The frozen agent up to the turn at which the critics speak."""
    envs = [SelfCall(env) if plan.states == "self" else env for _, _, env in states]
    found, turns = [], []
    for (slot, draw, _), env in zip(states, envs, strict=True):
        name = (key[0], "turn", env.task.id) if plan.step_seed == "task" else (*key, "turn", slot, draw)
        turns.append(plan.low + seed_for(*name) % (plan.high - plan.low + 1))
        episode = agent.start(env, seed=seed_for(*key, "agent", slot, draw), group=slot)
        found.append(State(env.task.id, slot, draw, turns[-1], episode))
    episodes = [state.episode for state in found]
    if plan.states != "self":
        agent.advance(episodes, turns=turns)
        return found
    while going := [e for e in episodes if not e.trajectory.stop and not e.env.asked]:
        agent.advance(going, turns=1)
    for state in found:
        state.turn = state.episode.turns
    return found


def branch_out(agent, plan: Plan, states: list[State], *, key, until=None) -> None:
    """Fork the agent for every well-formed critique, and for the continuations without one."""
    jobs, places = [], []  # places: (list that gets the episode)
    for state in states:
        state.branches = [[] for _ in state.critiques]
        rows = state.critiques if plan.reward == "gumbel" else [None] if plan.baseline == "none" else []
        state.plain = [[] for _ in rows]
        count = plan.continuations if plan.reward == "gumbel" else plan.baseline_n
        for i, critique in enumerate(state.critiques):
            for n in range(0 if critique.faults else plan.continuations):
                seed = seed_for(*key, "branch", state.slot, state.draw, i, n)
                if plan.reward == "gumbel":
                    seed = shifted_seed(seed, agent.cost(state.episode, critique.feedback))
                jobs.append((state.episode, critique.feedback, seed))
                places.append(state.branches[i])
        for i, row in enumerate(rows):
            for n in range(0 if row is not None and row.faults else count):
                name = "branch" if plan.reward == "gumbel" else "plain"
                jobs.append((state.episode, "", seed_for(*key, name, state.slot, state.draw, i, n)))
                places.append(state.plain[i])
    for place, episode in zip(places, agent.branch(jobs, until=until), strict=True):
        place.append(episode)


def value(state: State, plan: Plan) -> None:
    """Rewards and advantages of a state's critiques from its continuations.

    Malformed: -1. Else the mean outcome over the continuations that have one; None if none has, or if the
    prompt left the critic no room to write. Advantages: the group's (DAPO), or R - b with b the mean outcome
    without a critique (Caddie appendix A).
    """

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return math.fsum(known) / len(known) if known else None

    state.outcomes = [[outcome(e, overflow=plan.overflow) for e in row] for row in state.branches]
    plain = [[outcome(e, overflow=plan.overflow) for e in row] for row in state.plain]
    state.rewards = []
    for i, critique in enumerate(state.critiques):
        if not state.reviews[i].trajectory.num_sampled:
            state.rewards.append(None)
        elif critique.faults:
            state.rewards.append(MALFORMED)
        elif plan.reward == "gumbel":
            pairs = zip(state.outcomes[i], plain[i], strict=True)
            state.rewards.append(mean([None if None in (a, b) else a - b for a, b in pairs]))
        else:
            state.rewards.append(mean(state.outcomes[i]))
    if plan.baseline == "group":
        state.advantages = group_advantages(state.rewards, group=plan.group, scale=plan.scale)
        return
    base = mean(plain[0])
    state.advantages = [0.0 if None in (base, reward) else reward - base for reward in state.rewards]


def shifted_seed(seed: int, shift: int) -> int:
    """A seed whose noise at index i + shift of a row is that of `seed` at index i.

    Noise is a hash of mix(seed) + (i + 1) * GOLDEN (nanoplan.draw), and mix is a bijection, so the seed that
    belongs to mix(seed) - shift * GOLDEN exists: two rows that differ by `shift` observed tokens draw from
    the same noise, position by position.
    """
    return _unmix64((_mix64(seed & MASK64) - shift * GOLDEN) & MASK64)


def _mix64(x: int) -> int:
    """draw.mix64 on one Python integer."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def _unmix64(x: int) -> int:
    """Its inverse: each xor-shift undone by repeating it, each product by the factor's inverse mod 2**64."""
    x = x ^ (x >> 31) ^ (x >> 62)
    x = (x * pow(0x94D049BB133111EB, -1, 2**64)) & MASK64
    x = x ^ (x >> 27) ^ (x >> 54)
    x = (x * pow(0xBF58476D1CE4E5B9, -1, 2**64)) & MASK64
    return x ^ (x >> 30) ^ (x >> 60)


class AdaptersOff:
    """The critic's base model as the agent: the same weights, adapters off during its forwards only."""

    def __init__(self, model: Model):
        self.model, self.config, self.num_ids = model, model.config, model.num_ids

    def parameters(self):
        return self.model.parameters()

    def modules(self):
        return self.model.modules()

    def __call__(self, *args, **options):
        with adapters_off(self.model):
            return self.model(*args, **options)
