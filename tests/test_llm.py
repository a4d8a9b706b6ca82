"""The HTTP client against a real server on a local port: faults, the cache, concurrency, calls, money."""

import email.utils
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envs.base import Call, Message, Tool
from nanoplan.llm import MAX_REPLY_BYTES, Endpoint, EndpointError, read_reply, retry_after, to_openai
from tests.llm_server import COMPLETION_TOKENS, PROMPT_TOKENS, Fault, LLMServer, call, say

ASK = [{"role": "user", "content": "hi"}]
TOOLS = [Tool("add", "Add.", {"type": "object", "properties": {"n": {"type": "integer"}}}).schema()]
SCORE = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}


def endpoint(server, **options) -> Endpoint:
    return Endpoint(server.url, "m", **{"backoff_s": 0.01, "timeout_s": 5.0, "retries": 3} | options)


def test_the_request_and_the_reply():
    # Catches: a field that is sent under another name, left out, or sent as null; a key in the wrong place.
    with LLMServer(lambda body: say("hello")) as server:
        client = endpoint(server, key="sk-secret", extra={"reasoning_effort": "none", "top_p": None})
        reply = client.chat(ASK, temperature=0.5, max_tokens=7, seed=3, tools=TOOLS, schema=None)
    assert server.bodies == [
        {"model": "m", "messages": ASK, "temperature": 0.5, "max_tokens": 7, "seed": 3, "tools": TOOLS}
        | {"reasoning_effort": "none"}
    ]
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    assert (reply.text, reply.calls, reply.stop, reply.cached) == ("hello", [], "stop", False)
    assert (reply.prompt_tokens, reply.completion_tokens) == (PROMPT_TOKENS, COMPLETION_TOKENS)
    assert 0 < reply.seconds < 5


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(tmp_path, monkeypatch):
    # Catches: a key in the cache, in an error text (servers repeat it), or a changed key that asks all again.
    monkeypatch.setenv("NANOPLAN_API_KEY", "sk-env")
    with LLMServer(script=["a", Fault(401, body=b"bad key sk-env, get another")]) as server:
        endpoint(server, cache=tmp_path).chat(ASK)
        assert server.headers[0]["Authorization"] == "Bearer sk-env"
        assert endpoint(server, cache=tmp_path, key="sk-other").chat(ASK).cached
        with pytest.raises(EndpointError) as refused:
            endpoint(server).chat(ASK)
    assert "bad key ***, get another" in str(refused.value)
    assert not any(b"sk-" in path.read_bytes() for path in tmp_path.rglob("*.json"))


FAULTS = {
    "429": Fault(429, {"Retry-After": "0"}),
    "429 date": Fault(429, {"Retry-After": email.utils.formatdate(usegmt=True)}),
    "429 nonsense": Fault(429, {"Retry-After": "soon"}),
    "500": Fault(500),
    "502": Fault(502, body=b"<html>Bad Gateway</html>"),
    "503": Fault(503, body=b""),
    "hang": Fault(hang=True),
    "drip": Fault(drip=True),
    "reset": Fault(reset=True),
    "empty": Fault(200, body=b""),
    "broken json": Fault(200, body=b'{"choices": [{"mess'),
    "not json": Fault(200, body=b"\xff\xfe all is well"),
    "deep": Fault(200, body=b'{"choices":' + b"[" * 100_000),
    "an error inside": Fault(200, body=b'{"error": {"message": "overloaded"}}'),
    "no choices": Fault(200, body=b'{"choices": []}'),
    "no text": say(None),
    "blank text": say(" \n"),
    "a list for content": say([{"type": "text", "text": "hi"}]),
    "too large": Fault(200, body=b" " * (MAX_REPLY_BYTES + 1)),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_what_passes_is_tried_again(fault):
    # Catches: one bad moment of a server that ends a comparison, or a run.
    with LLMServer(lambda body: "good", script=[fault]) as server:
        client = endpoint(server, timeout_s=0.5)
        assert client.chat(ASK).text == "good"
        assert len(server.bodies) == 2
    usage = client.usage
    assert (usage["calls"], usage["retried"], usage["failed"], usage["cached"]) == (2, 1, 0, 0)


def test_a_slow_answer_is_waited_for():
    # Catches: a time limit that is one for connecting only, or one that is always too short.
    with LLMServer(lambda body: Fault(200, body=json.dumps(say("slow")).encode(), delay_s=0.3)) as server:
        assert endpoint(server, timeout_s=5).chat(ASK).seconds > 0.3
        start = time.monotonic()
        with pytest.raises(EndpointError, match=r"ReadTimeout.*\(tries: 2\)"):
            endpoint(server, timeout_s=0.1, retries=1).chat(ASK)
        assert time.monotonic() - start < 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 302])
