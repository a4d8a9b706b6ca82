"""What stored comparisons say of the judges: does the order decide, or the length, or whose model it is?

Everything is computed from items["judges"], judge's name -> a record of judge.judge_both, so the table can be
made again without a judge. A comparison that failed is counted and left out; both orders of a pair must be
known wherever the two are set against each other.
"""

import math

from nanoplan import stats
from nanoplan.judge import win_share
from nanoplan.log import table


def statistics(items: list[dict]) -> dict[str, dict]:
    """Judge's name -> what its comparisons say; shares in [0, 1], None where nothing is known.

    items  each with "judges": {name: record of judge_both}
    returns  per judge
      kind, family     as stored
      pairs, errors    plans compared, and of these the ones without a result
      win_rate, low, high   mean win share over pairs, both orders averaged, with its 95 % interval
      tie_rate         share of comparisons with equal scores
      win_first, win_second   share won by the plan when it is shown first, and second
      first_wins       of the comparisons that somebody won, the share won by whoever was shown first;
                       0.5 = no position bias
      flips            share of pairs whose winner depends on the order
      length_ratio     geometric mean of the plan's length over the reference's
      win_longer, win_shorter   mean win share of the plans that are longer, and shorter, than the reference
      longer_wins      of the pairs with unequal lengths that somebody won in both orders, the share won by
                       the longer text; 0.5 = no length bias (or one that quality hides)
    """
    stored = [item.get("judges") or {} for item in items]
    names = dict.fromkeys(name for records in stored for name in records)
    return {name: _of([records[name] for records in stored if name in records]) for name in names}


def _of(records: list[dict]) -> dict:
    known = [record for record in records if win_share(record) is not None]
    shares = [win_share(record) for record in known]
    first = [record["outcomes"][0] for record in known]  # the plan shown first
    second = [record["outcomes"][1] for record in known]
    decided = [(out, 0) for out in first if out != "tie"] + [(out, 1) for out in second if out != "tie"]
    low, high = stats.wilson(round(sum(shares)), len(shares))
    lengths = [record["chars"] for record in known]
    longer = [share for share, (own, other) in zip(shares, lengths, strict=True) if own > other]
    shorter = [share for share, (own, other) in zip(shares, lengths, strict=True) if own < other]
    agreed = [  # (the plan won, it is the longer one)
        (a == "win", own > other)
        for a, b, (own, other) in zip(first, second, lengths, strict=True)
        if a == b != "tie" and own != other
    ]
    ratios = [math.log(own / other) for own, other in lengths if own and other]
    return {
        "kind": records[0]["kind"],
        "family": records[0]["family"],
        "pairs": len(records),
        "errors": len(records) - len(known),
        "win_rate": _mean(shares),
        "low": low if known else None,
        "high": high if known else None,
        "tie_rate": _mean([outcome == "tie" for outcome in first + second]),
        "win_first": _mean([outcome == "win" for outcome in first]),
        "win_second": _mean([outcome == "win" for outcome in second]),
        "first_wins": _mean([(outcome == "win") == (place == 0) for outcome, place in decided]),
        "flips": _mean([a != b for a, b in zip(first, second, strict=True)]),
        "length_ratio": math.exp(_mean(ratios)) if ratios else None,
        "win_longer": _mean(longer),
        "win_shorter": _mean(shorter),
        "longer_wins": _mean([won == is_longer for won, is_longer in agreed]),
    }


def panel_wins(items: list[dict], *, kind: str = "llm") -> list[bool | None]:
    """TripTailor's win of each item: the mean of the plan's scores over all judges of a kind and both orders
    is strictly above that of the reference's. A judge that failed on an item is left out of its means; None
    where none has scores."""
    wins: list[bool | None] = []
    for item in items:
        records = [r for r in (item.get("judges") or {}).values() if r["kind"] == kind and r["own"]]
        gap = sum(sum(r["own"]) / len(r["own"]) - sum(r["reference"]) / len(r["reference"]) for r in records)
        wins.append(gap > 0 if records else None)
    return wins


def family_gap(statistics: dict[str, dict], policy_family: str) -> float | None:
    """Mean win rate of the LLM judges of the policy's own family minus that of the others: how much of the
    wins could be kinship. None unless there are judges of both sorts."""
    rows = [row for row in statistics.values() if row["kind"] == "llm" and row["win_rate"] is not None]
    own = [row["win_rate"] for row in rows if row["family"] == policy_family]
    others = [row["win_rate"] for row in rows if row["family"] != policy_family]
    return _mean(own) - _mean(others) if own and others else None


TABLE = {  # row of the table -> field of `statistics`
    "wins, both orders": "win_rate", "ties": "tie_rate", "wins shown first": "win_first",
    "wins shown second": "win_second", "first one wins": "first_wins", "winner depends on order": "flips",
    "length, plan / reference": "length_ratio", "wins when longer": "win_longer",
    "wins when shorter": "win_shorter", "longer one wins": "longer_wins",
}  # fmt: skip


def judges_table(statistics: dict[str, dict]) -> str:
    """Markdown, one column a judge; a dash where nothing is known."""
    columns = statistics.values()
    rows = [[name, *(row[name] or "–" for row in columns)] for name in ("kind", "family")]
    rows += [[name, *(row[name] for row in columns)] for name in ("pairs", "errors")]
    for label, field in TABLE.items():
        rows.append([label, *(_cell(row[field], share=field != "length_ratio") for row in columns)])
    spans = [f"{_cell(row['low'])} to {_cell(row['high'])}" if row["pairs"] else "–" for row in columns]
    rows.insert(5, ["  95 % interval", *spans])
    return table(["", *statistics], rows)


def _mean(values: list) -> float | None:
    return sum(values) / len(values) if values else None


def _cell(value: float | None, *, share: bool = True) -> str:
    return "–" if value is None else f"{100 * value:.1f} %" if share else f"{value:.2f}"
