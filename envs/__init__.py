"""Worlds and plans. One file is one benchmark; knows no tensors."""

from envs import naturalplan, planbench, travelplanner, triptailor

BENCHMARKS = {
    "naturalplan": naturalplan,
    "planbench": planbench,
    "travelplanner": travelplanner,
    "triptailor": triptailor,
}