def test_what_does_not_pass_is_not_tried_again(status):
    # Catches: six retries with growing waits on a wrong model name; an error that does not say where and why.
    with LLMServer(script=[Fault(status, body=b'{"error": "no model m,\n sorry"}' + b"x" * 9999)]) as server:
        client = endpoint(server)
        with pytest.raises(EndpointError) as refused:
            client.chat(ASK)
        assert len(server.bodies) == 1
    text = str(refused.value)
    assert server.url in text and f"answered {status}" in text and "no model m, sorry" in text
    assert len(text) < 500
    assert client.usage["failed"] == 1 and client.usage["retried"] == 0


def test_giving_up_says_what_went_wrong():
    # Catches: endless retries; an error text without the last cause; a reply made up.
    with LLMServer(lambda body: Fault(500, body=b"disk full")) as server:
        client = endpoint(server, retries=2)
        with pytest.raises(EndpointError, match=r"answered 500: disk full \(tries: 3\)"):
            client.chat(ASK)
        assert len(server.bodies) == 3
    assert client.usage["calls"] == 3 and client.usage["retried"] == 2 and client.usage["failed"] == 1
    with pytest.raises(
        EndpointError, match=r"127.0.0.1.*(ConnectError|RemoteProtocolError|ReadError)"
    ):  # the server is gone now
        client.chat(ASK)


def test_a_dead_server_costs_the_full_wait_once():
    # Catches: a judge that dies in the middle of a run, and every comparison after that waiting for a minute.
    with LLMServer(lambda body: "back", script=[Fault(reset=True)] * 6) as server:
        client = endpoint(server, retries=3)
        for tries in (4, 1, 1):
            before = len(server.bodies)
            with pytest.raises(EndpointError, match=rf"\(tries: {tries}\)"):
                client.chat(ASK)
            assert len(server.bodies) - before == tries
        assert client.chat(ASK).text == "back"
        server.script = [Fault(reset=True)] * 2
        assert client.chat(ASK).text == "back"  # it has answered, so it is tried again
        server.script = [Fault(429, {"Retry-After": "0"})] * 5
        with pytest.raises(EndpointError, match="429"):
            client.chat(ASK)
        assert client.chat(ASK).text == "back"  # busy is not dead


def test_many_at_once_keep_their_places():
    # Catches: replies in the order of arrival; one failure that loses its neighbours.
    def answer(body):
        n = body["seed"]
        time.sleep(0.05 * (3 - n))
        return Fault(400) if n == 1 else body["messages"][0]["content"] + str(n)

    with LLMServer(answer) as server:
        client = endpoint(server, concurrency=2)
        asked = [[{"role": "user", "content": text}] for text in "abcd"]
        replies = client.chat_many(asked, seeds=[0, 1, 2, 3], temperature=0.0)
        assert isinstance(replies[1], EndpointError) and server.in_flight == 2
        assert [reply.text for i, reply in enumerate(replies) if i != 1] == ["a0", "c2", "d3"]
        assert {body["temperature"] for body in server.bodies} == {0.0}
        assert client.chat_many([]) == []
        with pytest.raises(ValueError, match="1 seeds for 2 conversations"):
            client.chat_many([ASK, ASK], seeds=[0])


def test_retry_after():
    # Catches: HTTP dates read as numbers, waits of a day, and threads that all come back in the same moment.
    assert retry_after("7") == 7.0 and retry_after(" 0.5 ") == 0.5
    assert retry_after("") is None and retry_after("soon") is None and retry_after("-3") is None
    in_a_minute = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert 57 < retry_after(in_a_minute) <= 60
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after("Wed, 21 Oct 2015 07:28:00 -0000") == 0.0  # a date without a zone
    client = Endpoint("http://127.0.0.1:9/v1", "m", backoff_s=1.0)
    asked = [client._pause(1, 86400.0) for _ in range(50)]
    assert 60 <= min(asked) and max(asked) <= 60.5 and len(set(asked)) == 50
    for tries, most in ((1, 1), (2, 2), (4, 8), (9, 60), (1000, 60)):
        drawn = [client._pause(tries, None) for _ in range(200)]
        assert 0 <= min(drawn) < 0.2 * most and 0.8 * most < max(drawn) <= most


