"""A real federation on Flower: one client on each node, whose data stay there.

``app.py`` is what Flower starts. ``server/`` runs the training loop and asks the nodes, ``node/`` does what a node is
asked to do. ``deploy.py`` writes the files of a federation, ``local.py`` runs one on this machine.
"""
