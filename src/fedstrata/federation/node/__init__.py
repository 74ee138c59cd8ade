"""A node of a federation: one client with its own data, which answers one message at a time.

Every message starts a new process, so only what is on the node's disk lasts from one message to the next.
"""
