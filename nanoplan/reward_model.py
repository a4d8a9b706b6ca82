"""A reward model as a judge: a sequence-classification folder that gives a plan one number.

Reads one plan at a time, so the order of two plans means nothing to it. Leaves out: training one (its pairs
need the benchmark's plans), models whose head is not one linear layer called `score`.
"""

from pathlib import Path

import torch

from envs.base import Message, PlanView
from nanoplan import weights
from nanoplan.chat import Chat
from nanoplan.judge import Judged, Question, attempt, by_scores, compare_apart
from nanoplan.model import Packed
from nanoplan.tokens import Tokens, read_json

BATCH_TOKENS = 16384  # of one packed forward; ours


class RewardModel:
    """score(request, plan) = w · h, with h the trunk's state at the last token that is no padding.

    folder   HF folder or hub name: trunk, `score.weight` (1, D), tokenizer. With a chat template the request
             is a user's message and the plan the answer to it, closing tokens included; without one the two
             texts are joined by an empty line
    max_len  tokens of one text; a longer one is an error, not cut: its end is what is scored
    """

    kind, family = "rm", "reward model"

    def __init__(
        self,
        folder: str | Path,
        *,
        max_len: int = 4096,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ):
        device = torch.device(device)
        dtype = weights.dtype_named("auto", device) if dtype is None else dtype
        folder = weights.fetch(folder)
        self.name = f"rm:{folder.name}"
        self.model = weights.load_scorer(folder, dtype=dtype, device=device).requires_grad_(False)
        self.max_len = min(max_len, self.model.config.max_positions)
        self.device = device
        self.pad_id = read_json(folder / "config.json").get("pad_token_id")
        templates = any(folder.glob("chat_template*")), read_json(folder / "tokenizer_config.json")
        self._chat = Chat(folder) if templates[0] or "chat_template" in templates[1] else None
        self._tokens = Tokens(folder) if self._chat is None else None

    def ids(self, view: PlanView) -> list[int]:
        """What the model reads. Raises ValueError for a text that is too long."""
        if self._chat is None:
            found = self._tokens.encode(f"{view.request}\n\n{view.text}")
        else:
            talk = [Message("user", view.request or "Plan a trip."), Message("assistant", view.text)]
            found = self._chat.open(talk, prompt=False)
        if not 0 < len(found) <= self.max_len:
            raise ValueError(f"a plan of {len(found)} tokens; {self.name} reads 1 to {self.max_len}")
        return found

    def score(self, view: PlanView) -> float:
        """The model's number for a plan, any real one; higher is better."""
        (score,) = self.score_many([view])
        if isinstance(score, Exception):
            raise score
        return score

    def score_many(self, views: list[PlanView]) -> list[float | Exception]:
        """Scores of many plans in packed batches, each text once; an error in the place of a score."""
        texts = dict.fromkeys((view.request, view.text) for view in views)
        inputs = {text: attempt(self.ids, PlanView(text[1], {}, text[0])) for text in texts}
        waiting = [(text, ids) for text, ids in inputs.items() if not isinstance(ids, Exception)]
        scores: dict[tuple, float | Exception] = dict(inputs)
        while waiting:
            batch, size = [], 0
            while waiting and (not batch or size + len(waiting[-1][1]) <= BATCH_TOKENS):
                batch.append(waiting.pop())
                size += len(batch[-1][1])
            values = self._forward([ids for _, ids in batch])
            scores |= {text: value for (text, _), value in zip(batch, values, strict=True)}
        return [scores[view.request, view.text] for view in views]

    @torch.no_grad()
    def _forward(self, sequences: list[list[int]]) -> list[float]:
        lengths = torch.tensor([len(ids) for ids in sequences])
        ends = lengths.cumsum(0)
        starts = ends - lengths
        ids = torch.tensor([id for ids in sequences for id in ids])  # (T,)
        positions = torch.cat([torch.arange(n) for n in lengths.tolist()])  # (T,)
        scored = [self._last(ids) for ids in sequences]  # of each sequence, from its start
        rows = starts + torch.tensor(scored)  # (S,)
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32)
        attend = Packed(cu_seqlens.to(self.device), int(lengths.max()))
        values = self.model(
            ids.to(self.device), positions.to(self.device), attend, rows=rows.to(self.device)
        )  # (S, 1) fp32
        return values[:, 0].tolist()

    def _last(self, ids: list[int]) -> int:
        """Index of the last token that is no padding, as transformers picks it."""
        return next((i for i in range(len(ids) - 1, -1, -1) if ids[i] != self.pad_id), 0)

    def compare(self, plan: PlanView, reference: PlanView, *, swap: bool) -> str:
        """ "win" iff the plan's score is strictly higher; `swap` changes nothing here."""
        own, other = self.score(plan), self.score(reference)
        return by_scores(own, other).outcome

    def compare_many(self, questions: list[Question]) -> list[Judged]:
        return compare_apart(self.score_many, questions)
