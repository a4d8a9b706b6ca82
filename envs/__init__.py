"""Worlds and plans. One file is one benchmark; knows no tensors."""

from envs import alfworld, musique, naturalplan, planbench, travelplanner, triptailor

BENCHMARKS = {
    "alfworld": alfworld,
    "musique": musique,
    "naturalplan": naturalplan,
    "planbench": planbench,
    "travelplanner": travelplanner,
    "triptailor": triptailor,
}
