"""The one record of an episode: what the model saw, which of it the model wrote, and why it ended.

The loss mask is born here: an id comes in either through `sample`, with the sampler's own log-prob, or
through `observe`. Nothing is removed, re-tokenised or re-ordered, so `sampled` cannot slip against `ids`.
"""

from dataclasses import dataclass, field

# Reasons in Trajectory.stop of episodes that a budget ended before the world did.
TRUNCATED = ("turns", "turn_tokens", "tokens")


@dataclass(slots=True)
class Trajectory:
    """Three lists of equal length, append only.

    stop  "" while it runs, else why it ended:
          "answer"       the environment said that the episode is over
          "turns"        the last allowed turn of the model was spent without a final answer
          "turn_tokens"  a turn reached its budget before a stop token; it was not parsed, nor acted upon
          "tokens"       the episode's budget was reached, by the model or by an observation with no room left
          "error: ..."   the environment (or an advisor) raised; not the model's fault, so the reward is None
    """

    ids: list[int] = field(default_factory=list)  # every id in the model's context, in order
    sampled: list[bool] = field(default_factory=list)  # True where the model wrote the id
    logp: list[float] = field(default_factory=list)  # nats, from the sampler; 0.0 where observed
    stop: str = ""

    def observe(self, ids: list[int]) -> None:
        """Append ids that the model did not write."""
        self.ids += ids
        self.sampled += [False] * len(ids)
        self.logp += [0.0] * len(ids)
        assert len(self.ids) == len(self.sampled) == len(self.logp)

    def sample(self, id: int, logp: float) -> None:
        """Append one id that the model wrote, with the log-prob under which it was drawn."""
        self.ids.append(id)
        self.sampled.append(True)
        self.logp.append(logp)
        assert len(self.ids) == len(self.sampled) == len(self.logp)

    def copy(self) -> "Trajectory":
        """A twin with lists of its own."""
        return Trajectory(self.ids[:], self.sampled[:], self.logp[:], self.stop)

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled)

    @property
    def truncated(self) -> bool:
        """A budget ended it."""
        return self.stop in TRUNCATED

    @property
    def broken(self) -> bool:
        """The environment failed: no reward, left out of its group, counted."""
        return self.stop.startswith("error")

    def spans(self) -> list[tuple[bool, list[int]]]:
        """Runs of neighbours of one kind: (sampled, ids), in order; together they are all of `ids`."""
        spans: list[tuple[bool, list[int]]] = []
        for id, sampled in zip(self.ids, self.sampled, strict=True):
            if not spans or spans[-1][0] != sampled:
                spans.append((sampled, []))
            spans[-1][1].append(id)
        return spans

    def show(self, chat) -> str:
        """The episode as plain text for people: sampled spans between ⟦ and ⟧, observed text as it is, and
        the stop reason last. `chat` needs only decode(ids). An id that holds part of a character at the
        border of a span shows as the replacement character; the ids themselves are whole."""
        parts = []
        for sampled, ids in self.spans():
            text = chat.decode(ids)
            parts.append(f"⟦{text}⟧" if sampled else text)
        return "".join(parts) + f"\n[stop: {self.stop or 'running'}]"
