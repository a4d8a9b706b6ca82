"""The table of recipes/laptop_anchored.sh: mean over seeds and, behind ±, half the spread between them.

python recipes/laptop_anchored_table.py runs/laptop_anchored
"""

import sys
from pathlib import Path

from laptop_table import by_row, show

PAPER = {  # valid and LLM win in percent, of 703 real requests: another world, model, judge; "" = not given
    "untrained": ("46.7", "45.4"), "sft": ("", "39.5"), "constraint": ("", "55.5"), "score": ("", "38.5"),
    "ungated": ("", ""), "anchored": ("", "61.6"), "syn": ("", "43.3"), "dpo": ("", ""),
    "best_of_8.constraints": ("64.6", ""), "best_of_8.oracle": ("64.6", ""), "best_of_8.rubric": ("46.1", ""),
}  # fmt: skip


def main(folder: Path) -> None:
    found = by_row(folder, "eval/results.json") | by_row(folder, "results.json")  # the latter of best_of_8
    print(
        "| row | seeds | valid, % | preferred, % of the valid | valid and preferred, % "
        "| paper: valid, % | LLM win, % |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in [name for name in PAPER if name in found]:
        valid, win = (
            show([results["strict"][rate]["value"] for results in found[row]])
            for rate in ("valid_rate", "win_rate")
        )
        cells = [valid, show([results["judges"]["rubric"]["win_rate"] for results in found[row]]), win]
        paper = [text or "–" for text in PAPER[row]]
        print(f"| {row} | {len(found[row])} | {' | '.join([*cells, *paper])} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
