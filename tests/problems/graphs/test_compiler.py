"""``compile = true``: the same numbers up to rounding, the time it takes, and a clear error without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedstrata as fs
from fedstrata.data.batch import Batch
from fedstrata.problems.graphs import compiler
from fedstrata.problems.graphs.products import unfold_small_products
from fedstrata.problems.graphs.trace import record
from fedstrata.problems.oracles import Oracles


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise RuntimeError("no g++ here")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    example = fs.quadratic(clients=3)
    with pytest.raises(fs.InputError, match=r"needs a C\+\+ compiler.*Install one .*no g\+\+ here"):
        fs.train(example.problem, example.data, fs.FedAvg(lr=0.1), rounds=1, compile=True)


@pytest.mark.slow
def test_a_compiled_run_has_the_same_numbers_and_says_how_long_it_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    example = fs.quadratic(clients=3, samples=6)
    settings = {"rounds": 3, "batch_size": 2, "seed": 1}
    plain = fs.train(example.problem, example.data, fs.FedAvg(lr=0.1, steps=2), **settings)
    compiled = fs.train(example.problem, example.data, fs.FedAvg(lr=0.1, steps=2), compile=True, **settings)
    torch.testing.assert_close(compiled.x, plain.x, rtol=1e-10, atol=1e-12)
    assert compiled.summary["compile_seconds"] > 0 and "compile_seconds" not in plain.summary
    assert any((tmp_path / "cache").iterdir()), "compiled code is kept"
    assert compiled.summary["bytes_up"] == plain.summary["bytes_up"]


def test_a_cache_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(compiler, "check_compiler", lambda: None)
    with pytest.raises(fs.InputError, match=r"file/cache for compiled code \(TORCHINDUCTOR_CACHE_DIR\) cannot be used"):
        compiler.Compiler()


def test_the_cache_of_compiled_code_is_the_users_unless_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that what the compiler sets is undone
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(compiler, "check_compiler", lambda: None)
    compiler.Compiler()
    assert compiler.os.environ["TORCHINDUCTOR_CACHE_DIR"].endswith(".cache/fedstrata/compiled")


@pytest.mark.parametrize(("rows", "terms", "columns"), [(10, 784, 3), (3, 70, 40), (30, 5, 40)])
def test_small_products_are_unfolded_with_the_same_numbers(rows: int, terms: int, columns: int) -> None:
    a, b = torch.randn(2, rows, terms).double(), torch.randn(2, terms, columns).double()
    graph = record(torch.bmm, a, b)
    unfold_small_products(graph)
    assert not any(node.target is torch.ops.aten.bmm.default for node in graph.graph.nodes)
    torch.testing.assert_close(graph(a, b), torch.bmm(a, b))


def test_graphs_with_convolutions_are_not_compiled_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    own = compiler.Compiler()
    monkeypatch.setattr(compiler.Compiler, "__call__", lambda *_: pytest.fail("compiled a convolution"))
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 3))
    problem = fs.erm(model)
    batch = Batch(((torch.randn(1, 4, 1, 8, 8), torch.randint(0, 3, (1, 4))),))
    with torch.no_grad():
        ours, theirs = (Oracles(problem, c).outer_grads(problem.x0[None], None, batch)[0] for c in (own, None))
    assert torch.equal(ours, theirs)


def test_a_problem_that_pytorch_cannot_compile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile", lambda *_: 1 / 0)
    problem = fs.erm(torch.nn.Linear(3, 2))
    batch = Batch(((torch.randn(1, 4, 3), torch.randint(0, 2, (1, 4))),))
    with torch.no_grad(), pytest.raises(fs.FedstrataError, match="leave out compile"):
        Oracles(problem, compiler.Compiler()).outer_grads(problem.x0[None], None, batch)


def test_large_products_stay_calls() -> None:
    graph = record(torch.bmm, torch.randn(2, 64, 64), torch.randn(2, 64, 64))
    unfold_small_products(graph)
    assert any(node.target is torch.ops.aten.bmm.default for node in graph.graph.nodes)
