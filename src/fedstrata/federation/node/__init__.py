"""A node of a federation: one client with its own data, which does one thing at a time for the server.

Every message starts a process of its own, so nothing is remembered but what is on the node's disk.
"""
