"""Compile recorded graphs to machine code with PyTorch's inductor: ``compile = true``."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fedstrata.core.errors import FedstrataError, InputError
from fedstrata.problems.graphs.products import unfold_small_products

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable of PyTorch that says where compiled code is kept."""


class Compiler:
    """Compiles graphs; the code is kept between runs, in ``~/.cache/fedstrata/compiled`` unless PyTorch's variable
    TORCHINDUCTOR_CACHE_DIR names another folder.

    graphs:  how many graphs were compiled, or read from the cache.
    seconds: how long that took.
    """

    def __init__(self) -> None:
        check_compiler()
        folder = os.environ.setdefault(_CACHE, str(Path("~/.cache/fedstrata/compiled").expanduser()))
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"The folder {folder} for compiled code ({_CACHE}) cannot be used: {error}.") from None
        self.graphs = 0
        self.seconds = 0.0

    def wants(self, graph: fx.GraphModule) -> bool:
        """Whether compiling a graph pays: with convolutions, the code is slower than the library's calls."""
        return not any(node.target is torch.ops.aten.convolution.default for node in graph.graph.nodes)

    def __call__(self, graph: fx.GraphModule, tensors: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        """Return the compiled graph, for tensors of these shapes."""
        from torch import _inductor

        begun = time.perf_counter()
        unfold_small_products(graph)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about PyTorch's own code
                with _inductor.config.patch(**_threads()):
                    compiled: Callable[..., Any] = _inductor.compile(graph, list(tensors))
                compiled(*(t.clone() for t in tensors))
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise FedstrataError(
                f"PyTorch cannot compile this problem: leave out compile = true. ({reason})"
            ) from error
        self.graphs += 1
        self.seconds += time.perf_counter() - begun
        return compiled


def _threads() -> dict[str, Any]:
    """Return settings of the inductor: a forked process inherits its pool of threads, but not the threads."""
    return {"compile_threads": 1} if multiprocessing.parent_process() is not None else {}


def check_compiler() -> None:
    """Raise if there is no C++ compiler, which ``compile = true`` needs on a CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise InputError(
            "compile = true needs a C++ compiler, and none was found. Install one (g++ or clang), set the environment "
            f"variable CXX to its path, or leave compile out: results are the same up to rounding. ({error})"
        ) from None
