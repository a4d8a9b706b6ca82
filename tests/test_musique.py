import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from envs import BENCHMARKS, musique_make
from envs.base import Call
from envs.musique import COMPOSITION, exact_match, f1, normal_caddie, normal_official
from envs.musique_search import Attached, Bm25, Passage, terms
from envs.musique_serve import RetrievalError, Service, Store, make_server

musique = BENCHMARKS["musique"]

ROOT = Path(__file__).parents[1]
REAL = ROOT.parent / "shared" / "data" / "musique"
real_data = pytest.mark.skipif(not REAL.is_dir(), reason=f"no MuSiQue data in {REAL}")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return musique_make.build(tmp_path_factory.mktemp("musique"), seed=1, train=40, dev=60, passages=10)


def record(**changes):
    """A two-hop record, made up."""
    texts = [
        ("Ada Moss", "Ada Moss was born in Norwick."),
        ("Norwick", "Norwick is a town in Velland, U.S. The mayor is Jo Hale-Webb."),
        ("Sulham", "Sulham is a town in Estia. Its mayor is Bo Lane."),
    ]
    paragraphs = [
        {"idx": i, "title": title, "paragraph_text": text, "is_supporting": i < 2}
        for i, (title, text) in enumerate(texts)
    ]
    hops = [
        {"id": 1, "question": "Ada Moss >> place of birth", "answer": "Norwick", "paragraph_support_idx": 0},
        {"id": 2, "question": "#1 >> mayor", "answer": "Jo Hale-Webb", "paragraph_support_idx": 1},
    ]
    made = {
        "id": "2hop__1_2",
        "paragraphs": paragraphs,
        "question": "Who is the mayor of Ada Moss's birthplace?",
        "question_decomposition": hops,
        "answer": "Jo Hale-Webb",
        "answer_aliases": ["The Mayor of Norwick"],
        "answerable": True,
    }
    return made | changes


def write(folder, *records):
    path = folder / "dev.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in records), encoding="utf-8")
    return path


def one(folder, *, top_k=3, **changes):
    (env,) = musique.load("dev", write(folder, record(**changes)), top_k=top_k)
    env.reset()
    return env


def play(env, calls):
    """Messages of all turns, one call a turn; checks that the episode is over with the answer."""
    env.reset()
    answers = []
    for call in calls:
        messages, done = env.step("", [call])
        answers += [message.content for message in messages]
        assert done == (call.name == "answer" and not answers[-1].startswith("Error"))
    return answers


def search(query):
    return Call("search", {"query": query})


def answer(text):
    return Call("answer", {"answer": text})


@pytest.mark.parametrize(("text", "caddie", "official"), [
    ("U.S.", "u s", "us"),
    ("Hewlett-Packard", "hewlett packard", "hewlettpackard"),
    ("  The A-Team, an  act ", "team act", "ateam act"),
    ("A", "", ""),
    ("Theatre of the Absurd!", "theatre of absurd", "theatre of absurd"),
    ("“Straße”", "strasse", "“straße”"),
    ("snake_case", "snake case", "snakecase"),
    ("", "", ""),
])  # fmt: skip
def test_both_normalisers(text, caddie, official):
    # Catches: one normaliser used for both, articles cut out of words, punctuation glued or spaced wrongly.
    assert (normal_caddie(text), normal_official(text)) == (caddie, official)


def test_the_normalisers_disagree_where_punctuation_joins_words():
    # Catches: an exact match that is called by the other normaliser's name.
    assert exact_match("jo hale webb", ("Jo Hale-Webb",), normal_caddie)
    assert not exact_match("jo hale webb", ("Jo Hale-Webb",), normal_official)
    assert exact_match("US", ("U.S.",), normal_official) and not exact_match("US", ("U.S.",), normal_caddie)


def test_f1_by_hand():
    # Catches: an F1 over sets instead of bags, of the first alias only, or that divides by zero.
    assert f1("red red car", ("red car",)) == pytest.approx(2 * 2 / 5)
    assert f1("blue", ("red car", "blue")) == 1.0
    assert f1("the", ("a",)) == 1.0 and f1("the", ("car",)) == 0.0 and f1("x", ("car",)) == 0.0


