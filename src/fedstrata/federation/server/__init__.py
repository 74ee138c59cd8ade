"""The server of a federation: the same training loop as everywhere, with clients on nodes."""
