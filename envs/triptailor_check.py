"""What can be read of a TripTailor folder, counted: run it before a run.

    python -m envs.triptailor_check DIR

Reads every request, place, ride and human plan; what is wrong with a file is an error with file and row.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from envs.triptailor import TripTailor, load, to_json
from envs.triptailor_text import read_record


def describe(folder: Path) -> list[str]:
    """Lines of text, one per count. Raises ValueError for a folder that cannot be used."""
    lines, data = [], None
    for split in ("train", "test"):
        if not (folder / f"{split}.json").is_file():
            lines.append(f"{split}: no {split}.json")
            continue
        envs = load(split, folder)
        lines += [f"{split}: {len(envs)} requests", *plans(envs)]
        data = envs[0].data if envs else data
    if data is not None:
        for kind, cities in data.places.items():
            lines.append(f"{kind}: {sum(map(len, cities.values()))} in {len(cities)} cities")
    return lines


def plans(envs: list[TripTailor]) -> list[str]:
    """How many human plans there are, are read from their texts, and hold the constraints; and what was left
    out of the texts, by reason."""
    texts = [env for env in envs if env.task.data.get("final_plan")]
    readings = [read_record(env.task.data) for env in texts]
    reasons = Counter(text.partition(":")[0] for reading in readings for text in reading.unread)
    lines = [f"  day texts: {sum(r.plan is not None for r in readings)} of {len(texts)} read as plans"]
    lines += [f"    {reason}: {count}" for reason, count in reasons.most_common()]
    strict, official = [], []
    for env in envs:
        twin = env.fork()
        try:
            twin.answer(to_json(env.reference_plan()))
        except ValueError:
            continue
        strict.append(twin.verify())
        official.append(twin.official())
    scored = [checks["pass"] for checks in official if checks is not None]
    lines.append(f"  reference plans: {len(strict)} of {len(envs)} requests have one")
    lines.append(f"    valid, strict: {sum(verdict.passed for verdict in strict)} of {len(strict)}")
    lines.append(f"    valid, official: {sum(scored)} of {len(scored)} with information")
    failed = Counter(name for verdict in strict for name, holds in verdict.checks.items() if not holds)
    return [*lines, *(f"    fails {name}, strict: {count}" for name, count in failed.most_common())]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.triptailor_check", description="Check a folder.")
    parser.add_argument("folder", help="a folder in TripTailor's layout")
    try:
        print("\n".join(describe(Path(parser.parse_args().folder))))
    except ValueError as error:
        sys.exit(f"triptailor_check: {error}")


if __name__ == "__main__":
    main()
