"""What carries tensors between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fedstrata.clients.ranks import backend


def test_without_gpus_gloo_carries_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend() == "gloo"


def test_with_gpus_every_rank_takes_its_own_and_nccl_carries_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are none here, so this only shows what is asked of PyTorch."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for name, value in {"WORLD_SIZE": "8", "RANK": "6", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    assert backend() == "cpu:gloo,cuda:nccl"
    assert taken == [2]
    dist.Backend("gloo")  # both are names that PyTorch knows
    assert dist.distributed_c10d.BackendConfig(dist.Backend("cpu:gloo,cuda:nccl")).get_device_backend_map() == {
        "cpu": "gloo",
        "cuda": "nccl",
    }
