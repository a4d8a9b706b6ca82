"""The table of recipes/laptop_critic.sh: mean over seeds and, behind ±, half the spread between them.

python recipes/laptop_critic_table.py runs/laptop_critic
"""

import statistics
import sys
from pathlib import Path

from laptop_table import by_row, show

PAPER = {  # points over no critic by self-call, MuSiQue with attached passages, tables 1, 2, 5; other models
    "n1": "", "n5": "", "n5_half": "", "gumbel": "", "nocritic": "", "self": "", "review": "",
    "checklist": "", "selfcall": 25.31, "step1": "", "step2": "", "step3": "", "transfer": "9.31 to 13.19",
    "own": "", "grpo": "", "grpo_transfer": 2.00, "grpo_step2": "", "grpo_transfer_step2": "",
    "grpo_selfcall": 13.88,
}  # fmt: skip
COLUMNS = (("before", "success_no_critic"), ("before", "success_untrained"), ("after", "success"))


def main(folder: Path) -> None:
    found = by_row(folder, "summary.json")
    print("| row | seeds | no critic, % | critic at the start, % | trained, % | points | paper's points |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in [name for name in PAPER if name in found]:
        columns = [[s[when][name] for s in found[row] if s[when]] for when, name in COLUMNS]
        alone, last = columns[0], columns[2] or columns[1]  # what is only measured has no last column
        gain = 100 * (statistics.fmean(last) - statistics.fmean(alone))
        cells = " | ".join(map(show, columns))
        print(f"| {row} | {len(found[row])} | {cells} | {gain:+.1f} | {PAPER[row] or '–'} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
