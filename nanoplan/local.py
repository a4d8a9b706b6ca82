"""A model folder behind the surface of llm.Endpoint: whatever asks an endpoint can ask a local model.

Judges, rerankers, drafters and teachers of a run without a server. Conversations are decoded together, each
with its own seed, so that a reply does not depend on its neighbours. Leaves out: a disk cache (a local reply
costs no money), JSON enforced while decoding (a schema is checked afterwards, as with an endpoint).
"""

import json
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from envs.base import Call, Message, Tool
from nanoplan import weights
from nanoplan.llm import (
    NEXT_SEED,
    USAGE,
    ChatModel,
    Endpoint,
    EndpointError,
    Reply,
    accept,
    read_reply,
)
from nanoplan.sampler import Sampler


@dataclass(slots=True, eq=False)
class _Asked:
    """One conversation on its way to a reply."""

    index: int  # among those of the call
    ids: list[int]  # prompt
    seed: int
    tries: int = 0
    row: int = -1  # of the sampler
    said: list[int] | None = None  # sampled so far


class Local:
    """One model of this process; its methods are Endpoint's. Threads take turns; `chat_many` is a batch.

    folder   HF folder or hub name
    rows     conversations decoded at once
    max_len  tokens of one, prompt and reply; a reply ends there, whatever max_tokens says
    retries  tries after the first, for replies that the schema or `check` refuses; a greedy one is not
             repeated, since it would be the same
    begin    what every reply is made to begin with, such as "{": keeps a model that thinks from thinking
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        rows: int = 16,
        max_len: int = 4096,
        retries: int = 2,
        begin: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ):
        device = torch.device(device)
        dtype = weights.dtype_named("auto", device) if dtype is None else dtype
        self.chat_format, self.weights = weights.load_policy(folder, dtype=dtype, device=device)
        self.weights.requires_grad_(False)
        self.model = self.chat_format.folder.name
        self.rows, self.max_len, self.retries = rows, min(max_len, self.weights.config.max_positions), retries
        self.begin = begin
        self._begin_ids = self.chat_format.encode(begin)
        self._sampler: Sampler | None = None  # of the temperature that was last asked for
        self._lock = threading.Lock()
        self._usage: dict[str, float] = dict.fromkeys(USAGE, 0)

    @property
    def usage(self) -> dict[str, float]:
        """As of an endpoint: `calls` replies sampled, of which `retried` repeats; no money."""
        return dict(self._usage)

    def probe(self) -> None:
        """Nothing to reach: the model is loaded."""

    def chat(self, messages: list[dict], *, seed: int | None = None, **options) -> Reply:
        """One reply, as Endpoint.chat. Raises EndpointError where there is none."""
        (reply,) = self.chat_many([messages], seeds=[seed or 0], **options)
        if isinstance(reply, EndpointError):
            raise reply
        return reply

    @torch.no_grad()
    def chat_many(
        self,
        conversations: list[list[dict]],
        *,
        seeds: list[int] | None = None,
        tools: list[dict] | None = None,
        temperature: float = 1.0,
        max_tokens: int = 1024,
        schema: dict | None = None,
        check=None,
    ) -> list[Reply | EndpointError]:
        """A reply for each conversation, or the error in its place; options as of Endpoint.chat. Without
        seeds the index of a conversation is its seed."""
        offered = [Tool(**function["function"]) for function in tools or []]
        seeds = list(range(len(conversations))) if seeds is None else seeds
        with self._lock:
            start, done = time.monotonic(), {}
            asked = deque(
                _Asked(index, self._prompt(messages, offered), seed)
                for index, (messages, seed) in enumerate(zip(conversations, seeds, strict=True))
            )

            def read(one: _Asked) -> Reply:
                reply = self._reply(one, tools=bool(offered), seconds=time.monotonic() - start)
                return accept(reply, schema, check)

            self._drive(asked, done, read, temperature, max_tokens)
            self._usage["seconds"] += time.monotonic() - start
            return [done[index] for index in range(len(conversations))]

    def _prompt(self, messages: list[dict], tools: list[Tool]) -> list[int]:
        return self.chat_format.open(from_openai(messages), tools) + self._begin_ids

    def _drive(self, asked: deque, done: dict, read, temperature: float, max_tokens: int) -> None:
        """Decode until every conversation is in `done`: rows are filled as they become free."""
        sampler, going = self._sampler_at(temperature), []
        try:
            while asked or going:
                while asked and sampler.free:
                    one = asked.popleft()
                    if len(one.ids) >= self.max_len:
                        text = f"{self.model}: a prompt of {len(one.ids)} tokens leaves no room in max_len"
                        done[one.index] = self._give_up(f"{text}={self.max_len}")
                        continue
                    one.row, one.said = sampler.open(one.ids, seed=one.seed), []
                    going.append(one)
                ids, _ = sampler.step([one.row for one in going]) if going else ([], [])
                for one, id in zip(list(going), ids, strict=True):
                    one.said.append(id)
                    full = len(one.said) == min(max_tokens, self.max_len - len(one.ids))
                    if full or id in self.chat_format.stop_ids:
                        sampler.close(one.row)
                        going.remove(one)
                        self._finish(one, asked, done, read, repeat=temperature > 0)
        finally:
            for one in going:
                sampler.close(one.row)

    def _finish(self, one: _Asked, asked: deque, done: dict, read, *, repeat: bool) -> None:
        """Take a reply that has ended; one that is refused goes back to `asked` with another seed."""
        one.tries += 1
        self._usage["calls"] += 1
        self._usage["prompt_tokens"] += len(one.ids)
        self._usage["completion_tokens"] += len(one.said)
        try:
            done[one.index] = read(one)
            return
        except ValueError as error:
            text = f"{self.model} said {self.chat_format.decode(one.said)[:120]!r}: {error}"
        if repeat and one.tries <= self.retries:
            self._usage["retried"] += 1
            one.seed += NEXT_SEED
            asked.append(one)
        else:
            done[one.index] = self._give_up(f"{text} (tries: {one.tries})")

    def _give_up(self, text: str) -> EndpointError:
        self._usage["failed"] += 1
        return EndpointError(text)

    def _reply(self, one: _Asked, *, tools: bool, seconds: float) -> Reply:
        ended = one.said[-1] in self.chat_format.stop_ids
        text = self.chat_format.decode(self._begin_ids + (one.said[:-1] if ended else one.said))
        choice = {"message": {"content": text}, "finish_reason": "stop" if ended else "length"}
        counts = {"prompt_tokens": len(one.ids), "completion_tokens": len(one.said)}
        return read_reply({"choices": [choice], "usage": counts}, tools=tools, seconds=seconds)

    def _sampler_at(self, temperature: float) -> Sampler:
        """The cache is allocated at the first use, and again for another temperature."""
        if self._sampler is None or self._sampler.filters["temperature"] != temperature:
            self._sampler = None  # its memory first
            self._sampler = Sampler(
                self.weights, rows=self.rows, max_len=self.max_len, temperature=temperature, training=False
            )
        return self._sampler


def from_openai(messages: list[dict]) -> list[Message]:
    """The inverse of llm.to_openai. Raises ValueError for what has no place in a Message."""
    found = []
    for entry in messages:
        content = entry.get("content") or ""
        if not isinstance(content, str):
            raise ValueError(f"content={str(content)[:60]!r}; a local model reads text only")
        calls = []
        for item in entry.get("tool_calls") or []:
            function = item["function"]
            calls.append(Call(function["name"], json.loads(function["arguments"])))
        found.append(Message(entry["role"], content, calls))
    return found


ENDPOINT_OPTIONS = {
    "concurrency": int, "timeout_s": float, "retries": int, "price_in": float, "price_out": float,
    "extra": json.loads, "send_schema": json.loads,
}  # fmt: skip
LOCAL_OPTIONS = {"rows": int, "max_len": int, "retries": int, "begin": str}


def open_model(
    text: str, *, cache: str | Path | None = None, device: torch.device | str = "cpu"
) -> ChatModel:
    """The model that a flag names: http://host/v1#model or local:FOLDER, and options as in a web address,
    http://host/v1#model?concurrency=16&extra={"reasoning_effort":"none"}.

    cache   folder of an endpoint's replies; many models and runs may share it
    device  of a local model
    raises  ValueError for another form, an unknown option or a value that does not fit
    """
    address, _, query = text.partition("?")
    if address.startswith("local:"):
        options = read_options(query, LOCAL_OPTIONS, where=text)
        return Local(address.removeprefix("local:"), device=device, **options)
    url, _, model = address.partition("#")
    if not url.startswith(("http://", "https://")) or not model:
        raise ValueError(f"{text!r} names no model; wanted http://host/v1#model or local:FOLDER")
    return Endpoint(url, model, cache=cache, **read_options(query, ENDPOINT_OPTIONS, where=text))


def read_options(query: str, known: dict, *, where: str) -> dict:
    """{name: value} of "name=value&name=value". Raises ValueError for what `known` does not have or read."""
    options = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name not in known:
            raise ValueError(f"{where}: unknown option {name!r}; known: {', '.join(known)}")
        try:
            options[name] = known[name](value)
        except ValueError:
            raise ValueError(f"{where}: {name}={value!r} can't be read as {known[name].__name__}") from None
    return options
