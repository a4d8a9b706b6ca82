"""One client for every model that another process serves: judge, teacher, drafter or agent.

Speaks the chat completions form of OpenAI, which vLLM, SGLang, llama.cpp, Ollama and most providers have too.
A reply is paid for once: it is stored on disk under a hash of the whole request before anyone sees it, in one
file that appears whole or not at all, so a killed run repeats no reply that it had.

Leaves out: streaming to the caller, images, batch interfaces, and sharing a question that is in flight
between two processes (two threads of one process do share it).
"""

import email.utils
import hashlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httpx
import jsonschema

from envs.base import Call, Message, json_path
from nanoplan.toolcalls import CALL_CLOSE, CALL_OPEN, parse_turn

KEY_VARIABLE = "NANOPLAN_API_KEY"  # environment variable that holds the key
MAX_REPLY_BYTES = 8 * 2**20  # of one HTTP body; ours
MAX_WAIT_S = 60.0  # between two tries, whatever Retry-After asks for; ours
CONNECT_S = 10.0  # to reach the server at all; ours
PROBE_S = 5.0  # for the whole answer to a probe; ours
MAX_BODY_CHARS = 300  # of a server's answer, in an error text; ours
RETRIED = {408, 409, 425, 429}  # client errors that pass; so does every 5xx
NEXT_SEED = 1_000_003  # added to the seed when a refused reply is asked again: the old seed would repeat it
USAGE = ("calls", "cached", "retried", "failed", "prompt_tokens", "completion_tokens", "usd", "seconds")

_jitter = random.Random()  # its own stream: waiting must not move anybody's samples


class EndpointError(Exception):
    """No usable reply: the server refuses the request, or every try failed. The text names URL and cause."""


class _Passing(Exception):
    """A failure that another try may not have; `wait_s` is what the server asked for, or None."""

    def __init__(self, text: str, wait_s: float | None = None):
        super().__init__(text)
        self.wait_s = wait_s


class _Refused(_Passing):
    """The server answered, but not with what was wanted."""


class _Unanswered(_Passing):
    """The server can't be reached, or a connection ended without an answer."""


@dataclass(slots=True)
class Reply:
    text: str  # what the model wrote besides its calls
    calls: list[Call]  # in order; a malformed one has its error set
    prompt_tokens: int  # as the server counts them; 0 where it doesn't say
    completion_tokens: int  # the same
    cached: bool  # from disk, or from another thread that asked the same
    seconds: float  # that the server took; 0.0 if cached
    stop: str  # finish_reason: stop | length | tool_calls | ...; "" where the server doesn't say


class ChatModel(Protocol):
    """What can be asked: an Endpoint, or a model of this process (local.Local)."""

    model: str  # its name

    @property
    def usage(self) -> dict[str, float]: ...
    def probe(self) -> None: ...
    def chat(self, messages: list[dict], **options) -> Reply: ...
    def chat_many(self, conversations: list[list[dict]], **options) -> list[Reply | EndpointError]: ...


