"""A real federation on Flower: one client on each node, whose data stay there.

Flower starts ``app.py``. ``server/`` is the server's side of the training loop, ``node/`` the nodes' side, and
``wire.py`` the format of the messages between them. ``deploy.py`` writes the files of a federation, ``local.py`` runs
one on this machine.
"""