def brute(texts, query, k):
    """BM25 written out for one text at a time."""
    import math

    bags = [Counter(terms(text)) for text in texts]
    mean = sum(bag.total() for bag in bags) / len(bags)
    scores = []
    for number, bag in enumerate(bags):
        score = 0.0
        for term in set(terms(query)):
            n = sum(term in other for other in bags)
            idf = math.log(1 + (len(bags) - n + 0.5) / (n + 0.5))
            tf = bag[term]
            score += idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * bag.total() / mean))
        if score:
            scores.append((-score, number))
    return [(number, -score) for score, number in sorted(scores)[:k]]


def test_bm25_equals_a_plain_sum():
    # Catches: postings of another term, wrong lengths, ties out of order, a cut that drops an equal score.
    rng = random.Random(0)
    words = [f"w{i}" for i in range(30)]
    for _ in range(20):
        texts = [" ".join(rng.choices(words, k=rng.randrange(0, 12))) for _ in range(25)] + ["w1 w2"] * 4
        index = Bm25.build(texts)
        for _ in range(5):
            query, k = " ".join(rng.choices([*words, "unknown"], k=3)), rng.randrange(1, 8)
            found, wanted = index.search(query, k), brute(texts, query, k)
            assert [score for _, score in found] == pytest.approx([score for _, score in wanted])
            rounded = sorted((-round(s, 9), n) for n, s in brute(texts, query, 99))[:k]
            assert sorted((-round(s, 9), n) for n, s in found) == rounded
    assert Bm25.build(["a b", ""]).search("zzz", 3) == [] and Bm25.build([]).search("a", 3) == []


def test_gold_trajectories_of_generated_worlds_succeed(world):
    # Catches: questions whose facts are not in the passages, aliases or supports that point elsewhere.
    envs = musique.load("train", world) + musique.load("dev", world)
    found = total = 0
    for env in envs:
        results = play(env, env.gold())
        assert env.verify().passed and env.official()["pass"] and env.official()["em_searched"]
        assert env.reference_view().features == {"match": 1.0, "f1": 1.0} == env.view().features
        searches = results[-1 - len(env.question.hops) : -1]
        for hop, result in zip(env.question.hops, searches, strict=True):
            passage = next(p for p in env.question.passages if p.label == str(hop.support))
            assert hop.answer in passage.text
            found += f"[{hop.support}] " in result
            total += 1
    assert found / total > 0.95, (found, total)  # the fact that a hop asks for is found by asking for it
    assert {env.stratum for env in envs} == {"2 hops", "3 hops", "4 hops"}


def test_two_searches_never_succeed(world):
    # Catches: a guard on searches that counts turns, refused calls or the answer itself.
    for env in musique.load("dev", world, n=10):
        query, right = env.gold()[0], env.gold()[-1]
        play(env, [query, query, right])
        verdict = env.verify()
        assert not verdict.passed and verdict.checks == {"searches": False, "answer": True}
        assert verdict.severity == {"searches": 1.0, "answer": 0.0}
        assert env.official() == {"em": True, "em_searched": False, "pass": True}
        broken = [search("  "), search(""), Call("search", {}), Call("serch", {"query": "x"})]
        play(env, [query, *broken, Call("search", {"query": "x"}, "no JSON"), query, right])
        assert not env.verify().checks["searches"] and len(env.queries) == 2
        play(env, [query, query, query, right])
        assert env.verify().passed


def test_what_ends_an_episode(tmp_path):
    # Catches: an episode that goes on after its answer, a later call that changes it, text taken as a search.
    env = one(tmp_path)
    messages, done = env.step("", [search("Ada"), answer("Bo Lane"), answer("Jo Hale-Webb"), search("x")])
    assert done and len(messages) == 4 and [m.content[:5] for m in messages[2:]] == ["Error", "Error"]
    assert (env.answer_text, env.ended, len(env.queries)) == ("Bo Lane", "answer", 1)
    env.reset()
    assert (env.queries, env.ended, env.answer_text, env.done) == ([], "", "", False)
    assert "none was given" in " ".join(env.verify().reasons)
    assert env.step("Jo Hale-Webb", []) == ([], True) and env.ended == "text"
    assert env.verify().checks == {"searches": False, "answer": True}


