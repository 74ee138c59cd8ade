"""The contents of a federation's text files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedstrata.federation.processes import FLOWER_SETTINGS

_APP = '''\
# A Flower app that runs one experiment of fedstrata: flwr run {folder} CONNECTION
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedstrata-federation"
version = "1.0.0"
description = "One experiment of fedstrata, for Flower"
license = "Apache-2.0"
dependencies = []  # fedstrata[flower] must be installed on the server and on every node

[tool.flwr.app]
publisher = "fedstrata"

[tool.flwr.app.components]
serverapp = "fedstrata.federation.app:server_app"
clientapp = "fedstrata.federation.app:client_app"

[tool.flwr.app.config]
# On the server: the run directory, whether to resume the run in it, and a folder with test.npz (optional).
out = {out}
resume = true
server-data = {server_data}
# Python files on the server that register your own things, separated by ':'; nodes name theirs in node.toml.
import = {modules}
# The nodes that may take part, in the order of the clients: public keys by name.
nodes = '{nodes}'
{more}experiment = """
{experiment}"""
'''

_DESCRIBE = """\
# Instead of training, describe the nodes' tables, with counts from this number on; "out" is the file to write.
describe = {minimum}
"""

_ENVIRONMENT = "\n".join(
    ['export FLWR_HOME="$PWD/flwr"', *(f"export {name}={value}" for name, value in FLOWER_SETTINGS.items())]
)


def app_file(
    folder: Path,
    out: Path,
    server_data: Path | None,
    modules: str,
    nodes: Mapping[str, str],
    experiment: str,
    describe: int | None = None,
) -> str:
    """Return the pyproject.toml of an app; ``describe`` is the smallest count of a description."""
    return _APP.format(
        folder=folder,
        out=json.dumps(str(out), ensure_ascii=False),
        server_data=json.dumps("" if server_data is None else str(server_data), ensure_ascii=False),
        modules=json.dumps(modules),
        nodes=json.dumps(dict(nodes)),
        more="" if describe is None else _DESCRIBE.format(minimum=describe),
        experiment=experiment,
    )


def node_file(name: str, key_made_here: bool) -> str:
    """Return the configuration of a node."""
    key = "node.key in this folder: hand it over securely" if key_made_here else "the key whose .pub file you sent"
    return f"""\
# Configuration of the node {name}. Paths are on the node: change them to where its files are.
data = "/path/to/data.npz"            # inputs and targets; or a folder with train.npz and test.npz
key = "/path/to/node.key"             # {key}
state = "/var/lib/fedstrata/{name}"   # a folder for the state that the client keeps between messages
# minimum = 10                        # the smallest count that this node tells of a table
# secure = true                       # answer in secure sums only, which show the server no answer of this node
# peers = "/etc/fedstrata/peers"      # public keys, one per line: no secure sums with any other nodes
"""


def node_start_file(host: str, port: int) -> str:
    """Return the script that starts a node."""
    host = f"[{host}]" if ":" in host else host
    return f"""\
#!/bin/sh
# Start this node. It connects to the server and listens on loopback only. Run it again after a reboot.
cd "$(dirname "$0")" || exit 1
{_ENVIRONMENT}
exec fedstrata federate node node.toml --server {host}:{port} --ca ca.crt "$@"
"""


def server_start_file(command: Sequence[str]) -> str:
    """Return the script that starts the SuperLink by a command with files in the script's own folder."""
    lines = shlex.join(command).replace(" --", " \\\n  --")
    return f"""\
#!/bin/sh
# Start the SuperLink on loopback. Nodes connect through the proxy (nginx.conf); runs are submitted on this machine.
cd "$(dirname "$0")" || exit 1
{_ENVIRONMENT}
mkdir -p "$FLWR_HOME"
exec {lines} \\
  --database "$FLWR_HOME/state.db"
"""


def proxy_file(listen: str, superlink: int) -> str:
    """Return an nginx configuration that lets nodes reach the SuperLink, but lets no one submit runs to it."""
    return f"""\
# The reverse proxy for nodes: nginx -p $PWD -c nginx.conf
worker_processes 1;
pid nginx.pid;
error_log proxy.log;
events {{ worker_connections 1024; }}
http {{
  access_log access.log;
  client_body_temp_path temp-body;
  proxy_temp_path temp-proxy;
  fastcgi_temp_path temp-fastcgi;
  uwsgi_temp_path temp-uwsgi;
  scgi_temp_path temp-scgi;
  server {{
    listen {listen} ssl;
    ssl_certificate server.pem;
    ssl_certificate_key server.key;
    client_max_body_size 2g;
    location /v1/fleet/ {{
      proxy_pass https://127.0.0.1:{superlink};
      proxy_ssl_trusted_certificate ca.crt;
      proxy_ssl_verify on;
      proxy_ssl_name localhost;
      proxy_http_version 1.1;
      proxy_request_buffering off;
      proxy_read_timeout 300s;
    }}
    location / {{ return 403; }}
  }}
}}
"""


def connection_file(address: str, ca: Path, name: str) -> str:
    """Return a configuration of the command flwr that gives the SuperLink at ``address`` the name ``name``."""
    return f"""\
# For the command flwr, with FLWR_HOME set to this folder.
[superlink]
default = "{name}"

[superlink.{name}]
address = "{address}"
root-certificates = "{ca.resolve()}"
"""
