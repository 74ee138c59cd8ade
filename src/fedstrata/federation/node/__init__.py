"""A node of a federation: one client with its own data, which answers one message at a time.

It may be ended at any time, and a stock SuperNode starts a process for every message. So only what is on the node's
disk has to last from one message to the next; what is kept in memory only saves time.
"""
