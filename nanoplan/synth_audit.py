"""What is measured on SynPlan-R's pairs: statistics (Table 2), contamination by 8-grams (Table 10), and the
audit of the verifier by hand (Table 9). Reads records alone; knows no world."""

import json
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from nanoplan.chat import Chat
from nanoplan.log import table, write_json
from nanoplan.stats import wilson

NGRAM = 8  # words; CM-DPO, appendix 15.4
MAX_FILE_BYTES = 2**30  # of a benchmark's file; ours
READ = (".json", ".jsonl", ".txt", ".csv", ".md", ".pddl")  # benchmark files that are read
TABLE_2 = {  # world -> raw generations, verified pairs, acceptance, token distance, severity in USD
    "travel": (14_200, 8_400, 0.592, 34.0, 87.0),
    "retail": (11_800, 6_600, 0.559, 29.0, 142.0),
}
TABLE_7 = {  # world -> means per instance
    "travel": {"hard": 3.4, "soft": 1.8, "entities": 41.2, "grounds": 14.7},
    "retail": {"hard": 3.2, "soft": 2.0, "entities": 28.4, "grounds": 11.9, "conflicts": 0.31},
}
TABLE_8 = {
    "travel": {"cost": 84, "time": 38, "pace": 1},
    "retail": {"cost": 138, "features": 1, "compat": 1},
}
TABLE_9 = {"agreement": 296 / 300, "false pass": 1 / 300, "false fail": 3 / 300, "decode failures": 0.017}
WORD = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """Words, numbers and single marks: a tokenizer's stand-in where no model is named."""
    return WORD.findall(text)


def tokenizer(folder: str) -> Callable[[str], list[int]]:
    """The encoder of an HF folder."""
    return Chat(folder).encode


def token_distance(a: list, b: list) -> int:
    """Levenshtein distance of two token lists: fewest insertions, deletions and substitutions."""
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    a, b = a[start:], b[start:]
    end = next(
        (i for i, (x, y) in enumerate(zip(a[::-1], b[::-1], strict=False)) if x != y), min(len(a), len(b))
    )
    a, b = a[: len(a) - end], b[: len(b) - end]
    band = 8
    while True:
        distance = _banded(a, b, band)
        if distance <= band:
            return distance
        band *= 2


def _banded(a: list, b: list, band: int) -> int:
    """The distance if it is at most `band`, else something larger: only cells near the diagonal count."""
    far = len(a) + len(b) + 1
    if abs(len(a) - len(b)) > band:
        return far
    row = [j if j <= band else far for j in range(len(b) + 1)]
    for i, x in enumerate(a, start=1):
        first, last = max(1, i - band), min(len(b), i + band)
        diagonal = row[first - 1]
        row[first - 1] = i if first == 1 else far
        for j in range(first, last + 1):
            above = row[j] if j < i + band else far
            row[j], diagonal = min(diagonal + (x != b[j - 1]), above + 1, row[j - 1] + 1), row[j]
    return row[-1]


def median(values: list[float]) -> float:
    return float(statistics.median(values))


def summary(lines: list[dict]) -> dict:
    """Table 2's numbers of the lines of pairs.jsonl and rejects.jsonl together.

    severity  mean raw cost severity in USD of the rejected plans that break the budget
    """
    pairs = [line for line in lines if "reason" not in line]
    over = [line["verdict_rejected"]["cost"]["raw"] for line in pairs]
    over = [amount for amount in over if amount > 0]
    broken = Counter(
        name for line in pairs for name, one in line["verdict_rejected"].items() if not one["passed"]
    )
    low, high = wilson(len(pairs), len(lines))
    distances = [line["edit"]["tokens"] for line in pairs]
    found = {"raw": len(lines), "pairs": len(pairs), "acceptance": len(pairs) / max(1, len(lines))}
    found |= {"acceptance_low": low, "acceptance_high": high}
    found |= {"tokens": _mean(distances), "severity_usd": _mean(over)}
    found |= {"normalised": _mean([line["severity"]["normalised"] for line in pairs])}
    found |= {"changed": dict(sorted(Counter(line["edit"]["changed"] for line in pairs).items()))}
    found |= {"proved": sum(line["edit"]["proved"] for line in pairs)}
    found |= {"broken": dict(broken.most_common())}
    found |= {"reasons": dict(Counter(line["reason"] for line in lines if "reason" in line).most_common())}
    return found | {"usd": sum(line["spent"]["usd"] for line in lines)}


def _mean(values: list) -> float | None:
    return sum(values) / len(values) if values else None


