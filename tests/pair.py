"""Two processes joined by gloo, started once per session: `run_pair(fn, *args)` calls fn(*args) on both."""

import atexit
import functools
import multiprocessing
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as torch_dist

START_S = 300  # two interpreters import torch; on a busy machine that takes a while
WAIT_S = 60  # a collective that only one rank enters ends the test, not the machine


def run_pair(fn, *args) -> list:
    """[fn(*args) on rank 0, on rank 1]; fn is a module's function. An exception there is raised here."""
    pipes = _pipes()
    for pipe in pipes:
        pipe.send((fn, args))
    answers = []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(WAIT_S):
            _stop_pair()
            raise TimeoutError(f"rank {rank} did not return from {fn.__name__} within {WAIT_S} s")
        answers.append(pipe.recv())
    for failed, answer in answers:
        if failed:
            raise AssertionError(answer)
    return [answer for _, answer in answers]


def _serve(rank, store, pipe):
    torch.set_num_threads(1)
    torch_dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    pipe.send("ready")
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, fn(*args)))
        except BaseException:
            pipe.send((True, f"rank {rank}:\n{traceback.format_exc()}"))


@functools.cache
def _pipes():
    context = multiprocessing.get_context("spawn")
    store = Path(tempfile.mkdtemp()) / "rendezvous"
    pipes = []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
        process.start()
        _processes.append(process)
        pipes.append(ours)
    if not all(pipe.poll(START_S) and pipe.recv() == "ready" for pipe in pipes):
        raise TimeoutError(f"two gloo processes did not start within {START_S} s")
    return pipes


_processes: list = []


@atexit.register
def _stop_pair():
    for process in _processes:
        process.kill()
    _processes.clear()
    _pipes.cache_clear()
