"""The proxy in front of the SuperLink: it lets nodes through, and nothing else."""

from __future__ import annotations

import shutil
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from federation.stand_in import DIGITS, made
from fedstrata.federation import superlink
from fedstrata.federation.local import run_locally
from fedstrata.federation.processes import free_ports
from fedstrata.federation.superlink import Federation
from fedstrata.federation.templates import proxy_file


@pytest.mark.flower
@pytest.mark.skipif(shutil.which("nginx") is None, reason="the proxy is nginx")
def test_nodes_reach_the_superlink_through_the_proxy_and_nobody_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = free_ports(1)[0]
    refused: list[int] = []
    start_server, node_command = Federation.start_server, superlink.node_command

    def started(self: Federation, *options: str) -> None:
        start_server(self, *options)
        server = self.folder / "server"
        (server / "nginx.conf").write_text(proxy_file(f"127.0.0.1:{proxy}", self.ports[0]))
        self.start("proxy", ["nginx", "-p", str(server), "-c", "nginx.conf", "-e", "proxy.log", "-g", "daemon off;"])

    def asked(federation: Federation) -> None:
        if refused:
            return
        context = ssl.create_default_context(cafile=str(federation.folder / "server" / "ca.crt"))
        for path in ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/", "/v1/fleet/../control/list-runs"):
            request = urllib.request.Request(f"https://127.0.0.1:{proxy}{path}", data=b"")
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(request, context=context)
            refused.append(error.value.code)
            error.value.close()

    monkeypatch.setattr(Federation, "start_server", started)
    through: Any = lambda address, *rest: node_command(f"127.0.0.1:{proxy}", *rest)  # noqa: E731
    monkeypatch.setattr(superlink, "node_command", through)
    config = made(DIGITS, {"algorithm": {"name": "fedavg", "steps": 2}, "train": {"rounds": 1}})
    folder = tmp_path / "federation"
    summary = run_locally(config, 2, folder, tmp_path / "run", False, [], lambda _: None, hook=asked)
    assert summary["status"] == "finished" and summary["failed"] == 0
    assert refused == [403] * 4
    paths = {line.split()[6] for line in (folder / "server" / "access.log").read_text().splitlines()}
    assert "/v1/fleet/push-messages" in paths