class Endpoint:
    """One model on one server; thread-safe.

    url          base, such as http://127.0.0.1:8000/v1
    model        name that the server knows it by
    key          bearer token; empty: NANOPLAN_API_KEY, or none. Never stored, printed or hashed
    cache        folder of replies; None: every question is asked and paid
    concurrency  requests in flight at once
    timeout_s    of one try, until its last byte
    retries      tries after the first, on 429, 5xx, timeouts, lost connections and broken or refused replies;
                 a server that left all tries of a question unanswered gets one a question until it answers
    price_in, price_out  US dollars per million tokens of prompt and completion, for `usage`
    extra        more fields of the request's body, such as {"reasoning_effort": "none"} or
                 {"chat_template_kwargs": {"enable_thinking": False}}; None as a value takes a field out
    send_schema  False: a `schema` is checked here but not sent, for servers that refuse response_format
    backoff_s    longest wait before the second try; it doubles with each try, up to MAX_WAIT_S
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str = "",
        cache: str | Path | None = None,
        concurrency: int = 8,
        timeout_s: float = 120.0,
        retries: int = 6,
        price_in: float = 0.0,
        price_out: float = 0.0,
        extra: dict | None = None,
        send_schema: bool = True,
        backoff_s: float = 1.0,
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"url={url!r}; wanted a base such as http://127.0.0.1:8000/v1")
        if parts.username or parts.password:
            raise ValueError(f"the url of {parts.hostname} holds a password; put the key into {KEY_VARIABLE}")
        if not model:
            raise ValueError(f"no model named for {url}; give the name that the server knows it by")
        if concurrency < 1 or retries < 0 or not timeout_s > 0:
            raise ValueError(
                f"concurrency={concurrency}, retries={retries}, timeout_s={timeout_s}: wanted at least 1, 0 "
                "and more than 0"
            )
        self.url, self.model = url.rstrip("/").removesuffix("/chat/completions"), model
        self.cache = None if cache is None else Path(cache)
        self.concurrency, self.timeout_s, self.retries = concurrency, timeout_s, retries
        self.prices = (price_in / 1e6, price_out / 1e6)  # US dollars per token
        self.extra, self.send_schema, self.backoff_s = extra or {}, send_schema, backoff_s
        self._key = key or os.environ.get(KEY_VARIABLE, "")
        self._slots = threading.BoundedSemaphore(concurrency)
        self._lock = threading.Lock()  # of _usage and _asking
        self._usage: dict[str, float] = dict.fromkeys(USAGE, 0)
        self._asking: dict[str, Future] = {}  # cache key -> the response that a thread is getting
        self._down = False  # the last question went unanswered
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._http = httpx.Client(
            headers={**headers, "Content-Type": "application/json"},
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s), pool=None),
            verify=parts.scheme == "https",  # loading certificates takes 0.1 s; redirects are not followed
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )

    @property
    def usage(self) -> dict[str, float]:
        """What was used so far: `calls` requests sent, of which `retried` were repeats; `cached` replies that
        cost nothing; `failed` questions without a reply; tokens and `usd` of every answer that came, refused
        ones included; `seconds` spent waiting for the server, summed over requests."""
        with self._lock:
            return dict(self._usage)

    def probe(self) -> None:
        """Ask the server for its models, once. Raises EndpointError within seconds, naming the URL, where it
        can't be reached, is not up, or refuses the key."""
        url = f"{self.url}/models"
        try:
            response = self._http.get(url, timeout=PROBE_S)
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise EndpointError(f"{url} can't be reached: {_cause(error)}") from None
        if response.status_code in (401, 403) or response.status_code >= 500:
            raise EndpointError(self._describe(url, response.status_code, response.content))

    def chat(
        self,
        messages: list[dict],
        *,
        tools: list[dict] | None = None,
        temperature: float = 1.0,
        max_tokens: int = 1024,
        seed: int | None = None,
        schema: dict | None = None,
        check: Callable[[Reply], None] | None = None,
    ) -> Reply:
        """One reply. Blocks; call it from many threads.

        messages  in OpenAI's form, see `to_openai`
        tools     in OpenAI's form, see Tool.schema
        seed      index of the sample: the same question with another seed is another question
        schema    of a JSON reply; sent as response_format, and what does not match it is refused
        check     raises ValueError for a reply that is of no use; it is then asked again, and never stored
        raises    EndpointError: the server refuses the request, or every try failed
        """
        body = {"model": self.model, "messages": messages, "temperature": temperature}
        body |= {"max_tokens": max_tokens} | ({"tools": tools} if tools else {})
        body |= {} if seed is None else {"seed": seed}
        if schema is not None and self.send_schema:
            named = {"name": "reply", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        body = {name: value for name, value in (body | self.extra).items() if value is not None}

        def read(response: dict, *, cached: bool, seconds: float) -> Reply:
            reply = read_reply(response, tools=bool(tools), cached=cached, seconds=seconds)
            return accept(reply, schema, check)

        if self.cache is None:
            return self._ask(body, read)[0]
        request = {"url": self.url, "body": body, "schema": schema}
        text = json.dumps(request, sort_keys=True, allow_nan=False)
        return self._ask_once(hashlib.sha256(text.encode()).hexdigest(), request, read)

    def chat_many(
        self, conversations: list[list[dict]], *, seeds: list[int] | None = None, **options
    ) -> list[Reply | EndpointError]:
        """`chat` for each of them with the same options, `concurrency` at once; one that fails has its error
        in the place of its reply."""

        def one(messages: list[dict], seed: int | None) -> Reply | EndpointError:
            try:
                return self.chat(messages, seed=seed, **options)
            except EndpointError as error:
                return error

        seeds = [None] * len(conversations) if seeds is None else seeds
        if len(seeds) != len(conversations):
            raise ValueError(f"{len(seeds)} seeds for {len(conversations)} conversations; give one for each")
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(one, conversations, seeds))

    def _ask_once(self, key: str, request: dict, read) -> Reply:
        """The stored reply; else that of a thread that asks the same now; else ask, and store it."""
        while True:
            with self._lock:
                other = self._asking.get(key)
                if other is None:
                    mine = self._asking[key] = Future()
            if other is None:
                break
            try:
                reply = read(other.result(), cached=True, seconds=0.0)
            except ValueError:
                continue  # good enough for the other's check, not for this one
            self._count(cached=1)
            return reply
        try:
            path = self.cache / key[:2] / f"{key}.json"
            response = _stored(path)
            reply = None
            if response is not None:
                try:
                    reply = read(response, cached=True, seconds=0.0)
                    self._count(cached=1)
                except ValueError:
                    pass  # refused by a check that is newer than the file: ask again, replace it
            if reply is None:
                reply, response = self._ask(request["body"], read)
                _store(path, {"request": request, "response": response})
            mine.set_result(response)
            return reply
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._asking[key]

    def _ask(self, body: dict, read) -> tuple[Reply, dict]:
        """Try until a reply passes `read`. Returns it and the server's JSON."""
        body, tries = dict(body), 0
        while True:
            tries += 1
            try:
                return self._try(body, read)
            except _Passing as failure:
                last = failure
            except EndpointError:
                self._count(failed=1)
                raise
            if tries > self.retries or self._down:
                break
            self._count(retried=1)
            if isinstance(last, _Refused) and "seed" in body:
                body["seed"] += NEXT_SEED
            time.sleep(self._pause(tries, last.wait_s))
        self._down = isinstance(last, _Unanswered)
        self._count(failed=1)
        raise EndpointError(f"{last} (tries: {tries})")

    def _pause(self, tries: int, wait_s: float | None) -> float:
        """Seconds before try `tries` + 1: what the server asked for and a little more, so that threads don't
        all come back at once, else anything up to the doubled limit (full jitter)."""
        if wait_s is not None:
            return min(wait_s, MAX_WAIT_S) + _jitter.uniform(0, self.backoff_s / 2)
        return _jitter.uniform(0, min(MAX_WAIT_S, self.backoff_s * 2 ** (tries - 1)))

    def _try(self, body: dict, read) -> tuple[Reply, dict]:
        """Send once. Raises _Passing for what may pass, EndpointError for what won't."""
        url = f"{self.url}/chat/completions"
        with self._slots:
            start = time.monotonic()
            try:
                status, headers, content = self._send(url, json.dumps(body, allow_nan=False).encode())
            except (httpx.TransportError, httpx.DecodingError) as error:
                raise _Unanswered(f"{url}: {_cause(error)}") from None
            finally:
                seconds = time.monotonic() - start
                self._count(calls=1, seconds=seconds)
        self._down = False
        if status != 200:
            text = self._describe(url, status, content)
            if status in RETRIED or status >= 500:
                raise _Passing(text, retry_after(headers.get("Retry-After", "")))
            raise EndpointError(text)
        try:
            response = _read_json(content)
            prompt, completion = _tokens(response)
            usd = prompt * self.prices[0] + completion * self.prices[1]
            self._count(prompt_tokens=prompt, completion_tokens=completion, usd=usd)
            return read(response, cached=False, seconds=seconds), response
        except ValueError as error:
            raise _Refused(f"{url}: {error}; it{self._describe('', status, content)}") from None

    def _send(self, url: str, content: bytes) -> tuple[int, httpx.Headers, bytes]:
        """Status, headers and body of one POST, the body read no further than it may be."""
        deadline, parts, size = time.monotonic() + self.timeout_s, [], 0
        with self._http.stream("POST", url, content=content) as response:
            for part in response.iter_bytes():
                parts.append(part)
                size += len(part)
                if size > MAX_REPLY_BYTES:
                    raise httpx.ReadError(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"no end of the reply after {self.timeout_s:g} s")
            return response.status_code, response.headers, b"".join(parts)

    def _describe(self, url: str, status: int, content: bytes) -> str:
        """URL, status and how the body begins, without the key that some servers repeat."""
        text = " ".join(content[: 4 * MAX_BODY_CHARS].decode("utf-8", "replace").split())
        text = text.replace(self._key, "***") if self._key else text
        return f"{url} answered {status}: {text[:MAX_BODY_CHARS] or '(empty)'}"

    def _count(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._usage[name] += amount


def read_reply(response: dict, *, tools: bool, cached: bool = False, seconds: float = 0.0) -> Reply:
    """The reply in a server's JSON. Calls are read as strictly as a local model's; a malformed one is data.

    tools   whether tools were offered: a server without a call parser leaves the calls in the text
    raises  ValueError: no choices[0].message, content that is no text, or neither text nor calls
    """
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        raise ValueError("no choices[0].message in it")
    text, listed = message.get("content"), message.get("tool_calls")
    text = "" if text is None else text
    if not isinstance(text, str):
        raise ValueError(f"its content is a {type(text).__name__}, wanted text")
    calls = [_read_call(item) for item in listed] if isinstance(listed, list) else []
    if tools and not calls:
        turn = parse_turn(text)
        text, calls = turn.text, turn.calls
    stop = choice.get("finish_reason")
    if not text.strip() and not calls:
        raise ValueError(f"an empty reply, finish_reason {stop!r}")
    return Reply(text, calls, *_tokens(response), cached, seconds, stop if isinstance(stop, str) else "")


def _read_call(item: object) -> Call:
    """One entry of tool_calls, through the one parser of calls."""
    function = item.get("function") if isinstance(item, dict) else None
    function = function if isinstance(function, dict) else {}
    named = {name: function.get(name) for name in ("name", "arguments")}
    return parse_turn(f"{CALL_OPEN}{json.dumps(named)}{CALL_CLOSE}").calls[0]


def _tokens(response: dict) -> tuple[int, int]:
    """Tokens of prompt and completion as the server counts them, 0 where it doesn't."""
    usage = response.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (n if type(n) is int and n >= 0 else 0 for n in counts)
    return prompt, completion


def to_openai(messages: list[Message]) -> list[dict]:
    """Messages in OpenAI's form. Calls get ids, which the tool messages after them take up in order; a
    malformed call keeps its place, with what could be read of it, so that its answer has one to refer to.

    raises  ValueError for a tool message that answers no call
    """
    entries, open_ids, num_calls = [], [], 0
    for message in messages:
        entry: dict = {"role": message.role, "content": message.content}
        if message.role == "tool":
            if not open_ids:
                raise ValueError(f"the tool message {message.content[:60]!r} answers no call")
            entry["tool_call_id"] = open_ids.pop(0)
        elif message.calls:
            open_ids = [f"call_{num_calls + i}" for i in range(len(message.calls))]
            num_calls += len(open_ids)
            entry["content"] = message.content or None
            entry["tool_calls"] = [
                {"id": id, "type": "function", "function": _function(call)}
                for id, call in zip(open_ids, message.calls, strict=True)
            ]
        entries.append(entry)
    return entries


def _function(call: Call) -> dict:
    name = re.sub(r"[^A-Za-z0-9_-]", "_", call.name) or "unknown" if call.error else call.name
    return {"name": name, "arguments": json.dumps(call.arguments)}


def retry_after(value: str) -> float | None:
    """Seconds that a Retry-After header asks to wait: a number, or the time until an HTTP date (0 for one in
    the past). None where there is none or it can't be read."""
    if re.fullmatch(r"\d{1,9}(\.\d*)?", value.strip()):
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return None
    date = date if date.tzinfo else date.replace(tzinfo=timezone.utc)
    return max(0.0, (date - datetime.now(timezone.utc)).total_seconds())


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _read_json(content: bytes) -> dict:
    """The object in a body. Raises ValueError if it is none."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def accept(reply: Reply, schema: dict | None, check: Callable[[Reply], None] | None) -> Reply:
    """The reply, as bare JSON where a schema is given. Raises ValueError where schema or check refuses it."""
    if schema is not None:
        reply.text = bare(reply.text)
        check_schema(reply.text, schema)
    if check is not None:
        check(reply)
    return reply


def check_schema(text: str, schema: dict) -> None:
    """Raises ValueError where `text` is no JSON document of the schema."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        error = next(jsonschema.Draft202012Validator(schema).iter_errors(value), None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if error is not None:
        raise ValueError(f"{json_path(error)}{error.message}"[:MAX_BODY_CHARS])


def bare(text: str) -> str:
    """A reply without its thoughts, and without a Markdown fence around all the rest."""
    text = text.rpartition("</think>")[2] if text.lstrip().startswith("<think>") else text
    fenced = re.fullmatch(r"\s*```[a-zA-Z]*\n(.*)\n```\s*", text, re.DOTALL)
    return fenced.group(1) if fenced else text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _stored(path: Path) -> dict | None:
    """The server's JSON in a file of the cache; None where there is none."""
    try:
        return dict(json.loads(path.read_bytes())["response"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no stored reply ({error}); delete it, it will be asked again") from None


def _store(path: Path, entry: dict) -> None:
    """Write a file of the cache so that no reader, and no run after a crash, finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    with open(temp, "w", encoding="utf-8") as file:
        json.dump(entry, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp, path)