def summary_table(found: dict, domain: str) -> str:
    """Table 2 beside the paper's column of the world, and what was left out."""
    raw, pairs, acceptance, tokens, usd = TABLE_2[domain]
    interval = f"{100 * found['acceptance_low']:.1f} to {100 * found['acceptance_high']:.1f} %"
    rows = [
        ["raw generations", found["raw"], raw],
        ["verified pairs", found["pairs"], pairs],
        [f"acceptance rate ({interval})", f"{100 * found['acceptance']:.1f} %", f"{100 * acceptance:.1f} %"],
        ["mean token distance", _shown(found["tokens"]), tokens],
        ["mean severity of the rejected, USD over budget", _shown(found["severity_usd"]), usd],
    ]
    lines = [table(["", "here", "paper"], rows)]
    lines.append(f"changed items: {found['changed']}; proved minimal: {found['proved']} of {found['pairs']}")
    lines.append(f"broken by rejected plans: {found['broken']}")
    lines.append(f"no pair: {found['reasons'] or 'none'}; without a reply: {found['unanswered']}")
    return "\n".join([*lines, f"replies cost ${found['usd']:.2f}"])


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def graph_table(found: dict[str, dict[str, float]]) -> str:
    """Table 7 beside the paper's."""
    rows = []
    for domain, means in found.items():
        for name, value in means.items():
            if name in TABLE_7[domain]:
                rows.append([f"{domain} {name}", f"{value:.2f}", TABLE_7[domain][name]])
    return table(["mean per instance", "here", "paper"], rows)


def tau_table(found: dict[str, float], domain: str) -> str:
    """Table 8 beside the paper's."""
    rows = [[name, f"{value:g}", TABLE_8[domain].get(name, "–")] for name, value in found.items()]
    return table(["median raw severity", "here", "paper"], rows)


# contamination


def ngrams(text: str, size: int = NGRAM) -> set[int]:
    """Hashes of all runs of `size` words, lower case, without marks."""
    found = re.findall(r"\w+", text.lower())
    return {hash(tuple(found[i : i + size])) for i in range(len(found) - size + 1)}


def texts(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(file, text) of files and folders: each text in a JSON file or line by itself, other files whole.

    raises  ValueError for a path without a file that is read, or a file too large
    """
    for path in map(Path, paths):
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in READ)
        if not files:
            raise ValueError(f"{path} holds no file of {', '.join(READ)}; name the benchmark's folder")
        for file in files:
            if file.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"{file} has more than {MAX_FILE_BYTES} bytes; leave it out")
            content = file.read_text(encoding="utf-8", errors="replace")
            if file.suffix not in (".json", ".jsonl"):
                yield str(file), content
                continue
            for part in content.splitlines() if file.suffix == ".jsonl" else [content]:
                yield str(file), _plain(part)


def _plain(text: str) -> str:
    """Keys and values of a JSON document as text; the text itself where it is none."""
    try:
        return " ".join(_strings(json.loads(text)))
    except (ValueError, RecursionError):
        return text


def _strings(value) -> Iterator[str]:
    """Keys and values of a JSON document as text, in order."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield str(key)
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)
    elif value is not None:
        yield str(value)


def contamination(plans: list[str], paths: Iterable[str]) -> list[dict]:
    """Per path the largest and mean share of a plan's 8-grams that some text there has.

    plans    texts that are audited
    returns  [{"path", "texts", "max", "mean", "plans": with any overlap}]
    """
    grams = [ngrams(plan) for plan in plans]
    every = set().union(*grams)
    rows = []
    for path in paths:
        seen, count = set(), 0
        for _, text in texts([path]):
            seen |= every & ngrams(text)
            count += 1
        shares = [len(own & seen) / len(own) if own else 0.0 for own in grams]
        row = {"path": str(path), "texts": count, "max": max(shares), "mean": _mean(shares)}
        rows.append(row | {"plans": sum(share > 0 for share in shares)})
    return rows


def run_contamination(cfg) -> list[dict]:
    """--do contamination: chosen and rejected plans and queries of pairs.jsonl against `against`."""
    if not cfg.against:
        raise ValueError("against is empty; give --against FOLDER of the benchmark's texts")
    lines = read_lines(Path(cfg.out) / "pairs.jsonl")
    rows = []
    for name, found in (
        ("plans", [line[side] for line in lines for side in ("chosen", "rejected")]),
        ("queries", [line["messages"][-1]["content"] for line in lines]),
    ):
        rows += [{"of": name, **row} for row in contamination(found, cfg.against)]
    write_json(Path(cfg.out) / "contamination.json", rows)
    head = ["of", "against", "texts", "max 8-gram overlap", "mean", "with any"]
    shown = [
        [r["of"], r["path"], r["texts"], f"{100 * r['max']:.1f} %", f"{100 * r['mean']:.2f} %", r["plans"]]
        for r in rows
    ]
    print(table(head, shown))
    return rows


