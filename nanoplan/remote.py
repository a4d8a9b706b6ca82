"""An agent or a critic behind an endpoint, in the place of a local one.

`RemoteRollout` has what nanoplan.critic uses of a Rollout: start, advance, branch, close, free. An episode is
its messages; a fork copies the world and the messages and sends them again, so that its prefix is prefilled
once more by the server (which may cache it). No ids, no log-probs: an agent that is asked, never trained.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from envs.base import Env, Message
from nanoplan.critique import Critique, Review
from nanoplan.llm import Endpoint, EndpointError, to_openai
from nanoplan.rollout import MAX_ERROR_CHARS, Budget, Episode
from nanoplan.trajectory import Trajectory

MAX_SEED = 2**31  # servers differ in how long a seed they take
OVERFLOW = ("context length", "context_length", "maximum context", "context window", "too many tokens")


class RemoteRollout:
    """endpoint     the agent's server
    budget       turns and turn_tokens hold; the server knows its own context
    temperature  of the agent
    computed     prompt and completion tokens by the server's count; reused is 0: what it caches is not known
    """

    def __init__(self, endpoint: Endpoint, budget: Budget, *, temperature: float = 1.0):
        self.endpoint, self.budget, self.temperature = endpoint, budget, temperature
        self.free = 2**20  # an episode here costs memory only for its messages
        self.reused = 0
        self._counted = 0  # of the server's tokens, those before the count was set to 0

    @property
    def computed(self) -> int:
        usage = self.endpoint.usage
        return int(usage["prompt_tokens"] + usage["completion_tokens"]) - self._counted

    @computed.setter
    def computed(self, value: int) -> None:
        self._counted += self.computed - value

    def start(self, env: Env, *, seed: int, group: int = 0, member: int = 0) -> Episode:
        """A new episode at its prompt; over at once ("error: reset: ...") if the environment fails."""
        episode = Episode(env, Trajectory(), None, seed, group, member)
        try:
            episode.history = env.reset()
        except Exception as error:
            episode.trajectory.stop = _error("reset", error)
        return episode

    def fork(self, episode: Episode, *, seed: int, member: int = 0) -> Episode:
        """A twin at the same point: its own world, the same messages."""
        pending = None if episode.pending is None else episode.pending[:]
        return replace(
            episode, env=episode.env.fork(), trajectory=episode.trajectory.copy(), seed=seed, member=member,
            pending=pending, history=episode.history[:],
        )  # fmt: skip

    def close(self, episode: Episode) -> None:
        """Nothing is held."""

    def advance(self, episodes: list[Episode], *, turns: int | list[int | None] | None = None) -> None:
        """Run episodes to their end, or for some more turns; see Rollout.advance."""
        each = turns if isinstance(turns, list) else [turns] * len(episodes)
        goals = [e.turns + n if n is not None else None for e, n in zip(episodes, each, strict=True)]
        with ThreadPoolExecutor(self.endpoint.concurrency) as pool:
            list(pool.map(self._play, episodes, goals))

    def branch(self, jobs: list[tuple[Episode, str, int]], *, until=None) -> list[Episode]:
        """Continuations of paused episodes to their end; see Rollout.branch."""
        twins = [self.fork(source, seed=seed, member=i) for i, (source, _, seed) in enumerate(jobs)]
        for twin, (_, advice, _) in zip(twins, jobs, strict=True):
            if advice:
                twin.pending.append(Message("user", advice))
        if not (until and until()):
            self.advance(twins)
        return twins

    def _play(self, episode: Episode, goal: int | None) -> None:
        while not episode.trajectory.stop and (goal is None or episode.turns < goal):
            episode.history += episode.pending or []
            episode.pending = None
            self._turn(episode)

    def _turn(self, episode: Episode) -> None:
        """One question to the server, and the world's answer to its reply."""
        trajectory, env = episode.trajectory, episode.env
        try:
            reply = self.endpoint.chat(
                to_openai(episode.history), tools=[tool.schema() for tool in env.tools] or None,
                temperature=self.temperature, max_tokens=self.budget.turn_tokens,
                seed=episode.seed % MAX_SEED,
            )  # fmt: skip
        except EndpointError as error:
            full = any(words in str(error).lower() for words in OVERFLOW)
            trajectory.stop = "tokens" if full else _error("agent", error)
            return
        episode.turns += 1
        if reply.stop == "length":
            trajectory.stop = "turn_tokens"
            return
        episode.calls += len(reply.calls)
        episode.malformed += sum(bool(call.error) for call in reply.calls)
        episode.history.append(Message("assistant", reply.text, reply.calls))
        try:
            messages, done = env.step(reply.text, reply.calls)
        except Exception as error:
            trajectory.stop = _error("step", error)
            return
        if done or episode.turns >= self.budget.turns:
            trajectory.stop = "answer" if done else "turns"
        else:
            episode.pending = messages


def write_remotely(
    endpoint: Endpoint, reviews: list[Review], seeds: list[int], *, max_tokens: int, temperature: float = 1.0
) -> list[Critique]:
    """One critique for each prompt by a model behind an endpoint; one that fails has the fault "endpoint"."""

    def write(review: Review, seed: int) -> Critique:
        try:
            reply = endpoint.chat(
                to_openai(review.reset()),
                temperature=temperature,
                max_tokens=max_tokens,
                seed=seed % MAX_SEED,
            )
        except EndpointError as error:
            return Critique("", "", "", [f"endpoint: {error}"[:MAX_ERROR_CHARS]])
        if reply.stop != "length":
            review.step(reply.text, reply.calls)
        return review.read()

    with ThreadPoolExecutor(endpoint.concurrency) as pool:
        return list(pool.map(write, reviews, seeds))


def _error(place: str, error: Exception) -> str:
    return f"error: {place}: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