@pytest.mark.parametrize(("output", "match"), [
    ("jo hale webb", True),
    ("mayor of Norwick", True),
    ("Mayor of Norwick, Jo Hale-Webb", False),
    ('{"answer": "Jo Hale-Webb"}', True),
    ('{"predicted_answer": "Jo Hale-Webb"}', True),
    ('{"answer": ["Jo Hale-Webb"]}', False),
    ("{" * 5000, False),
    ("", False),
    ("Hale" * 10**5, False),
])  # fmt: skip
def test_any_output_is_scored(tmp_path, output, match):
    # Catches: a verifier that raises on a model's text, or reads an object's text as the answer.
    env = one(tmp_path)
    for query in ("a", "b", "c"):
        env.step("", [search(query)])
    env.step(output, [])
    assert env.verify().passed == match == (env.view().features["match"] == 1)
    assert len(env.view().text) <= 400 and all(len(reason) <= 200 for reason in env.verify().reasons)


def test_the_searches_of_a_stored_output_count_once(tmp_path):
    # Catches: a stored episode that can never succeed, or a text that adds searches to an episode's own.
    env = one(tmp_path)
    for searches, passed in (
        (["a", "b", "c"], True),
        (["a", "b"], False),
        (["a", "b", " ", 3], False),
        ("abc", False),
    ):
        env.reset()
        env.step(json.dumps({"answer": "Jo Hale-Webb", "searches": searches}), [])
        assert env.verify().passed == passed and env.official()["em_searched"] == passed
        assert env.verify().checks["answer"]
    env.reset()
    env.step("", [search("a")])
    env.step(json.dumps({"answer": "Jo Hale-Webb", "searches": ["a", "b", "c"]}), [])
    assert env.queries == ["a"] and not env.verify().passed


def test_search_results(tmp_path):
    # Catches: passages without their idx, a top_k that is ignored, a search without a hit that raises.
    env = one(tmp_path, top_k=1)
    assert play(env, [search("mayor of Norwick")]) == [
        "[1] Norwick: Norwick is a town in Velland, U.S. The mayor is Jo Hale-Webb."
    ]
    assert "No passage" in play(env, [search("zebra")])[0] and len(env.queries) == 1
    env = one(tmp_path, top_k=2)
    assert play(env, [search("Norwick mayor")])[0].count("\n") == 1


def test_a_fork_has_its_own_future(world):
    # Catches: queries shared between twins, a twin whose searches differ.
    env = musique.load("dev", world, n=1)[0]
    env.reset()
    env.step("", [env.gold()[0]])
    twins = [env.fork(), env.fork()]
    futures = [[twin.step("", [call])[0][0].content for call in env.gold()[1:]] for twin in twins]
    assert futures[0] == futures[1] and all(twin.verify().passed for twin in twins)
    assert len(env.queries) == 1 and not env.done and env.answer_text == ""


def test_the_200_questions_for_validation(tmp_path):
    # Catches: a subset of another composition, one that the seed does not draw, one out of too few questions.
    rows = [
        record(id=f"{hops}hop__{i}", question_decomposition=[record()["question_decomposition"][0]] * hops)
        for hops, count in ((2, 130), (3, 80), (4, 40))
        for i in range(count)
    ]
    path = write(tmp_path, *rows)
    chosen = [musique.load("caddie", path, seed=seed) for seed in (0, 0, 1)]
    ids = [[env.task.id for env in envs] for envs in chosen]
    assert ids[0] == ids[1] != ids[2] and len(set(ids[0])) == 200
    assert Counter(env.question.num_hops for env in chosen[0]) == COMPOSITION == {2: 104, 3: 63, 4: 33}
    few = [env.task.id for env in musique.load("caddie", path, n=20, seed=0)]
    assert len(few) == 20 and set(few) <= set(ids[0])
    with pytest.raises(ValueError, match="39 questions of 4 hops, wanted"):
        write(tmp_path, *rows[:-1])
        COMPOSITION_OF_ALL = {4: 40}
        musique.compose(musique.read_questions(path, answerable=False), COMPOSITION_OF_ALL, seed=0)


@pytest.mark.parametrize(("changes", "words"), [
    ({"paragraphs": []}, "no passages"),
    ({"paragraphs": None}, "paragraphs"),
    ({"question": 7}, "question="),
    ({"answer_aliases": "x"}, "answer_aliases"),
    ({"question_decomposition": []}, "question_decomposition is empty"),
    ({"question_decomposition": [{"question": "q", "answer": "a", "paragraph_support_idx": 9}]}, "passage 9"),
    ({"answerable": False}, "unanswerable"),
])  # fmt: skip
def test_a_broken_record_is_named(tmp_path, changes, words):
    # Catches: a record without passages that becomes a question which nobody can answer.
    path = write(tmp_path, record(id="fine"), record(**changes))
    with pytest.raises(ValueError, match=words) as caught:
        musique.load("dev", path)
    assert f"{path} line 2 record 2hop__1_2" in str(caught.value)