def test_the_server_decides_how_long_to_wait():
    # Catches: Retry-After that is read and not heeded.
    with LLMServer(script=[Fault(429, {"Retry-After": "1"}), "b"]) as server:
        start = time.monotonic()
        endpoint(server).chat(ASK)
        assert time.monotonic() - start >= 1.0


def test_a_refused_reply_is_asked_again_and_never_stored(tmp_path):
    # Catches: a broken judgement in the cache, which every rerun meets; the same seed, which repeats it.
    def check(reply):
        if reply.text != "good":
            raise ValueError(f"wanted good, not {reply.text}")

    with LLMServer(script=["bad", "worse", "good"]) as server:
        client = endpoint(server, cache=tmp_path)
        assert client.chat(ASK, check=check, seed=5).text == "good"
        assert len({body["seed"] for body in server.bodies}) == 3 and server.bodies[0]["seed"] == 5
        assert endpoint(server, cache=tmp_path).chat(ASK, check=check, seed=5).cached
        assert len(server.bodies) == 3
    assert client.usage["prompt_tokens"] == 3 * PROMPT_TOKENS  # refused replies cost as much
    with LLMServer(lambda body: "bad") as server:
        with pytest.raises(EndpointError, match=r"wanted good, not bad; it answered 200.*\(tries: 4\)"):
            endpoint(server, cache=tmp_path).chat(ASK, check=check)
        assert len(server.bodies) == 4


def test_a_stricter_check_asks_again(tmp_path):
    # Catches: a stored reply that a newer check refuses, forever.
    def check(reply):
        if reply.text == "old":
            raise ValueError("old")

    with LLMServer(script=["old", "new"]) as server:
        assert endpoint(server, cache=tmp_path).chat(ASK).text == "old"
        assert endpoint(server, cache=tmp_path).chat(ASK, check=check).text == "new"
        assert endpoint(server, cache=tmp_path).chat(ASK, check=check).cached
        assert len(server.bodies) == 2


def test_schemas_are_sent_or_left_out_and_checked_both_times():
    # Catches: a server that ignores response_format and is believed; NaN; a fence that fails every reply.
    for sent in (True, False):
        replies = ["no json", '{"score": "4"}', '{"score": NaN}', "{}", '```json\n{"score": 4}\n```']
        with LLMServer(script=[*replies, '<think>\n\n</think>\n\n{"score": 3}']) as server:
            client = endpoint(server, retries=4, send_schema=sent)
            assert json.loads(client.chat(ASK, schema=SCORE).text) == {"score": 4}
            assert len(server.bodies) == 5
            assert json.loads(client.chat(ASK, schema=SCORE).text) == {"score": 3}
        form = {"type": "json_schema", "json_schema": {"name": "reply", "strict": True, "schema": SCORE}}
        assert server.bodies[0].get("response_format") == (form if sent else None)


def test_the_cache_is_keyed_by_the_whole_request(tmp_path):
    # Catches: a sample that another temperature, seed, tool list, schema or model paid for.
    other = [{"role": "user", "content": "ho"}]
    kinds = [
        {}, {"seed": 0}, {"seed": 1}, {"temperature": 0.0}, {"max_tokens": 5}, {"tools": TOOLS},
        {"schema": SCORE},
    ]  # fmt: skip
    with LLMServer(lambda body: '{"score": 1}') as server:
        for _ in range(2):
            client = endpoint(server, cache=tmp_path)
            replies = [client.chat(ASK, **kind) for kind in kinds] + [client.chat(other)]
            replies += [endpoint(server, cache=tmp_path, extra={"top_k": 1}).chat(ASK)]
            replies += [Endpoint(server.url, "n", cache=tmp_path).chat(ASK)]
        assert len(server.bodies) == 10 and all(reply.cached for reply in replies)
        assert client.usage["cached"] == 8 and client.usage["calls"] == 0 and client.usage["usd"] == 0
    assert len(list(tmp_path.rglob("*.json"))) == 10 and not list(tmp_path.rglob("*.tmp"))


