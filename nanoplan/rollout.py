"""Episodes: a model and its world taking turns, many at once.

`sampler.step` gives one token to every row whose turn it is. At a stop token the turn is parsed and its
calls run in a thread while the other rows decode on; the answer is appended as ids, and the row goes on.
`start`, `fork` and `advance` are all there is: a GRPO group (`run`) and a critic's branches (`branch`) are
both forks. A fork takes its prefix from the cache: `computed` and `reused` count what that saves.

What an episode becomes depends on its environment and its seed only: the sampler's noise is drawn from
(seed, index of the token), and a worker thread touches no episode but its own. With workers=0 the calls run
between two steps instead, so that the batches have the same rows in every run too, and with them the last
bits of every float: the choice for worlds that answer in microseconds and for bit-for-bit resume.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

from envs.base import Env, Message
from nanoplan.trajectory import Trajectory

CUT_MARK = "\n[.. cut, {total} tokens in all]"  # ends a tool result that was too long
MAX_ERROR_CHARS = 200  # characters of an exception kept in a stop reason; ours

Advisor = Callable[["Episode"], "str | None"]


@dataclass(frozen=True, slots=True)
class Budget:
    turns: int  # turns of the model per episode
    turn_tokens: int  # sampled tokens per turn, stop token included
    observation_tokens: int  # tokens of one tool result, mark included
    total_tokens: int  # all ids of an episode: prompt, sampled and observed

    def __post_init__(self):
        for name in ("turns", "turn_tokens", "observation_tokens", "total_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; must be 1 or more")


@dataclass(slots=True, eq=False)
class Episode:
    env: Env  # its own world
    trajectory: Trajectory
    row: int | None  # the sampler's handle; None when the episode is over
    seed: int  # of the row's sampling noise
    group: int = 0  # index of the request in run()
    member: int = 0  # index within the group
    turns: int = 0  # turns the model has ended, one that was cut included
    calls: int = 0  # tool calls in them
    malformed: int = 0  # of these, calls that could not be parsed
    cut_results: int = 0  # tool results that were longer than observation_tokens
    turn_start: int = 0  # index in trajectory.ids of the current turn's first token
    limit: int = 0  # length of trajectory.ids at which the current turn is cut
    pending: list[Message] | None = None  # the world's answer, not in ids yet; None while the model writes
    history: list[Message] = field(default_factory=list)  # what is in ids, as messages: for critics, replays
    cached: int = 0  # of ids, those that the row took from another row's cache when it was forked


class Rollout:
    """sampler  open / fork / extend / step / close (nanoplan.sampler.Sampler)
    chat     open / observe / parse / encode / decode / stop_ids (nanoplan.chat.Chat)
    workers  threads for tools; 0 runs them between two steps
    stop_strings  texts that end a turn as a stop token does; the id that completes one is kept whole
    raises   ValueError if total_tokens does not fit in a row of the sampler
    """

    def __init__(
        self, sampler, chat, budget: Budget, *, workers: int = 8, stop_strings: tuple[str, ...] = ()
    ):
        if budget.total_tokens > sampler.max_len:
            raise ValueError(
                f"total_tokens={budget.total_tokens} does not fit in the sampler's rows of "
                f"max_len={sampler.max_len} tokens; lower total_tokens or raise max_len"
            )
        self.sampler, self.chat, self.budget, self.workers = sampler, chat, budget, workers
        self.stop_strings = stop_strings
        self.stop_window = max((len(text.encode()) for text in stop_strings), default=0) + 4  # ids, see Chat
        self.wait_s = 0.0  # seconds in which every row was waiting for a tool
        self.computed = 0  # tokens that went through the model, over all rows that are closed
        self.reused = 0  # tokens that their forks took from a cache instead

    @property
    def free(self) -> int:
        """Episodes that can still be opened."""
        return self.sampler.free

    def start(self, env: Env, *, seed: int, group: int = 0, member: int = 0) -> Episode:
        """A new episode at its prompt. One whose environment fails to reset, or whose prompt leaves no room
        in total_tokens, is over at once ("error: ...", "tokens")."""
        episode = Episode(env, Trajectory(), None, seed, group, member)
        try:
            messages = env.reset()
        except Exception as error:
            episode.trajectory.stop = _error("reset", error)
            return episode
        ids = self.chat.open(messages, env.tools)
        episode.trajectory.observe(ids)
        episode.history = messages[:]
        if len(ids) >= self.budget.total_tokens:
            episode.trajectory.stop = "tokens"
            return episode
        episode.row = self.sampler.open(ids, seed=seed)
        self._open_turn(episode)
        return episode

    def fork(self, episode: Episode, *, seed: int, member: int = 0) -> Episode:
        """A twin at the same point, with its own world, its own copy of the cache and its own noise."""
        env, trajectory = episode.env.fork(), episode.trajectory.copy()
        pending = None if episode.pending is None else episode.pending[:]
        row = None if episode.row is None else self.sampler.fork(episode.row, seed=seed)
        return replace(
            episode, env=env, trajectory=trajectory, row=row, seed=seed, member=member, pending=pending,
            history=episode.history[:], cached=len(trajectory.ids) - 1 if row is not None else 0,
        )  # fmt: skip

    def close(self, episode: Episode) -> None:
        """Give the row back; for episodes that will not be advanced to their end."""
        if episode.row is not None:
            self.sampler.close(episode.row)
            episode.row = None
            # a row's last id has not been through the model; the one it was forked at was, in its own row
            self.computed += len(episode.trajectory.ids) - 1 - episode.cached
            self.reused += episode.cached

    def advance(
        self,
        episodes: list[Episode],
        *,
        advisor: Advisor | None = None,
        turns: int | list[int | None] | None = None,
    ) -> None:
        """Run episodes to their end, or for `turns` more turns of the model.

        An episode that is over is left as it is; one that pauses keeps its row, and the world's answer stays
        in `pending`, so that it can be forked and advised before its next turn.
        turns    one number for all, or one for each episode
        advisor  called before every turn but the first, in a worker thread, while the world's answer is in
                 `pending`; its text is observed as a user turn after that answer, and the world does not move
        """
        each = turns if isinstance(turns, list) else [turns] * len(episodes)
        if len(each) != len(episodes) or any(number is not None and number < 1 for number in each):
            raise ValueError(
                f"turns={turns} for {len(episodes)} episodes; must be 1 or more (one number, or one for each "
                "episode), or None to run to the end"
            )
        for episode in episodes:
            if episode.row is None and not episode.trajectory.stop:
                raise ValueError(f"episode {episode.group}/{episode.member} is closed; start another")
        goals = {e: e.turns + n for e, n in zip(episodes, each, strict=True) if n is not None}
        going = [episode for episode in episodes if not episode.trajectory.stop]
        self._drive(going, goals, advisor, lambda episode: [])

    def cost(self, episode: Episode, advice: str) -> int:
        """Tokens by which advice makes the next observation of a paused episode longer."""
        with_it = [*episode.pending, Message("user", advice)]
        stopped, tools = episode.trajectory.ids[-1] in self.chat.stop_ids, episode.env.tools
        lengths = [
            len(self.chat.observe(m, stopped=stopped, tools=tools)) for m in (episode.pending, with_it)
        ]
        return lengths[1] - lengths[0]

    def branch(
        self, jobs: list[tuple[Episode, str, int]], *, until: Callable[[], bool] | None = None
    ) -> list[Episode]:
        """Continuations of paused episodes to their end: forks of world and cache, as rows become free.

        jobs     (paused episode, advice, seed): the advice is observed as a user turn after the world's last
                 answer, and the world does not move; "" for none. The paused episode itself stays as it is
        until    asked before every step; True gives up: the episodes are left unfinished, rows open
        returns  one episode a job, in order; `member` is the job's index
        raises   ValueError for an episode that is not paused, and without a free row
        """
        for source, _, _ in jobs:
            if source.row is None or source.pending is None:
                name, stop = f"{source.group}/{source.member}", source.trajectory.stop
                raise ValueError(f"episode {name} is not paused (stop={stop!r}); advance it by turns first")
        if jobs and not self.sampler.free:
            raise ValueError("no free row in the sampler to branch into; open it with more rows")
        waiting, twins = deque(enumerate(jobs)), []

        def refill() -> list[Episode]:
            opened = []
            while waiting and self.sampler.free:
                member, (source, advice, seed) = waiting.popleft()
                twin = self.fork(source, seed=seed, member=member)
                if advice:
                    twin.pending.append(Message("user", advice))
                opened.append(twin)
            twins.extend(opened)
            return opened

        self._drive(refill(), {}, None, lambda episode: refill(), until)
        return twins

    def run(
        self,
        envs: list[Env],
        *,
        group: int,
        seeds: list[list[int]],
        on_done: Callable[[Episode], None] | None = None,
        until: Callable[[], bool] | None = None,
    ) -> list[list[Episode]]:
        """`group` episodes of each environment, to their end.

        A group opens as soon as it finds enough free rows, its prompt prefilled once and forked; a finished
        row is closed at once. With fewer rows than `group`, a group runs in parts of as many members.
        seeds    seeds[i][j] is the noise of member j of envs[i]
        on_done  called for every episode when it is over, in the calling thread, in order of finishing
        until    asked before every step; True gives the rollout up: episodes are left unfinished, rows open
        returns  episodes[i][j]
        """
        if [len(row) for row in seeds] != [group] * len(envs) or group < 1:
            raise ValueError(f"seeds must be {len(envs)} lists of group={group} seeds, one per environment")
        size = min(group, self.sampler.free)
        if envs and size < 1:
            raise ValueError("no free row in the sampler; close the episodes that are still open")
        parts = deque(
            (i, range(first, min(first + size, group)))
            for i in range(len(envs))
            for first in range(0, group, size)
        )
        episodes: list[list[Episode]] = [[] for _ in envs]

        def refill() -> list[Episode]:
            ready, free = [], self.sampler.free
            while parts and len(parts[0][1]) <= free:
                ready.append(parts.popleft())
                free -= len(ready[-1][1])
            opened = self._open_parts(ready, envs, seeds) if ready else []
            for episode in opened:
                episodes[episode.group].append(episode)
            return opened

        def finished(episode: Episode) -> list[Episode]:
            if on_done is not None:
                on_done(episode)
            return refill()

        self._drive(refill(), {}, None, finished, until)
        return episodes

    def _open_parts(self, parts: list[tuple[int, range]], envs, seeds) -> list[Episode]:
        """The given members of each group, at their prompt. All heads start before any is forked, since the
        first fork prefills every prompt that is new in one pass."""
        heads = []
        for i, members in parts:
            env = envs[i] if members[0] == 0 else envs[i].fork()  # the first is in use by then; start resets
            heads.append(self.start(env, seed=seeds[i][members[0]], group=i, member=members[0]))
        opened = []
        for head, (i, members) in zip(heads, parts, strict=True):
            opened += [head, *(self.fork(head, seed=seeds[i][j], member=j) for j in members[1:])]
        return opened

    def _drive(self, episodes, goals: dict[Episode, int], advisor, finished, until=None) -> None:
        """The loop. Every live episode is in one place: new, running (the model writes), asking (its turn has
        ended, or it was paused), or waiting for its thread."""
        new, running, asking = deque(episodes), [], []
        waiting: dict[Future, Episode] = {}
        pool = ThreadPoolExecutor(self.workers) if self.workers else None
        try:
            while (new or running or asking or waiting) and not (until and until()):
                while new:
                    episode = new.popleft()
                    if episode.trajectory.stop:
                        self.close(episode)
                        new.extend(finished(episode))
                    else:
                        (running if episode.pending is None else asking).append(episode)
                for episode in asking:
                    waiting[self._submit(pool, episode, goals.get(episode), advisor)] = episode
                asking = []
                if waiting:
                    self._collect(waiting, running, new)
                if running and not new:  # a place that has become free is filled before the next step
                    ended = self._decode(running)
                    if ended:
                        running = [episode for episode in running if episode not in ended]
                        new.extend(episode for episode in ended if episode.trajectory.stop)
                        asking = [episode for episode in ended if not episode.trajectory.stop]
        finally:
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def _decode(self, running: list[Episode]) -> set[Episode]:
        """One token for every running episode; returns those whose turn has ended. Runs once per token, so it
        is plain Python on lists."""
        ids, logps = self.sampler.step([episode.row for episode in running])
        stop_ids, ended = self.chat.stop_ids, set()
        for episode, id, logp in zip(running, ids, logps, strict=True):
            trajectory = episode.trajectory
            trajectory.sample(id, logp)
            if id in stop_ids or (self.stop_strings and self._ends_in_stop_string(episode)):
                ended.add(episode)
            elif len(trajectory.ids) >= episode.limit:
                own = episode.limit - episode.turn_start == self.budget.turn_tokens
                trajectory.stop = "turn_tokens" if own else "tokens"
                episode.turns += 1
                ended.add(episode)
        return ended

    def _ends_in_stop_string(self, episode: Episode) -> bool:
        ids = episode.trajectory.ids
        window = ids[max(episode.turn_start, len(ids) - self.stop_window) :]
        return self.chat.stop_string_hit(window, self.stop_strings) is not None

    def _submit(self, pool, episode: Episode, goal: int | None, advisor: Advisor | None) -> Future:
        if pool is not None:
            return pool.submit(self._between_turns, episode, goal, advisor)
        done: Future = Future()
        start = time.perf_counter()
        done.set_result(self._between_turns(episode, goal, advisor))
        self.wait_s += time.perf_counter() - start  # no row decodes meanwhile
        return done

    def _collect(self, waiting: dict[Future, Episode], running: list[Episode], new: deque[Episode]) -> None:
        """Take in the episodes whose threads are through; waits for one only if no row can decode."""
        if not running and not any(future.done() for future in waiting):
            start = time.perf_counter()
            wait(waiting, return_when=FIRST_COMPLETED)
            self.wait_s += time.perf_counter() - start
        for future in [future for future in waiting if future.done()]:
            episode, ids = waiting.pop(future), future.result()
            if episode.trajectory.stop:
                new.append(episode)
            elif ids is not None:  # else it pauses
                self.sampler.extend(episode.row, ids)
                episode.trajectory.observe(ids)
                self._open_turn(episode)
                running.append(episode)

    def _open_turn(self, episode: Episode) -> None:
        episode.turn_start = len(episode.trajectory.ids)
        episode.limit = min(episode.turn_start + self.budget.turn_tokens, self.budget.total_tokens)

    def _between_turns(self, episode: Episode, goal: int | None, advisor: Advisor | None) -> list[int] | None:
        """The world's side, in a worker thread: act on the turn, then word the answer. Touches nothing but
        this episode. Returns the ids to append, or None if the episode is over or pauses."""
        trajectory = episode.trajectory
        if episode.pending is None:
            self._act(episode)
            if trajectory.stop or (goal is not None and episode.turns >= goal):
                return None
        messages = episode.pending
        if advisor is not None:
            try:
                advice = advisor(episode)
            except Exception as error:
                trajectory.stop = _error("advisor", error)
                return None
            if advice:
                messages = [*messages, Message("user", advice)]
        episode.pending = None
        stopped = trajectory.ids[-1] in self.chat.stop_ids
        ids = self.chat.observe(messages, stopped=stopped, tools=episode.env.tools)
        if len(trajectory.ids) + len(ids) >= self.budget.total_tokens:  # no room to answer it
            trajectory.stop = "tokens"
            return None
        episode.history += messages
        return ids

    def _act(self, episode: Episode) -> None:
        """Parse the model's turn and take it to the world."""
        turn = self.chat.parse(episode.trajectory.ids[episode.turn_start :])
        episode.turns += 1
        episode.calls += len(turn.calls)
        episode.malformed += sum(bool(call.error) for call in turn.calls)
        episode.history.append(Message("assistant", turn.text, turn.calls))
        try:
            messages, done = episode.env.step(turn.text, turn.calls)
        except Exception as error:
            episode.trajectory.stop = _error("step", error)
            return
        if done:
            episode.trajectory.stop = "answer"
        elif episode.turns >= self.budget.turns:
            episode.trajectory.stop = "turns"
        else:
            episode.pending = [self._shorten(episode, message) for message in messages]

    def _shorten(self, episode: Episode, message: Message) -> Message:
        """A tool result cut to observation_tokens, mark included."""
        ids, room = self.chat.encode(message.content), self.budget.observation_tokens
        if len(ids) <= room:
            return message
        episode.cut_results += 1
        mark = CUT_MARK.format(total=len(ids))
        keep = room - len(self.chat.encode(mark))
        while keep > 0:
            text = self.chat.decode(ids[:keep]).rstrip("\ufffd") + mark  # part of a character at the cut
            if len(self.chat.encode(text)) <= room:
                return Message(message.role, text)
            keep -= 1
        return Message(message.role, mark)


def _error(place: str, error: Exception) -> str:
    return f"error: {place}: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
