"""What the tables of the laptop recipes share."""

import json
import statistics
from pathlib import Path


def by_row(folder: Path, file: str) -> dict[str, list[dict]]:
    """Row -> what the runs of its seeds left: folder/SEED/ROW/file."""
    found: dict[str, list[dict]] = {}
    for path in sorted(folder.glob(f"*/*/{file}")):
        row = path.relative_to(folder).parts[1]
        found.setdefault(row, []).append(json.loads(path.read_text()))
    return found


def show(values: list[float], scale: float = 100.0, digits: int = 1) -> str:
    """The mean over seeds and, behind ±, half the spread between them; a dash for none."""
    if not values:
        return "–"
    middle, spread = statistics.fmean(values), (max(values) - min(values)) / 2
    return f"{scale * middle:.{digits}f} ± {scale * spread:.{digits}f}"
