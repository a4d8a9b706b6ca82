"""MuSiQue: answer a multi-hop question with a search tool and an answer tool.

Settings: "attached" (the tool searches the question's own 20 passages) and "wiki" (a frozen retrieval
service over HTTP; `python -m envs.musique serve --passages FILE`). `verify` is Caddie's success: an exact
match under its normaliser after at least three searches. `official` is the benchmark's own exact match.
Data: MuSiQue's JSONL records, or a folder of envs/musique_make.py.
Benchmarks: MuSiQue (arXiv:2108.00573), metric of github.com/StonyBrookNLP/musique 922ac98; Caddie
(arXiv:2610.09858).
"""

import json
import random
import re
import string
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from envs.base import Call, Env, Message, PlanView, Task, Tool, Verdict, clip
from envs.musique_search import Attached, Passage
from envs.musique_serve import Service
from envs.strata import stratified

MIN_SEARCHES = 3  # searches without which no answer counts; Caddie
TOP_K = 3  # passages of a search; ours, the paper's is not in our copy
COMPOSITION = {2: 104, 3: 63, 4: 33}  # hops -> questions of Caddie's 200 for validation
CHECKS = ("searches", "answer")
MAX_ANSWER_CHARS = 400
SPLITS = {"validation": "dev", "caddie": "dev"}  # other names of a split's file
SYSTEM = (
    "Answer the question. Search for one fact at a time: at least {least} searches, then call answer with "
    "the shortest exact answer and nothing else."
)
TOOLS = [
    Tool(
        "search",
        "Find passages",
        {
            "type": "object",
            "properties": {"query": {"type": "string", "minLength": 1, "maxLength": 400}},
            "required": ["query"],
        },
    ),
    Tool(
        "answer",
        "Give the final answer",
        {
            "type": "object",
            "properties": {"answer": {"type": "string", "maxLength": MAX_ANSWER_CHARS}},
            "required": ["answer"],
        },
    ),
]


@dataclass(frozen=True, slots=True)
class Hop:
    question: str  # "#1 >> spouse"; #k is the answer of hop k, counted from 1
    answer: str
    support: int  # idx of its passage


@dataclass(frozen=True, slots=True)
class Question:
    """One answerable record."""

    id: str  # "3hop1__1_2_3"
    text: str
    answers: tuple[str, ...]  # the answer, then its aliases
    hops: tuple[Hop, ...]
    passages: tuple[Passage, ...]

    @property
    def num_hops(self) -> int:
        return len(self.hops)


def read_question(record, where: str) -> Question | None:
    """A record as data; None for one that is marked unanswerable. Raises ValueError naming its field."""
    name = record.get("id") if isinstance(record, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f'{where}: no string "id"; wanted a MuSiQue record')
    where = f"{where} record {name[:60]}"
    passages = tuple(
        Passage(str(_field(part, "idx", int, where)), *(_field(part, key, str, where) for key in _PASSAGE))
        for part in _field(record, "paragraphs", list, where)
    )
    if not passages:
        raise ValueError(f"{where}: no passages; wanted those that its search tool looks through")
    if record.get("answerable") is False:
        return None
    if "answer" not in record:
        raise ValueError(
            f"{where}: no answer; the test split is scored by the leaderboard alone, use another"
        )
    aliases = record.get("answer_aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise ValueError(f"{where}: answer_aliases={str(aliases)[:40]!r}, wanted a list of strings")
    labels = {passage.label for passage in passages}
    hops = []
    for step in _field(record, "question_decomposition", list, where):
        hop = Hop(*(_field(step, key, kind, where) for key, kind in _HOP))
        if str(hop.support) not in labels:
            raise ValueError(f"{where}: a hop rests on passage {hop.support}, which is not there")
        hops.append(hop)
    if not hops:
        raise ValueError(f"{where}: question_decomposition is empty; wanted one step per hop")
    answers = (_field(record, "answer", str, where), *aliases)
    return Question(name, _field(record, "question", str, where), answers, tuple(hops), passages)


_PASSAGE = ("title", "paragraph_text")
_HOP = (("question", str), ("answer", str), ("paragraph_support_idx", int))


def _field(record, key: str, kind: type, where: str):
    """record[key] of a type, or a ValueError that says where it was wanted."""
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where}: {key}={str(value)[:40]!r}, wanted {kind.__name__}; fix the record")
    return value


