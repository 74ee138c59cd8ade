"""Clients: who takes part, their data, what they keep, and what goes over the wire."""

from fedstrata.clients.client import Client
from fedstrata.clients.clients import Answer, Clients, Counts, Terms
from fedstrata.clients.simulated import SimulatedClients

__all__ = ["Answer", "Client", "Clients", "Counts", "SimulatedClients", "Terms"]
