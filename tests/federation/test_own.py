"""Things of the user's own in a federation: nodes import them from their own files, or say what they lack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from federation.stand_in import Sent, Site, simulated, site
from fedstrata.experiments.config import Config, import_file, read
from fedstrata.experiments.describe import KINDS
from fedstrata.federation.experiment import check_config
from fedstrata.federation.wire import Reply


@dataclass
class Apart(Site):
    """Nodes that share with nobody what they have registered: each has the library, and the file that it imports."""

    library: Mapping[str, Mapping[str, Any]] = ...  # type: ignore[assignment]
    module: Path | None = None
    registered: dict[int, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    def here(self, node: int) -> dict[str, str]:
        return super().here(node) | ({} if self.module is None else {"import": str(self.module)})

    def answered(self, sent: Sent) -> Reply:
        server = taken()
        put(self.registered.get(sent.node, self.library))
        try:
            return super().answered(sent)
        finally:
            self.registered[sent.node] = taken()
            put(server)


def taken() -> dict[str, dict[str, Any]]:
    return {kind: dict(registry) for kind, registry in KINDS.items()}


def put(entries: Mapping[str, Mapping[str, Any]]) -> None:
    for kind, registry in KINDS.items():
        registry.clear()
        registry.update(entries[kind])


def nodes_of(own: Path, tmp_path: Path, module: Path | None, *overrides: str) -> tuple[Config, Apart]:
    """Return the experiment of docs/add-your-own.md, and nodes that import ``module``."""
    library = taken()
    import_file(own / "mine.py")
    config = read(own / "mine.toml", ["train.rounds=2", "data.clients=3", "train.threads=1", *overrides])
    plain = site(tmp_path / "site", config)
    return config, Apart(**vars(plain), library=library, module=module)


def test_nodes_import_what_their_configuration_names(own: Path, tmp_path: Path) -> None:
    config, nodes = nodes_of(own, tmp_path, own / "mine.py")
    run, expected = nodes.serve(), simulated(config)
    assert not nodes.faults() and run.problem.name == "focal"
    torch.testing.assert_close(run.x, expected.x, rtol=1e-5, atol=1e-5)


def test_a_problem_without_a_model_runs_on_nodes(own: Path, tmp_path: Path) -> None:
    (own / "mine.toml").write_text(
        '[data]\nname = "breast_cancer"\n[problem]\nname = "huber"\n[algorithm]\nlr = 0.02\n'
    )
    config, nodes = nodes_of(own, tmp_path, own / "mine.py")
    torch.testing.assert_close(nodes.serve().x, simulated(config).x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("missing", "overrides"),
    [
        ("problem 'focal'", ()),
        ("algorithm 'fedsign'", ("problem.name=erm",)),
        ("model 'bottleneck'", ("problem.name=erm", "algorithm.name=fedavg")),
        (
            "augmentation 'erase'",
            ("problem.name=erm", "algorithm.name=fedavg", "model={name='logreg', augment=['erase']}"),
        ),
    ],
    ids=["problem", "algorithm", "model", "augmentation"],
)
def test_a_node_says_what_it_has_not_registered(
    missing: str, overrides: tuple[str, ...], own: Path, tmp_path: Path
) -> None:
    _, nodes = nodes_of(own, tmp_path, None, *overrides)
    with pytest.raises(
        fs.FedstrataError, match=f"Not every node could describe its data. node0: failed: The node has no {missing}"
    ) as e:
        nodes.serve()
    assert "node.toml must name it: import = '/path/mine.py'" in str(e.value)
    assert not [sent for sent in nodes.sent if sent.header["kind"] != "describe"], "nothing was trained"


def test_what_brings_its_own_data_is_refused(own: Path) -> None:
    import_file(own / "mine.py")
    (own / "median.toml").write_text('[problem]\nname = "median"\n')
    with pytest.raises(fs.InputError, match="brings its own data, which a federation cannot use"):
        check_config(read(own / "median.toml"), 3)
