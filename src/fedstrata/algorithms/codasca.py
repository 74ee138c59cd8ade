"""CODASCA: AUC maximisation by proximal local steps corrected by control variates.

Yuan, Guo, Xu, Ying, Yang: "Federated deep AUC maximization for heterogeneous data with a constant communication
complexity", ICML 2021.

Problem: min_x max_y M_k[ f_k(x, y) ], no inner level (made for ``auc`` with form = "margin": x = (weights, a, b),
y = alpha >= 0); every client in every round.

    x_k, y_k <- x, y;   I times, both from the old point, with g the gradients on a batch:
        x_k <- x_k - lr (clip(g_x) - c_kx + c_x + (x_k - x_ref) / gamma + weight_decay x_k)
        y_k <- Pi[ y_k + lr (g_y - c_ky + c_y) ]
    c_k <- the mean of the round's g (not clipped),  c <- M_k[c_k],   x <- x + server_lr M_k[x_k - x],  y likewise
    every T_0 steps  lr <- lr / 3,   x_ref <- the mean of x_k over those steps and the clients

Sent: up 2*(d + p), down 2*(d + p). Every T_0 steps another d up and d down. Kept on a client: c_k, x_ref, and the sum
of the x_k since x_ref was renewed. With control = false, up d + p, down d + p.

Departures from the paper: this is the authors' public script, not the paper's algorithm, which could not be consulted,
except for these: rounds are I steps from the first on; both gradients are taken at the old point; x_ref starts at x
instead of small noise, and is one for all clients; the gradient in alpha is the problem's own (the script puts a and b
where it has means of scores, and leaves out the factor p(1-p): see ``scale_dual`` of ``auc``). ``control = false`` is
the step of PESG without momentum. As in the script, the variates are means of raw gradients while the step's are
clipped: where the clip is active for long, the difference feeds back on itself and the method diverges; ``clip = 0``
has no such trap.
"""

from __future__ import annotations

import torch

from fedstrata.algorithms.algorithm import Algorithm, State, param
from fedstrata.algorithms.descent import RATES
from fedstrata.algorithms.saddles import Pair, down_up, gradients
from fedstrata.clients import Client, Clients
from fedstrata.core.schedules import EqualSteps, Rate, steps_at
from fedstrata.problems.problem import Problem


class CODASCA(Algorithm):
    """Proximal local descent ascent whose drift is corrected by control variates, in stages."""

    name = "codasca"
    dual = True
    full_participation = True
    answers = {"local": "x y zero zero", "mean_of_stage": "point", "centre": "zero"}

    lr: Rate = param(0.1, "learning rate of x and y", above=0, search=RATES)
    steps: EqualSteps = param(10, "local steps per round, I, or an Interval")
    stage_rounds: int = param(500, "rounds of a stage, T_0 / I", least=1)
    factor: float = param(3.0, "by which the rate falls from stage to stage", least=1)
    gamma: float = param(500.0, "how far a stage may go from its centre; the larger the farther", above=0)
    clip: float = param(1.0, "largest entry of the gradient in x; 0 is none", least=0)
    server_lr: Rate = param(1.0, "learning rate of the server", above=0)
    weight_decay: float = param(1e-5, "L2 penalty on x", least=0)
    control: bool = param(True, "use control variates")

    @property
    def up(self) -> str:
        """What a client sends in a round."""
        return "2*(d + p)" if self.control else "d + p"

    @property
    def down(self) -> str:
        """What the server sends in a round."""
        return self.up

    def init(self, problem: Problem) -> State:
        """Start with the control variates at zero."""
        s = super().init(problem)
        return s.replace(c_x=torch.zeros_like(s.x), c_y=torch.zeros_like(s.y)) if self.control else s

    def round(self, s: State, clients: Clients) -> State:
        """Average what the clients' steps led to and the control variates; at the end of a stage, renew its centre."""
        stage, place = divmod(clients.clock.round, self.stage_rounds)
        variates = (s.c_x, s.c_y) if self.control else ()
        x, y, *variates_new = clients.mean(self.local, s.x, s.y, self.factor**-stage, *variates)
        if self.control:
            s = s.replace(c_x=variates_new[0], c_y=variates_new[1])
        rate = clients.rate(self.server_lr)
        s = s.replace(x=s.x + rate * (x - s.x), y=clients.problem.projected(s.y + rate * (y - s.y)))
        if place == self.stage_rounds - 1:
            clients.mean(self.centre, clients.mean(self.mean_of_stage))
        return s

    def centre(self, client: Client, x_ref: torch.Tensor) -> torch.Tensor:
        """Take over the new centre; nothing is sent."""
        client.keep(x_ref=x_ref, total=torch.zeros_like(x_ref))
        return x_ref[:, :0]

    def mean_of_stage(self, client: Client) -> torch.Tensor:
        """Return the mean of the client's points in the stage."""
        total = client.recall("total", client.problem.x0.expand(len(client), -1))
        now = client.clock.round
        stage = range(now - self.stage_rounds + 1, now + 1)
        return total / sum(steps_at(self.steps, number) for number in stage)

    def local(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, pace: float, *c: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Take corrected proximal steps, then renew c_k."""
        zeros = torch.zeros_like(x), torch.zeros_like(y)
        x_ref, total = client.recall("x_ref", x), client.recall("total", zeros[0])
        drift: Pair = zeros
        if self.control:
            drift = c[0] - client.recall("c_x", zeros[0]), c[1] - client.recall("c_y", zeros[1])
        x, y, total, sum_x, sum_y = client.repeat(self.steps, self.step, x, y, total, *zeros, x_ref, *drift, pace)
        client.keep(x_ref=x_ref, total=total)
        if not self.control:
            return x, y
        steps = client.steps_now(self.steps)
        c_x, c_y = sum_x / steps, sum_y / steps
        client.keep(c_x=c_x, c_y=c_y)
        return x, y, c_x, c_y

    def step(
        self, client: Client, x: torch.Tensor, y: torch.Tensor, total: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Take one step; ``others`` are the sums of the gradients, the centre, the drifts c - c_k, and the pace."""
        sum_x, sum_y, x_ref, drift_x, drift_y, pace = others
        g_x, g_y = gradients(client, x, y, client.draw())
        clipped = g_x.clamp(-self.clip, self.clip) if self.clip else g_x
        direction = clipped + drift_x + (x - x_ref) / self.gamma + self.weight_decay * x
        lr = float(pace) * client.rate(self.lr)
        x, y = down_up(client, x, y, (direction, g_y + drift_y), (lr, lr))
        return x, y, total + x, sum_x + g_x, sum_y + g_y