def test_a_torn_file_is_named(tmp_path):
    # Catches: a broken cache that is read as a reply, or that ends a run with a bare JSON error.
    with LLMServer() as server:
        endpoint(server, cache=tmp_path).chat(ASK)
        (path,) = tmp_path.rglob("*.json")
        for content in ('{"response": ', '{"reply": {}}', '{"response": 3}', "[]"):
            path.write_text(content)
            with pytest.raises(ValueError, match=f"{path.name} is no stored reply"):
                endpoint(server, cache=tmp_path).chat(ASK)


def test_two_threads_that_ask_the_same_pay_once(tmp_path):
    # Catches: a group whose members ask the judge the same question, each for money.
    gate = threading.Event()

    def answer(body):
        gate.wait(10)
        return body["messages"][0]["content"]

    with LLMServer(answer) as server, ThreadPoolExecutor(12) as pool:
        client = endpoint(server, cache=tmp_path, price_in=1e6)
        asked = [pool.submit(client.chat, [{"role": "user", "content": str(i % 2)}]) for i in range(12)]
        time.sleep(0.3)
        gate.set()
        replies = [future.result() for future in asked]
        assert [reply.text for reply in replies] == ["0", "1"] * 6
        assert len(server.bodies) == 2 and sum(reply.cached for reply in replies) == 10
    assert client.usage["cached"] == 10 and client.usage["usd"] == 2 * PROMPT_TOKENS
    replies[0].calls.append(Call("x", {}))
    assert replies[2].calls == []  # what one thread does to its reply, another does not see


def test_threads_that_wait_for_a_failure_fail_too(tmp_path):
    # Catches: threads that wait forever for a reply that never comes, or that try one after the other.
    with LLMServer(lambda body: Fault(400, delay_s=0.3)) as server, ThreadPoolExecutor(4) as pool:
        client = endpoint(server, cache=tmp_path)
        for future in [pool.submit(client.chat, ASK) for _ in range(4)]:
            with pytest.raises(EndpointError):
                future.result(timeout=10)
        assert len(server.bodies) == 1


def test_without_a_cache_every_sample_is_its_own():
    # Catches: four samples of one prompt that are one sample.
    texts = iter("abcd")
    lock = threading.Lock()

    def answer(body):
        with lock:
            return next(texts)

    with LLMServer(answer) as server, ThreadPoolExecutor(4) as pool:
        client = endpoint(server)
        assert sorted(pool.map(lambda _: client.chat(ASK).text, range(4))) == ["a", "b", "c", "d"]


def test_concurrency_is_bounded():
    # Catches: a hundred questions at once at a server that allows three.
    def answer(body):
        time.sleep(0.05)
        return "x"

    with LLMServer(answer) as server, ThreadPoolExecutor(20) as pool:
        client = endpoint(server, concurrency=3)
        list(pool.map(lambda i: client.chat(ASK, seed=i), range(20)))
        assert server.in_flight == 3
    assert client.usage["calls"] == 20 and client.usage["seconds"] > 20 * 0.05


def test_usage_counts_money():
    # Catches: prices per token taken for prices per million; tokens of a server that does not count them.
    with LLMServer(script=["a", Fault(200, body=b'{"choices":[{"message":{"content":"b"}}]}')]) as server:
        client = endpoint(server, price_in=2.0, price_out=30.0)
        client.chat(ASK)
        reply = client.chat(ASK)
        assert (reply.text, reply.prompt_tokens, reply.stop) == ("b", 0, "")
    usage = client.usage
    assert usage["usd"] == pytest.approx((2 * PROMPT_TOKENS + 30 * COMPLETION_TOKENS) / 1e6)
    assert usage["completion_tokens"] == COMPLETION_TOKENS and usage["calls"] == 2


KILLED = """
import sys
from nanoplan.llm import Endpoint
client = Endpoint(sys.argv[1], "m", cache=sys.argv[2], retries=0)
for i in range(8):
    print(i, client.chat([{"role": "user", "content": str(i)}]).text, flush=True)
"""


def test_a_killed_process_repeats_no_paid_call(tmp_path):
    # Catches: replies that are written at the end, or half written when the process dies.
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", KILLED]
    with LLMServer(lambda body: body["messages"][0]["content"] * 2) as server:
        server.script = [None] * 5 + [Fault(hang=True)]
        first = subprocess.Popen([*command, server.url, str(tmp_path)], stdout=subprocess.PIPE, cwd=root)
        while len(server.bodies) < 6:
            time.sleep(0.02)
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()
        again = subprocess.run(
            [*command, server.url, str(tmp_path)], stdout=subprocess.PIPE, cwd=root, check=True
        )
        asked = [body["messages"][0]["content"] for body in server.bodies]
    assert asked == ["0", "1", "2", "3", "4", "5", "5", "6", "7"]  # the sixth had not been answered
    assert again.stdout.decode().split("\n")[:8] == [f"{i} {i}{i}" for i in range(8)]


