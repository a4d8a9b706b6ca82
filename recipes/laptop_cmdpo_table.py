"""The table of recipes/laptop_cmdpo.sh: mean over seeds and, behind ±, half the spread between them.

python recipes/laptop_cmdpo_table.py runs/laptop_cmdpo
"""

import statistics
import sys
from pathlib import Path

from laptop_table import by_row, show

PAPER = {  # pass rate on TravelPlanner, percent, tables 3, 4 and 11; another world and model
    "sft": 35.6, "rewrite_dpo": 64.1, "edit_dpo": 78.3, "rewrite_cmdpo": 72.6, "edit_cmdpo": 89.2,
    "random": 65.6, "length": 67.8, "reward_model": 73.3, "raw": 84.4,
}  # fmt: skip
COLUMNS = {"pass_rate": (100.0, 1), "decode_rate": (100.0, 1), "soft_score": (1.0, 3)}  # scale, digits


def main(folder: Path) -> None:
    found = by_row(folder, "summary.json")
    print(
        "| row | seeds | pass rate, % | decode rate, % | soft score | points over SFT | minutes | paper, % |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in sorted(
        found, key=lambda name: (name not in PAPER, list(PAPER).index(name) if name in PAPER else 0)
    ):
        seeds = found[row]
        cells = [show([s["after"][name] for s in seeds], *form) for name, form in COLUMNS.items()]
        gains = [100 * (s["after"]["pass_rate"] - s["before"]["pass_rate"]) for s in seeds]
        gain = "–" if row == "sft" else f"{statistics.fmean(gains):+.1f}"
        minutes = statistics.fmean(s["seconds"] for s in seeds) / 60
        print(
            f"| {row} | {len(seeds)} | {' | '.join(cells)} | {gain} | {minutes:.1f} | {PAPER.get(row, '–')} |"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
