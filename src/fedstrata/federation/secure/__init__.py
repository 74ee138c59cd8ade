"""Secure summation: the server learns the sum of the nodes' vectors, and no single one of them.

The protocol is that of K. Bonawitz, V. Ivanov, B. Kreuter, A. Marcedone, H. B. McMahan, S. Patel, D. Ramage, A. Segal
and K. Seth, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", ACM CCS 2017 (figure 4, with the
signatures and the consistency check against an active server). Its messages, for one sum:

    keys    every node sends two fresh public keys, signed; the server passes on those that came: the set U1
    shares  every node of U1 splits the secret of its pairwise masks, and the seed of its own mask, into shares, any
            ``threshold`` of which recover them, and sends each peer's share encrypted for that peer: U2
    masked  every node of U2 sends its vector plus its own mask plus a mask for every peer, which the peer subtracts: U3
    agree   every node of U3 signs the set U3
    open    every node sees ``threshold`` signatures of the same U3, and sends its share of the own mask of each node in
            U3, and of the pairwise masks of each node in U2 but not in U3: never both for one node

Pairwise masks depend on what the nodes were asked, so that a server that asks one of them something else, to tell its
answer from the others', gets no sum: the defence of D. Pasquini, D. Francati and G. Ateniese, "Eluding Secure
Aggregation in Federated Learning via Model Inconsistency", ACM CCS 2022.

``fields.py`` splits secrets, ``masks.py`` makes masks, ``fixedpoint.py`` makes whole numbers of real ones,
``messages.py`` checks what arrives, ``participant.py`` is the node's side of a sum and ``collector.py`` the server's.
"""
