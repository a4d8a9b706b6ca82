"""Worlds and plans. One file is one benchmark; knows no tensors."""

from envs import naturalplan, planbench, triptailor

BENCHMARKS = {"naturalplan": naturalplan, "planbench": planbench, "triptailor": triptailor}