def test_a_broken_file_is_named(tmp_path):
    # Catches: a line that is skipped, an id that comes twice, a test split scored as wrong throughout.
    path = write(tmp_path, record(), record())
    with pytest.raises(ValueError, match=r"line 2: id .* line 1 too"):
        musique.load("dev", path)
    untold = record()
    del untold["answer"]
    with pytest.raises(ValueError, match="no answer"):
        musique.load("dev", write(tmp_path, untold))
    path.write_text('{"id": \n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1 is no JSON"):
        musique.load("dev", path)
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no question"):
        musique.load("dev", path)
    with pytest.raises(ValueError, match="musique_ans_v1"):
        musique.load("train", tmp_path)
    with pytest.raises(ValueError, match="top_k=0"):
        musique.load("dev", path, top_k=0)


def test_generated_worlds_do_not_depend_on_their_number(tmp_path):
    # Catches: records that change when more of them are made, seeds that make the same world.
    few = musique_make.build(tmp_path / "a", train=3, dev=2, passages=6, sentences=1, short=True)
    more = musique_make.build(tmp_path / "b", train=5, dev=2, passages=6, sentences=1, short=True)
    other = musique_make.build(tmp_path / "c", seed=1, train=3, dev=2, passages=6, sentences=1, short=True)
    name = "musique_ans_v1.0_train.jsonl"
    lines = [(folder / name).read_text(encoding="utf-8").splitlines() for folder in (few, more, other)]
    assert lines[0] == lines[1][:3] and not set(lines[0]) & set(lines[2])
    row = json.loads(lines[0][0])
    assert len(row["paragraphs"]) == 6 and [p["idx"] for p in row["paragraphs"]] == list(range(6))
    assert all(p["paragraph_text"].count(".") == 1 for p in row["paragraphs"])
    assert sum(p["is_supporting"] for p in row["paragraphs"]) == len(row["question_decomposition"])
    with pytest.raises(ValueError, match="passages=3"):
        musique_make.build(tmp_path, passages=3)
    with pytest.raises(ValueError, match="5hop"):
        musique_make.build(tmp_path, shapes=("5hop",))
    with pytest.raises(ValueError, match="entities=5"):
        musique_make.build(tmp_path, entities=5)


@contextlib.contextmanager
def serving(store_or_handler):
    """A running server and its address."""
    if isinstance(store_or_handler, Store):
        server = make_server(store_or_handler)
    else:
        server = ThreadingHTTPServer(("127.0.0.1", 0), store_or_handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_wiki_setting_over_http(tmp_path):
    # Catches: a service whose ranking differs from the index in memory, ids or texts that slip.
    folder = musique_make.build(tmp_path, train=0, dev=12, worlds=1, entities=400)
    store = Store(folder / "passages_dev.jsonl")
    assert store.built and not Store(folder / "passages_dev.jsonl").built
    rows = [json.loads(line) for line in (folder / "passages_dev.jsonl").read_text("utf-8").splitlines()]
    local = Attached([Passage("", row["title"], row["text"]) for row in rows])
    with serving(store) as url:
        envs = musique.load("dev", folder, retrieval=url)
        solved = 0
        for env in envs:
            results = play(env, env.gold())
            query = env.queries[0]
            wanted = [(passage.title, passage.text) for passage in local.search(query, 3)]
            lines = [f"[{i}] {title}: {text}" for i, (title, text) in enumerate(wanted, start=1)]
            assert results[0].split("\n") == lines
            solved += all(
                hop.answer in result
                for hop, result in zip(env.question.hops, results[-1 - env.question.num_hops :], strict=False)
            )
            assert env.verify().passed
        assert solved >= 10


def test_a_large_passage_file_is_indexed_once(tmp_path):
    # Catches: an index that is built at every start, that goes stale, or whose mapped arrays rank otherwise.
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("ba", "co", "di", "fu", "ge", "ho") for b in "abcdefghijklmnopqrstuvwxyz"]
    texts = [" ".join(rng.choices(words, k=20)) + f" n{i}" for i in range(20_000)]
    path = tmp_path / "many.jsonl"
    lines = [json.dumps({"id": str(i), "contents": f'"T{i}"\n{text}'}) for i, text in enumerate(texts)]
    path.write_text("\n".join([*lines, lines[7]]), encoding="utf-8")  # the last one repeats
    first, second = Store(path), Store(path)
    assert first.built and not second.built and len(second) == 20_000
    assert not any(file.suffix in (".pkl", ".pickle") for file in (tmp_path / "many.jsonl.bm25").iterdir())
    for number in (0, 7, 19_999):
        best = second.search(f"n{number} {texts[number]}", 2)
        assert (best[0]["id"], best[0]["title"], best[0]["text"]) == (
            str(number),
            f"T{number}",
            texts[number],
        )
    memory = Bm25.build(f"T{i}\n{text}" for i, text in enumerate(texts))
    query = "baa cob dic n12"
    assert memory.search(query, 5) == second.index.search(query, 5)
    path.write_text("\n".join(lines[:10]), encoding="utf-8")
    third = Store(path)
    assert third.built and len(third) == 10 and third.fingerprint != first.fingerprint


def test_passage_formats(tmp_path):
    # Catches: a TSV's header taken as a passage, columns swapped, records' passages counted twice.
    tsv = tmp_path / "p.tsv"
    tsv.write_text('id\ttext\ttitle\n1\t"He said ""no""."\tAda\n2\tSecond\tBo\n', encoding="utf-8")
    found = [Store(tsv).search(query, 1)[0] for query in ("said", "second")]
    assert [(row["title"], row["text"]) for row in found] == [("Ada", 'He said "no".'), ("Bo", "Second")]
    records = write(tmp_path, record(), record(id="again"))
    assert (
        len(Store(records, tmp_path / "elsewhere")) == 3 and (tmp_path / "elsewhere" / "docs.npy").is_file()
    )
    for text, words in (
        ("[1]\n", "line 1"),
        ('{"title": "x"}\n', "line 1"),
        ("\n", "no passage"),
        ("{\n", "JSON"),
    ):
        path = tmp_path / "broken.jsonl"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=words) as caught:
            Store(path)
        assert str(path) in str(caught.value) and not (tmp_path / "broken.jsonl.bm25").exists()
    with pytest.raises(ValueError, match="is no file"):
        Store(tmp_path / "none.jsonl")