def normal_caddie(text: str) -> str:
    """Case-folded, punctuation as spaces, English articles dropped, white space joined: "U.S." is "u s".

    source  Caddie, appendix C; which characters are punctuation is not in our copy: every one that is
            neither letter, digit nor blank, so that typographic quotes and dashes are too
    """
    words = re.sub(r"[^\w\s]|_", " ", text.casefold()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def normal_official(text: str) -> str:
    """Lower case, ASCII punctuation deleted, articles dropped, white space joined: "U.S." is "us".

    source  MuSiQue's own metric
    """
    kept = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_match(answer: str, answers: tuple[str, ...], normal) -> bool:
    """Whether an answer equals one of `answers` under a normaliser."""
    return normal(answer) in map(normal, answers)


def f1(answer: str, answers: tuple[str, ...]) -> float:
    """The best F1 of the words of an answer against those of `answers`, officially normalised."""
    given, best = Counter(normal_official(answer).split()), 0.0
    for wanted in (Counter(normal_official(text).split()) for text in answers):
        total, common = given.total() + wanted.total(), (given & wanted).total()
        same = given == wanted  # of two empty answers
        best = max(best, 2 * common / total if given and wanted else float(same))
    return best


class MuSiQue(Env):
    """One question. The corpus is shared with all forks, read-only.

    corpus   has search(query, k) -> list of Passage: Attached, or a Service
    least    searches without which no answer counts
    queries  of the searches made so far
    ended    why the episode is over: "" it is not, "answer" by the tool, "text" by a turn without a call
    stratum  number of hops: what sampling and tables are stratified by
    """

    def __init__(
        self, task: Task, question: Question, corpus, *, top_k: int = TOP_K, least: int = MIN_SEARCHES
    ):
        super().__init__(task, TOOLS)
        self.question, self.corpus, self.top_k, self.least = question, corpus, top_k, least
        self.stratum = f"{question.num_hops} hops"
        self.queries: list[str] = []
        self.ended = ""

    def reset(self) -> list[Message]:
        self.answer_text, self.done, self.queries, self.ended = "", False, [], ""
        return [Message("system", SYSTEM.format(least=self.least)), Message("user", self.question.text)]

    def fork(self) -> "MuSiQue":
        twin = super().fork()
        twin.queries = list(self.queries)
        return twin

    def step(self, text: str, calls: list[Call]) -> tuple[list[Message], bool]:
        """As in every environment, and the answer tool ends the episode. Raises RetrievalError when the
        retrieval service fails: then there is no answer, right or wrong."""
        messages, over = super().step(text, calls)
        if over:
            self.ended = "text"
        return messages, self.done

    def answer(self, text: str) -> None:
        """The final answer of a turn without a call, or of a stored output, whose searches count if the
        episode has none of its own."""
        self.answer_text, queries = read_output(text)
        self.queries = self.queries or queries

    def call(self, name: str, arguments: dict) -> str:
        if self.done:
            raise ValueError("the question is answered, nothing comes after the answer")
        if name == "answer":
            self.answer_text = arguments["answer"]
            self.done, self.ended = True, "answer"
            return "Answered."
        query = arguments["query"]
        if not query.strip():
            raise ValueError("query: blank; say what to look for")
        found = self.corpus.search(query, self.top_k)
        self.queries.append(query)
        lines = [f"[{passage.label}] {passage.title}: {passage.text}" for passage in found]
        return "\n".join(lines) or "No passage has any of these words."

    def verify(self) -> Verdict:
        """searches: enough of them were made; answer: it is an exact match under Caddie's normaliser.

        severity  searches: how many lack; answer: 1 - F1, at least 0.01
        """
        answer, given = self.answer_text, bool(self.ended)
        checks = {
            "searches": len(self.queries) >= self.least,
            "answer": given and exact_match(answer, self.question.answers, normal_caddie),
        }
        severity = {
            "searches": float(max(0, self.least - len(self.queries))),
            "answer": 0.0 if checks["answer"] else max(0.01, 1 - f1(answer, self.question.answers)),
        }
        reasons = []
        if not checks["searches"]:
            reasons.append(f"searches: {len(self.queries)} made, at least {self.least} wanted")
        if not given:
            reasons.append("answer: none was given")
        elif not checks["answer"]:
            reasons.append(clip(f"answer: {answer[:80]!r}, wanted {self.question.answers[0]!r}", 200))
        return Verdict(all(checks.values()), checks, severity, reasons)

    def official(self) -> dict[str, bool | None]:
        """The benchmark's exact match, which asks for no searches ("em", "pass"), and with the searches that
        Caddie wants ("em_searched")."""
        match = bool(self.ended) and exact_match(self.answer_text, self.question.answers, normal_official)
        return {"em": match, "em_searched": match and len(self.queries) >= self.least, "pass": match}

    def measures(self) -> dict[str, float]:
        """F1 of the answer; searches; different ones among them (under Caddie's normaliser)."""
        different = len(set(map(normal_caddie, self.queries)))
        score = f1(self.answer_text, self.question.answers) if self.ended else 0.0
        return {"f1": score, "searches": float(len(self.queries)), "different": float(different)}

    def view(self) -> PlanView:
        return answer_view(self.answer_text, self.question)

    def reference_view(self) -> PlanView:
        return answer_view(self.question.answers[0], self.question)

    def gold(self) -> list[Call]:
        """Calls that answer the question: a search for each hop, with the answers of the hops before put in,
        the whole question first while that makes fewer searches than `least`, then the answer."""
        found = [hop.answer for hop in self.question.hops]
        queries = [fill(hop.question, found) for hop in self.question.hops]
        queries = [self.question.text] * max(0, self.least - len(queries)) + queries
        calls = [Call("search", {"query": query[:400]}) for query in queries]
        return [*calls, Call("answer", {"answer": self.question.answers[0]})]


def fill(question: str, found: list[str]) -> str:
    """A hop's question with "#k" replaced by the answer of hop k, counted from 1."""
    return re.sub(r"#(\d)", lambda m: found[int(m[1]) - 1] if 0 < int(m[1]) <= len(found) else m[0], question)


def read_output(text: str) -> tuple[str, list[str]]:
    """(answer, queries) of a text that may be a stored output: a JSON object with "answer" or
    "predicted_answer", and "searches", the queries of an episode that was played elsewhere."""
    try:
        value = json.loads(text) if text.startswith("{") else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return text, []
    answer = value.get("answer", value.get("predicted_answer"))
    searches = value.get("searches")
    queries = [query for query in searches if isinstance(query, str)] if isinstance(searches, list) else []
    return (answer if isinstance(answer, str) else text), [query for query in queries if query.strip()][:100]


def answer_view(answer: str, question: Question) -> PlanView:
    """The answer, bounded. Features: match (Caddie's exact match) and f1."""
    match = exact_match(answer, question.answers, normal_caddie)
    return PlanView(
        clip(answer, MAX_ANSWER_CHARS), {"match": float(match), "f1": f1(answer, question.answers)}
    )


def load(
    split: str,
    data: str | Path,
    *,
    n: int | None = None,
    seed: int = 0,
    top_k: int = TOP_K,
    least: int = MIN_SEARCHES,
    retrieval: str = "",
    timeout_s: float = 30.0,
    answerable: bool = False,
) -> list[MuSiQue]:
    """One environment per question of a split: "train", "dev" or "validation", and "caddie", the 200 of dev
    with 104, 63 and 33 of two, three and four hops, drawn from the seed.

    data        a file of records, or a folder with musique_ans_v1.0_SPLIT.jsonl, musique_SPLIT.jsonl or
                SPLIT.jsonl
    n           that many, stratified by number of hops; None: all, in order
    top_k       passages of a search
    least       searches without which no answer counts; 0 for none
    retrieval   address of a service, "http://127.0.0.1:8100": the wiki setting. "": the attached passages
    timeout_s   seconds that the service has for an answer
    answerable  leave out records that are marked unanswerable, instead of raising
    raises      ValueError naming file, record and field of what cannot be read
    """
    if not 1 <= top_k <= 20:
        raise ValueError(f"top_k={top_k}, wanted 1 to 20 passages a search")
    questions = read_questions(find_file(split, Path(data)), answerable=answerable)
    if split == "caddie":
        questions = compose(questions, COMPOSITION, seed=seed)
    if n is not None:
        order = stratified([f"{question.num_hops} hops" for question in questions], n, seed=seed)
        questions = [questions[i] for i in order]
    service = Service(retrieval, timeout_s=timeout_s) if retrieval else None
    envs = []
    for question in questions:
        corpus = service or Attached(list(question.passages))
        task = Task(question.id, {"question": question.text, "hops": question.num_hops})
        envs.append(MuSiQue(task, question, corpus, top_k=top_k, least=least))
    return envs


def find_file(split: str, data: Path) -> Path:
    """The file of a split. Raises ValueError naming the files that were looked for."""
    if data.is_file():
        return data
    name = SPLITS.get(split, split)
    paths = [
        data / pattern.format(name)
        for pattern in ("musique_ans_v1.0_{}.jsonl", "musique_{}.jsonl", "{}.jsonl")
    ]
    for path in paths:
        if path.is_file():
            return path
    raise ValueError(f"no {' or '.join(path.name for path in paths)} in {data}; wanted MuSiQue's records")


def read_questions(path: Path, *, answerable: bool) -> list[Question]:
    """Every question of a file of records. Raises ValueError naming line, record and field."""
    questions, seen = [], {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is no JSON: {error}; wanted one record a line") from None
        question = read_question(record, where)
        if question is None and not answerable:
            raise ValueError(
                f"{where} record {record['id'][:60]} is marked unanswerable; wanted MuSiQue-Ans, or "
                "answerable=True to leave such records out"
            )
        if question is not None:
            if question.id in seen:
                raise ValueError(f"{where}: id {question.id!r} is on line {seen[question.id]} too")
            seen[question.id] = number
            questions.append(question)
    if not questions:
        raise ValueError(f"{path} holds no question; wanted one record a line")
    return questions


def compose(questions: list[Question], composition: dict[int, int], *, seed: int) -> list[Question]:
    """As many questions of each number of hops as `composition` says, in the file's order.

    raises  ValueError where there are too few of a kind
    """
    chosen: set[str] = set()
    for hops, wanted in sorted(composition.items()):
        ids = [question.id for question in questions if question.num_hops == hops]
        if len(ids) < wanted:
            raise ValueError(
                f"{len(ids)} questions of {hops} hops, wanted {wanted}; use the whole dev split, or n"
            )
        chosen.update(random.Random(f"{seed}/{hops}").sample(ids, wanted))
    return [question for question in questions if question.id in chosen]


def main(argv: list[str]) -> None:
    """`serve`: see envs/musique_serve.py. `make`: see envs/musique_make.py."""
    from envs import musique_make, musique_serve

    commands = {"serve": musique_serve.main, "make": musique_make.main}
    if not argv or argv[0] not in commands:
        raise SystemExit(f"python -m envs.musique {'|'.join(commands)} --help")
    commands[argv[0]](argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
