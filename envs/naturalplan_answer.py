"""What the three tasks of NaturalPlan share: a record's fields, the part of an answer that counts, and the
list of what is broken in it."""

from envs.base import Verdict, clip

MAX_ANSWER_CHARS = 20_000  # a longer answer is not read in strict mode; ours, the longest gold has 2,000
MAX_REASONS = 20  # reasons kept per verdict; ours


def field(record: dict, key: str, kind: type, where: str):
    """record[key]. Raises ValueError naming `where` (file and record), key and what was wanted."""
    if key not in record:
        raise ValueError(f"{where}: no {key!r}, wanted a {kind.__name__}; fix the record")
    value = record[key]
    if not isinstance(value, kind) or isinstance(value, bool) or not value:
        raise ValueError(f"{where}: {key}={str(value)[:60]!r}, wanted a {kind.__name__}; fix the record")
    return value


def count(record: dict, key: str, where: str) -> int:
    """record[key] as an integer: the files write counts as "3" and as 3. Raises like field()."""
    if key not in record:
        raise ValueError(f"{where}: no {key!r}, wanted a whole number; fix the record")
    value = str(record[key])
    if not (value.isascii() and value.isdigit() and len(value) < 4):
        raise ValueError(f"{where}: {key}={value[:60]!r}, wanted a whole number; fix the record")
    return int(value)


def final_text(answer: object) -> str:
    """The part of an answer that strict mode reads: after thinking, after the first "SOLUTION:" that is
    followed by text, and before anything that opens another task, without stars.

    raises  ValueError with a one-line reason if `answer` is no text, too long or blank
    """
    if not isinstance(answer, str):
        raise ValueError(f"the answer is a {type(answer).__name__}, wanted text")
    if len(answer) > MAX_ANSWER_CHARS:
        raise ValueError(f"{len(answer)} characters, at most {MAX_ANSWER_CHARS} are read")
    parts = answer.rpartition("</think>")[2].split("SOLUTION:")
    text = next((part for part in parts[1:] if part.strip()), "") if len(parts) > 1 else parts[0]
    text = text.partition("TASK:")[0].replace("*", "")
    if not text.strip():
        raise ValueError("the answer is empty")
    return text


class Findings:
    """What is broken: amounts add up per check, reasons are kept for people."""

    def __init__(self, checks: tuple[str, ...]):
        self.severity = dict.fromkeys(checks, 0.0)
        self.reasons: list[str] = []

    def add(self, check: str, amount: float, reason: str):
        """Nothing for an amount of 0, so that callers can pass a distance as it is."""
        assert amount >= 0, (check, amount)
        self.severity[check] += amount
        if amount and len(self.reasons) < MAX_REASONS:
            self.reasons.append(clip(f"{check}: {reason}", 200))

    def verdict(self) -> Verdict:
        checks = {check: amount == 0 for check, amount in self.severity.items()}
        return Verdict(all(checks.values()), checks, self.severity, self.reasons)


def unreadable(checks: tuple[str, ...], reason: str) -> Verdict:
    """An answer that holds no plan fails every check, with severity 1 each."""
    severity = dict.fromkeys(checks, 1.0)
    return Verdict(False, dict.fromkeys(checks, False), severity, [clip(f"no plan: {reason}", 200)])