def test_the_serve_command(tmp_path):
    # Catches: a command that does not start, warns, or serves something other than the file.
    folder = musique_make.build(tmp_path, train=0, dev=2, worlds=1, entities=60)
    command = [sys.executable, "-m", "envs.musique", "serve", "--port", "0", "--passages"]
    process = subprocess.Popen(
        [*command, str(folder / "passages_dev.jsonl")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert "serves 60 passages" in line and "index built" in line, line
        env = musique.load("dev", folder, retrieval=line.split()[0])[0]
        play(env, env.gold())
        assert env.verify().passed
    finally:
        process.kill()
        assert process.communicate()[1] == ""
    done = subprocess.run([*command, str(tmp_path / "no")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "is no file" in done.stderr and "Traceback" not in done.stderr


def test_the_service_refuses_what_is_no_search(tmp_path):
    # Catches: a service that breaks on a request, or answers one of any size.
    import httpx

    with serving(Store(write(tmp_path, record()))) as url:
        for body in (b"", b"x", b"[]", b'{"query": 1}', b'{"query": "a", "k": 0}', b'{"query": "a", "k": 99}',
                     b"{" * 60_000, b"x" * 70_000):  # fmt: skip
            reply = httpx.post(f"{url}/search", content=body, trust_env=False)
            assert reply.status_code == 400 and len(reply.json()["error"]) <= 200, body[:20]
        assert httpx.get(f"{url}/nowhere", trust_env=False).status_code == 404
        assert httpx.get(f"{url}/health", trust_env=False).json()["passages"] == 3
        assert Service(url).search("Norwick", 2)[0].title == "Norwick"


def flaky(behave):
    """A handler whose POST does behave(handler, number of the request)."""

    class Handler(BaseHTTPRequestHandler):
        count = 0

        def do_POST(self):
            type(self).count += 1
            self.rfile.read(int(self.headers["Content-Length"]))
            behave(self, type(self).count)

        def log_message(self, *arguments):
            pass

    return Handler


def send(handler, body, *, length=None, status=200):
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


GOOD = b'{"fingerprint": "f", "passages": [{"title": "Norwick", "text": "x"}]}'


def hang(handler, number):
    threading.Event().wait(2)


def trickle(handler, number):
    """An answer that would take three seconds, a byte at a time."""
    handler.send_response(200)
    handler.send_header("Content-Length", "60")
    handler.end_headers()
    for _ in range(60):
        try:
            handler.wfile.write(b" ")
            handler.wfile.flush()
        except OSError:
            return
        threading.Event().wait(0.05)


def flood(handler, number):
    """An answer without an end."""
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b" " * 2**20)


@pytest.mark.parametrize(("behave", "words"), [
    (hang, "ReadTimeout"),
    (trickle, "not whole after 0.3 s"),
    (flood, "more than|not whole"),
    (lambda h, n: send(h, GOOD[:20], length=500), "RemoteProtocolError|ReadError"),
    (lambda h, n: send(h, b"oops", status=503), "HTTP 503"),
    (lambda h, n: send(h, b"<html>"), "JSONDecodeError"),
    (lambda h, n: send(h, b"[" * 100_000), "nested|JSON"),
    (lambda h, n: send(h, b'{"fingerprint": "f", "passages": [{"title": "x"}]}'), "no .*passages"),
    (lambda h, n: send(h, GOOD.replace(b'"f"', b'"f%d"' % n)), "changed its passages"),
])  # fmt: skip
def test_a_service_that_fails_midway_is_no_wrong_answer(tmp_path, behave, words):
    # Catches: a dead service that looks to the agent like "no passage", and to the trainer like a failure.
    start = 1 if "changed" in words else 2

    def later(handler, number):
        send(handler, GOOD) if number < start else behave(handler, number)

    with serving(flaky(later)) as url:
        env = musique.load("dev", write(tmp_path, record()), retrieval=url)[0]
        env.corpus = Service(url, timeout_s=0.3, retries=1, pause_s=0.01)
        env.reset()
        assert env.step("", [search("Norwick")])[0][0].content == "[1] Norwick: x"
        with pytest.raises(RetrievalError, match=words) as caught:
            env.step("", [search("again")])
        assert url in str(caught.value) and not isinstance(caught.value, ValueError)
        assert env.queries == ["Norwick"] and not env.done  # the failed search does not count


def test_a_service_that_is_not_there_or_stumbles_once(tmp_path):
    # Catches: one lost packet that costs an episode; an address that is wrong and takes minutes to say so.
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(RetrievalError, match=f"{url} failed after 2 tries: ConnectError"):
        Service(url, retries=1, pause_s=0.01).search("x", 1)
    with serving(flaky(lambda h, n: send(h, GOOD, status=500 if n == 1 else 200))) as url:
        assert Service(url, pause_s=0.01).search("x", 1)[0].title == "Norwick"
    with pytest.raises(ValueError, match="wanted http"):
        Service("127.0.0.1:80")


@real_data
def test_gold_trajectories_of_the_real_records_succeed():
    # Catches: a normaliser that does not even match an answer with itself, a search that misses the passages.
    envs = musique.load("ans_100", REAL)
    assert len(envs) == 100 and all(len(env.question.passages) == 20 for env in envs)
    found = total = 0
    for env in envs:
        results = play(env, env.gold())
        assert env.verify().passed and env.official()["em_searched"], env.task.id
        for hop, result in zip(env.question.hops, results[-1 - env.question.num_hops :], strict=False):
            found += f"[{hop.support}] " in result
            total += 1
        two = [env.gold()[0], env.gold()[1], env.gold()[-1]]
        play(env, two)
        assert not env.verify().passed and not env.official()["em_searched"] and env.official()["em"]
    assert found / total > 0.8, (found, total)  # BM25 with top 3 finds 0.87 of the hops' passages


@real_data
def test_unanswerable_real_records_are_left_out_on_demand():
    # Catches: unanswerable questions that count as failures.
    assert len(musique.load("full_20", REAL, answerable=True)) == 11
    with pytest.raises(ValueError, match="unanswerable"):
        musique.load("full_20", REAL)
