"""Worlds and plans. One file is one benchmark; knows no tensors."""

from envs import musique, naturalplan, planbench, travelplanner, triptailor

BENCHMARKS = {
    "musique": musique,
    "naturalplan": naturalplan,
    "planbench": planbench,
    "travelplanner": travelplanner,
    "triptailor": triptailor,
}
