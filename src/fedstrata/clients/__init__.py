"""Clients: who takes part, their data, what they keep, and what is sent."""

from fedstrata.clients.client import Client
from fedstrata.clients.clients import Clients
from fedstrata.clients.engine import Answer, Engine, Usage
from fedstrata.clients.simulated import Simulated
from fedstrata.clients.variables import Variables
from fedstrata.clients.work import remote

__all__ = ["Answer", "Client", "Clients", "Engine", "Simulated", "Usage", "Variables", "remote"]