# audit by hand


def run_audit(cfg) -> dict:
    """--do audit: audit.jsonl with `audit_n` drawn pairs to label, without what the verifier found."""
    lines = read_lines(Path(cfg.out) / "pairs.jsonl")
    if cfg.audit_n > len(lines):
        raise ValueError(f"audit_n={cfg.audit_n}: there are {len(lines)} pairs; lower it")
    path = Path(cfg.out) / "audit.jsonl"
    if path.exists():
        raise ValueError(f"{path} exists, perhaps with labels; move it away first")
    rng = random.Random(f"audit/{cfg.seed}")
    rows = []
    for line in rng.sample(lines, cfg.audit_n):
        sides = rng.sample(("chosen", "rejected"), 2)  # so that the order tells nothing
        row = {"id": line["id"], "prompt": line["messages"][0]["content"]}
        rows.append(
            row | {"first": line[sides[0]], "second": line[sides[1]], "label_first": "", "label_second": ""}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: write pass or fail into label_first and label_second of each line, then --do grade")
    return {"pairs": len(rows)}


def grade(labelled: list[dict], lines: list[dict], rejects: list[dict]) -> dict:
    """Table 9: the verifier against labels by hand, per pair.

    labelled  lines of audit.jsonl; lines, rejects: of pairs.jsonl and rejects.jsonl
    returns   name -> {"value", "low", "high", "count", "n"}
    raises    ValueError for a label that is neither pass nor fail
    """
    known = {line["id"]: line for line in lines}
    counts = Counter()
    for number, row in enumerate(labelled, start=1):
        line = known.get(row["id"])
        if line is None:
            raise ValueError(f"audit.jsonl line {number}: {row['id']} is not among the pairs")
        wrong = set()
        for place in ("first", "second"):
            label = row[f"label_{place}"]
            if label not in ("pass", "fail"):
                raise ValueError(f"audit.jsonl line {number}: label_{place}={label!r}, wanted pass or fail")
            verdict = line["verdict_chosen" if row[place] == line["chosen"] else "verdict_rejected"]
            passed = all(one["passed"] for one in verdict.values())
            if passed != (label == "pass"):
                wrong.add("false pass" if passed else "false fail")
        counts.update(wrong or {"agreement"})
    undecoded = sum(line["reason"].endswith("decode failure") for line in rejects)
    found = {name: _rate(counts[name], len(labelled)) for name in ("agreement", "false pass", "false fail")}
    return found | {"decode failures": _rate(undecoded, len(lines) + len(rejects))}


def _rate(successes: int, n: int) -> dict:
    low, high = wilson(successes, n)
    return {"value": successes / max(1, n), "low": low, "high": high, "count": successes, "n": n}


def run_grade(cfg) -> dict:
    """--do grade: Table 9 from audit.jsonl."""
    out = Path(cfg.out)
    rejects = read_lines(out / "rejects.jsonl", may_be_empty=True)
    found = grade(read_lines(out / "audit.jsonl"), read_lines(out / "pairs.jsonl"), rejects)
    write_json(out / "audit.json", found)
    rows = []
    for name, rate in found.items():
        value, low, high = (f"{100 * rate[key]:.1f} %" for key in ("value", "low", "high"))
        counts = f"{value} ({rate['count']}/{rate['n']})"
        rows.append([name, counts, f"{low} to {high}", f"{100 * TABLE_9[name]:.1f} %"])
    print(table(["", "here", "95 % interval", "paper"], rows))
    return found


def run_stats(cfg) -> dict:
    """--do stats: Table 2 again from the stored files."""
    out = Path(cfg.out)
    lines = read_lines(out / "pairs.jsonl") + read_lines(out / "rejects.jsonl", may_be_empty=True)
    found = summary(lines) | {"unanswered": 0}
    print(summary_table(found, cfg.domain))
    return found


def read_lines(path: Path, *, may_be_empty: bool = False) -> list[dict]:
    """Objects of a JSONL file. Raises ValueError that names file and line."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = [_object(line, f"{path} line {number}") for number, line in enumerate(text.splitlines(), start=1)]
    if not found and not may_be_empty:
        raise ValueError(f"{path} holds no line; make pairs first (--do pairs)")
    return found


def _object(line: str, where: str) -> dict:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{where} is no JSON object; --do pairs mends a last line that was cut off")
    return found


COMMANDS = {"stats": run_stats, "contamination": run_contamination, "audit": run_audit, "grade": run_grade}
