"""Worlds and plans. One file is one benchmark; knows no tensors."""

from envs import triptailor

BENCHMARKS = {"triptailor": triptailor}
