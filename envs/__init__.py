"""Worlds and plans. One file is one benchmark; knows no tensors."""

import warnings
from types import SimpleNamespace

from envs import alfworld, musique, naturalplan, planbench, synplan, travelplanner, triptailor

# `python -m envs.musique serve` runs a file that is imported here; it keeps no state of its own
warnings.filterwarnings("ignore", "'envs.musique' found in sys.modules", RuntimeWarning)

BENCHMARKS = {
    "alfworld": alfworld,
    "musique": musique,
    "naturalplan": naturalplan,
    "planbench": planbench,
    "synplan_retail": SimpleNamespace(load=synplan.load_retail),
    "synplan_travel": synplan,
    "travelplanner": travelplanner,
    "triptailor": triptailor,
}