def test_probe():
    # Catches: a run that finds out after its first rollout that nobody listens.
    with LLMServer() as server:
        client = Endpoint(server.url + "/chat/completions/", "m")
        client.probe()
        assert client.url == server.url and client.chat(ASK).text == "ok"
    start = time.monotonic()
    with pytest.raises(EndpointError, match=f"{server.url}/models can't be reached: ConnectError"):
        client.probe()
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(("options", "text"), [
    ({"url": "127.0.0.1:8000"}, "wanted a base"),
    ({"url": "ftp://host/v1"}, "wanted a base"),
    ({"url": "http://host/v1?key=abc"}, "wanted a base"),
    ({"url": "http://me:secret@host/v1"}, "NANOPLAN_API_KEY"),
    ({"model": ""}, "no model named"),
    ({"concurrency": 0}, "concurrency=0"),
    ({"retries": -1}, "retries=-1"),
    ({"timeout_s": 0.0}, "timeout_s=0.0"),
])  # fmt: skip
def test_settings_that_cannot_work(options, text):
    # Catches: a typo that shows up as a failed comparison hours later; a password in an error text.
    with pytest.raises(ValueError, match=text) as refused:
        Endpoint(**{"url": "http://host/v1", "model": "m"} | options)
    assert "secret" not in str(refused.value)


def test_calls_are_read_like_a_local_models():
    # Catches: arguments that are no JSON raising an exception, or becoming a call with no arguments.
    good = read_reply(say("so", tool_calls=[call("add", '{"n": 3}'), call("look", "")]), tools=True)
    assert good.text == "so" and good.calls[0] == Call("add", {"n": 3})
    assert good.calls[1].name == "look" and "inside the arguments string" in good.calls[1].error
    for arguments in (
        '{"n": 3',
        '{"n": NaN}',
        "[1]",
        '{"n": 1, "n": 2}',
        "[" * 5000,
        "</tool_call>",
        7,
        {"n": 3},
    ):
        (found,) = read_reply(say(None, tool_calls=[call("add", arguments)]), tools=True).calls
        assert found.name == "add" and (found.error or found.arguments == {"n": 3})
        assert bool(found.error) == (arguments != {"n": 3}) and len(found.error) < 300
    for item in (
        None,
        3,
        {},
        {"function": None},
        {"function": {"name": "x" * 9999}},
        {"function": {"name": 4}},
    ):
        (found,) = read_reply(say(None, tool_calls=[item]), tools=True).calls
        assert found.error and len(found.name) <= 64
    text = '<tool_call>{"name": "add", "arguments": {"n": 1}}</tool_call>'
    assert read_reply(say(text), tools=True).calls == [Call("add", {"n": 1})]  # a server without a parser
    assert read_reply(say(text), tools=False).text == text


def test_messages_in_openai_form():
    # Catches: results that refer to no call, or to another one; arguments sent as an object.
    calls = [Call("add", {"n": 1}), Call("", {}, "malformed tool call: no JSON object")]
    messages = [
        Message("system", "s"), Message("user", "u"), Message("assistant", "", calls), Message("tool", "1"),
        Message("tool", "Error: malformed"), Message("user", "advice"),
        Message("assistant", "now", [Call("look", {})]), Message("tool", "total 1"),
    ]  # fmt: skip
    found = to_openai(messages)
    assert found[:2] == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert found[2]["content"] is None and found[6]["content"] == "now"
    made = [entry["function"] for entry in found[2]["tool_calls"]]
    assert made == [{"name": "add", "arguments": '{"n": 1}'}, {"name": "unknown", "arguments": "{}"}]
    ids = [entry["id"] for m in (found[2], found[6]) for entry in m["tool_calls"]]
    assert len(set(ids)) == 3
    assert ids == [entry["tool_call_id"] for entry in found if entry["role"] == "tool"]
    with pytest.raises(ValueError, match="answers no call"):
        to_openai([Message("user", "u"), Message("tool", "1")])
