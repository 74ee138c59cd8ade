"""The server of a federation: the usual training loop, with clients on nodes."""
