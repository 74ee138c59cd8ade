"""A real federation on Flower: one client on each node, and its data stay there.

``app.py`` is what Flower starts: a ServerApp that runs the training loop, a ClientApp that hosts one client.
"""
