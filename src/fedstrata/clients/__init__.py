"""Clients: who takes part, their data, what they keep, and what goes over the wire."""

from fedstrata.clients.base import Clients
from fedstrata.clients.client import Client, Counts
from fedstrata.clients.simulated import SimulatedClients

__all__ = ["Client", "Clients", "Counts", "SimulatedClients"]
