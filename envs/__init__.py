"""Worlds and plans. One file is one benchmark; knows no tensors."""

from envs import naturalplan, triptailor

BENCHMARKS = {"naturalplan": naturalplan, "triptailor": triptailor}
