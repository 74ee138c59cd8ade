"""Channels: clipping, compression and bounds between a client's update and the server's mean."""

from fedstrata.clients.channel.channel import PLAIN, Channel

__all__ = ["PLAIN", "Channel"]
