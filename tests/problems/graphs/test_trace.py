"""Traced graphs: the same numbers with fewer operations, and functions that cannot be traced."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.func import grad, vmap

import fedstrata as fs
from fedstrata.core.machine import keep_memory, prepared
from fedstrata.data.batch import Batch
from fedstrata.problems.graphs.simplify import simplify
from fedstrata.problems.graphs.trace import close, record, trace
from fedstrata.problems.oracles import Oracles


def loss_of(model: str) -> tuple:
    problem = fs.erm(fs.models.model(model, (1, 12, 12), 5))
    return problem, lambda x, inputs, targets: problem.outer(x, (inputs, targets))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["logreg", "mlp", "lenet5"])
def test_a_graph_gives_the_same_bits_on_other_numbers(model):
    problem, loss = loss_of(model)
    function = vmap(grad(loss))
    generator = torch.Generator().manual_seed(0)

    def numbers() -> tuple:
        x = problem.x0 + 0.1 * torch.randn(3, len(problem.x0), generator=generator)
        inputs = torch.randn(3, 4, 1, 12, 12, generator=generator)
        return x, inputs, torch.randint(0, 5, (3, 4), generator=generator)

    graph = trace(function, *numbers())
    assert graph is not None
    for _ in range(2):
        others = numbers()
        assert torch.equal(graph(*others), function(*others))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch scripts one of its functions
@pytest.mark.parametrize("model", ["logreg", "lenet5"])
def test_a_product_in_forward_mode_is_traced(model):
    problem, loss = loss_of(model)
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(len(problem.x0), generator=generator)
    batch = torch.randn(4, 1, 12, 12, generator=generator), torch.tensor([0, 3, 1, 4])

    def product(x, v, *batch):
        return torch.func.jvp(lambda z: grad(loss)(z, *batch), (x,), (v,))[1]

    graph = trace(product, problem.x0, v, *batch)
    assert graph is not None
    x = problem.x0 + 0.1
    torch.testing.assert_close(graph(x, v, *batch), product(x, v, *batch))


def test_views_that_change_nothing_are_removed_and_others_stay():
    def function(x):
        y = x.view(2, 3).expand(2, 3).transpose(0, 1).transpose(0, 1)
        return y.view(3, 2).transpose(0, 1) * 2

    x = torch.arange(6.0).view(2, 3)
    graph = record(function, x)
    before = sum(n.op == "call_function" for n in graph.graph.nodes)
    simplify(graph)
    after = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert (before, len(after)) == (7, 3)
    assert torch.equal(graph(x), function(x))


def decides_by_values(x, batch):
    return (x * batch[0]).sum() if batch[0].sum() > 0 else (x**2).sum()


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.filterwarnings("ignore:The problem by values runs one client at a time")
def test_a_function_that_branches_on_values_is_never_frozen(clients):
    assert trace(lambda x, b: decides_by_values(x, (b,)), torch.ones(2), torch.ones(1, 2)) is None
    oracles = Oracles(fs.Problem(decides_by_values, torch.zeros(2), name="by values"))
    x = torch.full((clients, 2), 3.0)
    for sign, expected in ((1.0, 1.0), (-1.0, 6.0), (1.0, 1.0)):
        batch = Batch(((torch.full((clients, 1, 2), sign),),))
        assert torch.equal(oracles.outer_grads(x, None, batch)[0], torch.full((clients, 2), expected))


SHAPED_BY_VALUES = {
    "mask": lambda x, t: (x * t)[t > 0].sum(),
    "nonzero": lambda x, t: x.sum() * len(torch.nonzero(t > 0)),
    "unique": lambda x, t: x.sum() * len(t.unique()),
    "list": lambda x, t: x.sum() * sum(t.reshape(-1).tolist()),
    "item": lambda x, t: x.sum() * t.sum().item(),
    "random": lambda x, t: (x * torch.rand(2)).sum(),
    "copied": lambda x, t: (x * copy.deepcopy(t.detach()).mean(0)).sum(),
    "format": lambda x, t: x.sum() * len(f"{t}"),
    "numpy": lambda x, t: x.sum() * float(np.asarray(t.detach()).sum()),
    "equal": lambda x, t: x.sum() if torch.equal(t, t + 0) else x.prod(),
    "contains": lambda x, t: x.sum() if 1.0 in t else x.prod(),
}


@pytest.mark.parametrize("case", SHAPED_BY_VALUES)
def test_values_never_end_up_in_a_graph(case):
    assert trace(lambda x, t: (grad(SHAPED_BY_VALUES[case])(x, t),), torch.ones(2), torch.ones(1, 2)) is None


@pytest.mark.parametrize("case", [c for c in SHAPED_BY_VALUES if c not in ("random", "format")])
@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.filterwarnings("ignore:.* runs one client at a time")
def test_functions_shaped_by_values_give_what_plain_autograd_gives(case, clients):
    function = SHAPED_BY_VALUES[case]
    oracles = Oracles(fs.Problem(lambda x, batch: function(x, batch[0]), torch.zeros(2), name=case))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(clients, 2, generator=generator)
        t = torch.randint(-1, 2, (clients, 3, 2), generator=generator).float()
        leaves = x.clone().requires_grad_()
        total = sum(function(leaves[c], t[c]) for c in range(clients))
        (expected,) = torch.autograd.grad(total, leaves, materialize_grads=True)
        torch.testing.assert_close(oracles.outer_grads(x, None, Batch(((t,),)))[0], expected)


def test_a_dual_must_be_passed_when_there_is_one_and_only_then():
    dual = Oracles(fs.Problem(lambda x, y, b: (x * y * b[0]).sum(), torch.zeros(2), y0=torch.zeros(2), name="saddle"))
    batch = Batch(((torch.ones(1, 1, 2),),))
    with pytest.raises(fs.FedstrataError, match="'saddle' has a dual: pass y"):
        dual.outer_grads(torch.ones(1, 2), None, batch)
    plain = Oracles(fs.Problem(lambda x, b: (x * b[0]).sum(), torch.zeros(2), name="plain"))
    with pytest.raises(fs.FedstrataError, match="'plain' has no dual: pass no y"):
        plain.outer(torch.ones(1, 2), torch.ones(1, 2), batch)


def test_a_function_that_vmap_cannot_handle_warns_once():
    oracles = Oracles(fs.Problem(decides_by_values, torch.zeros(2), name="by values"))
    batch = Batch(((torch.ones(3, 1, 2),),))
    with pytest.warns(UserWarning, match="by values runs one client at a time, so use chunk=1"):
        oracles.outer_grads(torch.ones(3, 2), None, batch)
    oracles.outer_grads(torch.ones(3, 2), None, batch)


def test_an_error_in_the_function_itself_is_raised():
    oracles = Oracles(fs.Problem(lambda x, batch: (x * batch[0]).sum(), torch.zeros(2), name="wrong"))
    with pytest.raises(RuntimeError, match="size of tensor"):
        oracles.outer_grads(torch.ones(3, 2), None, Batch(((torch.ones(3, 1, 5),),)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
def test_a_recurrent_model_trains_with_one_client_and_with_several():
    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = torch.nn.Embedding(7, 4), torch.nn.LSTM(4, 5, num_layers=2, batch_first=True)
            self.out = torch.nn.Linear(5, 7)

        def forward(self, tokens):
            return self.out(self.lstm(self.embed(tokens))[0][:, -1])

    torch.manual_seed(0)
    model = Reader()
    sites = [(torch.randint(0, 7, (12, 6), dtype=torch.uint8), torch.randint(0, 7, (12,))) for _ in range(3)]
    data = fs.FederatedData.from_arrays(sites, classes=7)
    alone = fs.train(fs.erm(model), data, fs.FedAvg(lr=0.5), rounds=3, batch_size=4)
    assert alone.summary["chunk"] == 1
    assert alone.history[-1]["loss"] < alone.history[0]["loss"]
    together = fs.train(fs.erm(model), data, fs.FedAvg(lr=0.5), rounds=3, batch_size=4, chunk=3)
    torch.testing.assert_close(together.x, alone.x, atol=1e-5, rtol=0)


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    with prepared(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    assert keep_memory() is None


def test_constants_of_a_function_are_part_of_its_graph() -> None:
    weights = torch.tensor([1.0, 2.0])

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * weights + torch.tensor([3.0, 4.0])

    graph = trace(function, torch.ones(2))
    assert graph is not None and torch.equal(graph(torch.tensor([5.0, 6.0])), torch.tensor([8.0, 16.0]))


def test_arguments_that_a_function_changes_are_copies_while_it_is_recorded() -> None:
    x = torch.ones(3)
    assert trace(lambda x: x.mul_(2) + 1, x) is not None
    assert torch.equal(x, torch.ones(3))


def swallowing(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    try:
        scale = float(t.sum())
    except RuntimeError:
        scale = 7.0
    return x.sum() * scale


HIDDEN = {
    "a tensor in a list": lambda x, t: (x / torch.tensor([t.std(), 1.0])[0]).sum(),
    "a refusal is caught": swallowing,
    "dlpack": lambda x, t: (x * torch.from_dlpack(torch.utils.dlpack.to_dlpack(t.detach())).mean(0)).sum(),
    "storage": lambda x, t: x.sum() * t.detach().clone().untyped_storage().nbytes() * float(t.sum()),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_a_value_that_recording_does_not_notice_is_noticed_when_the_graph_is_checked(case: str) -> None:
    function = HIDDEN[case]
    t = torch.tensor([[1.0, 2.0], [4.0, 3.0]])
    assert trace(lambda x, t: (grad(function)(x, t),), torch.ones(2), t) is None


def test_a_constant_that_is_changed_in_place_does_not_accumulate() -> None:
    def loss(x: torch.Tensor, batch: tuple) -> torch.Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0])
        scale /= scale.sum()
        scale -= 0.1
        return ((batch[0] * scale) @ x).pow(2).mean()

    oracles = Oracles(fs.Problem(loss, torch.zeros(3), name="scaled"))
    for clients in (1, 3):
        x, inputs = torch.ones(clients, 3), torch.randn(clients, 4, 3)
        first = oracles.outer_grads(x, None, Batch(((inputs,),)))[0].clone()
        for _ in range(3):
            torch.testing.assert_close(oracles.outer_grads(x, None, Batch(((inputs,),)))[0], first)


@pytest.mark.filterwarnings("ignore:.* runs one client at a time")
def test_a_padding_row_is_not_trained_by_several_clients() -> None:
    net = torch.nn.Sequential(torch.nn.Embedding(7, 4, padding_idx=0), torch.nn.Flatten(), torch.nn.Linear(20, 2))
    sites = [(torch.randint(0, 3, (12, 5)), torch.randint(0, 2, (12,))) for _ in range(4)]
    data = fs.FederatedData.from_arrays(sites, classes=2)
    runs = [fs.train(fs.erm(net), data, fs.FedAvg(lr=0.5, steps=2), rounds=2, batch_size=6, chunk=c) for c in (1, 4)]
    torch.testing.assert_close(runs[0].x, runs[1].x)
    assert not (runs[1].model()[0].weight[0] - net[0].weight[0]).any()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_numbers_that_are_not_finite_agree_only_with_themselves(value: float) -> None:
    one = torch.tensor([1.0, value])
    assert close(one, one.clone())
    others = [torch.tensor([1.0, other]) for other in (float("inf"), -float("inf"), 0.0) if other != value]
    assert not any(close(one, other) or close(other, one) for other in others)
