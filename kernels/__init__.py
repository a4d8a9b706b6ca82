"""Kernels: tensors in, tensors out; nothing here knows what a token means.

Shape legend of the repository:
  T  tokens of a packed batch        S  sequences in it          R  rows the sampler decodes
  C  cache tokens per row            D  width                    F  feed-forward width
  H  query heads                     J  key/value heads          E  head width
  V  vocabulary                      G  group size               r  LoRA rank
  N  rows of T that are trained on (in a critic's context: continuations per critique)

Which path runs is decided once, here, at import:
  a GPU of compute capability 8.0 or more, triton installed   the Triton kernels, for CUDA tensors
  TRITON_INTERPRET=1                                          the same kernels, interpreted, for any tensor
  otherwise                                                   plain torch
NANOPLAN_KERNELS=torch|triton overrides this, to compare the two. `PATH` says what was chosen.
"""

import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # optional: without it everything runs on the torch path
    triton = tl = None


def settle_vml() -> None:
    """Call each of MKL's vector functions once, on one element and so on one thread.

    The first call chooses its implementation. When it comes from several threads at once, one of them may run
    one of half precision for its whole share (pytorch issue 188792): about one process in fifteen had RoPE's
    cosines off by 1e-4 in its first pass, and no two runs were sure to be equal.
    """
    for dtype in (torch.float32, torch.float64):
        for name in ("cos", "sin", "exp", "expm1", "log", "log1p", "sqrt", "tanh"):
            getattr(torch, name)(torch.ones(1, dtype=dtype))


def choose_path(wanted: str, *, installed: bool, interpret: bool, gpu: bool) -> str:
    """Name the path for this process: "torch" or "triton".

    wanted   value of NANOPLAN_KERNELS: "", "torch" or "triton"
    raises   ValueError for any other value, and when triton is asked for and cannot run
    """
    if wanted not in ("", "torch", "triton"):
        raise ValueError(f"NANOPLAN_KERNELS={wanted!r}: wanted torch, triton or nothing; correct or unset it")
    can_run = installed and (interpret or gpu)
    if wanted == "triton" and not can_run:
        missing = (
            "triton is not installed" if not installed else "there is no GPU and TRITON_INTERPRET is not 1"
        )
        raise ValueError(
            f"NANOPLAN_KERNELS='triton' but {missing}; unset it, or set TRITON_INTERPRET=1 to interpret"
        )
    if interpret and not installed and wanted != "torch":
        raise ValueError(
            "TRITON_INTERPRET=1 but triton is not installed; install triton or unset TRITON_INTERPRET"
        )
    return wanted or ("triton" if can_run else "torch")


settle_vml()
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
PATH = choose_path(
    os.environ.get("NANOPLAN_KERNELS", ""), installed=triton is not None, interpret=INTERPRET, gpu=GPU
)


def runs_triton(tensor: torch.Tensor) -> bool:
    """Say whether a kernel whose input is `tensor` runs as Triton (else as torch)."""
    return PATH == "triton" and (INTERPRET or tensor.is_cuda)


def jit(function):
    """Decorate a kernel with triton.jit; without triton nothing calls it, and it stays as it is."""
    return function if triton is None else triton.jit(function)
