"""Any ``torch.nn.Module`` as a pure function of one flat vector, and back."""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import nn

from fedstrata.core.errors import InputError, invalid
from fedstrata.models.random import Dropout, DropoutRule, Noise, RandomLayer, by_names, switch_off_dropout

BatchNormRule = Literal["refuse", "group", "batch"]

_TRAINED = "_trained_by_fedstrata"
"""An attribute of the modules that runs return."""


class Flat:
    """A module as a pure function of a flat vector: ``outputs = flat(x, *inputs)``.

    The vector holds the trainable parameters one after another, in the order of ``named_parameters()``; parameters are
    views into it, never copies. Frozen parameters and buffers are constants. The module is copied, and the copy never
    changes, so several problems can share it, on several devices. Dropout and other random layers draw
    reproducible numbers (``models/random.py``), and only inside :meth:`drawing_from`.

    batchnorm: what to do with running statistics (BatchNorm), which are state that a pure function cannot hold:
               ``"refuse"`` raises an error, ``"group"`` replaces the layer with GroupNorm, ``"batch"`` always uses the
               statistics of the batch.
    dropout:   ``"on"`` drops by reproducible numbers in training, and refuses layers in which PyTorch draws them itself
               (``nn.LSTM(dropout=0.5)``); ``"off"`` trains without any dropout. Layers that are not PyTorch's own then
               run in evaluation mode, because they may apply dropout if ``self.training``.
    trained:   whether the module is the result of a run, whose weights must not be initialised again.
    output_bias: where in the vector the bias of the outputs is; None if that is not known, or nowhere.
    """

    def __init__(self, module: nn.Module, batchnorm: BatchNormRule = "refuse", dropout: DropoutRule = "on") -> None:
        if not isinstance(module, nn.Module):
            raise invalid("model", module, "a torch.nn.Module, e.g. nn.Linear(4, 2) or fs.models.model('mlp', ...)")
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
            raise InputError(
                f"The model {type(module).__name__} has lazy layers that have no weights yet: call it once on a batch "
                "of inputs before you pass it."
            )
        self.batchnorm, self.dropout = batchnorm, dropout
        self.trained: bool = getattr(module, _TRAINED, False)
        self.module = _without_state(copy.deepcopy(module), batchnorm, dropout)
        trainable = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        if not trainable:
            raise InputError(f"The model {type(module).__name__} has no trainable parameters.")
        dtypes = {p.dtype for _, p in trainable}
        if len(dtypes) > 1:
            raise invalid("dtype of the model's parameters", sorted(map(str, dtypes)), "the same for all")
        if dtypes.isdisjoint({torch.float32, torch.float64}):
            raise invalid("dtype of the model's parameters", dtypes.pop(), "torch.float32 or torch.float64")
        self.names = tuple(n for n, _ in trainable)
        self.shapes = tuple(p.shape for _, p in trainable)
        self.sizes = [p.numel() for _, p in trainable]
        self.size = sum(self.sizes)
        owner = {id(p): n for n, p in trainable}
        with_aliases = self.module.named_parameters(remove_duplicate=False)
        self._aliases = {n: owner[id(p)] for n, p in with_aliases if owner.get(id(p), n) != n}
        self.initial = torch.cat([p.detach().reshape(-1) for _, p in trainable])
        self.output_bias: slice | None = None
        self._constants: dict[torch.device, dict[str, torch.Tensor]] = {self.initial.device: {}}
        self._noise = Noise()
        layers = [part for part in self.module.modules() if isinstance(part, RandomLayer)]
        self.random = bool(layers)
        for number, layer in enumerate(layers):
            layer.noise, layer.number = self._noise, number

    def views(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameters as views into ``x``; entries after the parameters are ignored."""
        parts = torch.split(x, [*self.sizes, len(x) - self.size])
        return {n: part.view(s) for n, part, s in zip(self.names, parts, self.shapes, strict=False)}

    def __call__(self, x: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the module with the weights in the first ``size`` entries of ``x``, on the device of ``x``."""
        self._noise.next_call()
        weights = self.views(x)
        weights.update(self._constants.get(x.device, {}))
        out = torch.func.functional_call(self.module, weights, inputs, tie_weights=bool(self._aliases))
        if not isinstance(out, torch.Tensor):
            size = f" of {len(out)} entries" if isinstance(out, tuple | list | dict) else ""
            wants = "one tensor: wrap the model in a module that returns only its outputs"
            raise invalid(f"output of the model {type(self.module).__name__}", type(out).__name__ + size, wants)
        return out

    def drawing_from(self, words: torch.Tensor | None) -> AbstractContextManager[None]:
        """Let random layers draw from these two words [2] of a batch; with None they change nothing."""
        return self._noise.drawing_from(words)

    def place(self, device: torch.device) -> None:
        """Prepare for vectors on ``device`` by copying frozen parameters and buffers to it."""
        device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as on tensors
        if device in self._constants:
            return
        tensors = [
            *((n, p) for n, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad),
            *self.module.named_buffers(remove_duplicate=False),
        ]
        copies = {id(t): t.detach().to(device) for _, t in tensors}  # tied tensors stay tied
        self._constants[device] = {n: copies[id(t)] for n, t in tensors}

    def pure(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs at the initial weights; raise unless they are a pure function of weights and inputs.

        With random layers, they must be one of the layers' numbers too.
        """
        bad = int((~self.initial.isfinite()).sum())
        if bad:
            what, got = f"initial weights of the model {type(self.module).__name__}", f"{bad} that are NaN or infinite"
            raise invalid(what, got, "finite numbers")
        outputs = self._tried(inputs, None)
        if self.random:
            words = torch.tensor([1, 2], device=inputs[0].device)
            once, again = (self._tried(inputs, words).nan_to_num() for _ in range(2))
            if not torch.equal(once, again):
                raise self._draws_its_own()
        elif outputs.is_floating_point():
            self._check_gradient(*inputs)
        return outputs

    def _tried(self, inputs: tuple[torch.Tensor, ...], words: torch.Tensor | None) -> torch.Tensor:
        """Return the outputs at the initial weights, with random layers that draw from these words."""
        name, buffers = type(self.module).__name__, [b.clone() for b in self.module.buffers()]
        before, x, own = torch.get_rng_state(), self.initial.clone(), [a.clone() for a in inputs]
        with torch.no_grad(), self.drawing_from(words):
            outputs = self(x, *own)
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            if words is not None:
                raise self._draws_its_own()
            raise InputError(
                f"The model {name} draws random numbers, so it is not a pure function of its weights. Use nn.Dropout "
                "for dropout and fs.models.RandomFunction for other random changes, or pass dropout='off' if this is "
                "dropout that a layer applies in training mode."
            )
        if any(not torch.equal(old, new) for old, new in zip(buffers, self.module.buffers(), strict=True)):
            raise InputError(f"The model {name} changes its buffers, so it is not a pure function of its weights.")
        if not all(map(torch.equal, own, inputs)):
            raise InputError(
                f"The model {name} changes its inputs in place: make it work on a copy, or avoid in-place operations."
            )
        if not torch.equal(x, self.initial):
            raise InputError(f"The model {name} changes its weights in forward, so it is not a pure function of them.")
        return outputs

    def _draws_its_own(self) -> InputError:
        return InputError(
            f"A random layer of the model {type(self.module).__name__} draws numbers of its own, which cannot be "
            "reproduced: the function of an augmentation must use the numbers that it gets, not torch.rand."
        )

    def _check_gradient(self, *inputs: torch.Tensor) -> None:
        """Raise if the gradient at other weights differs from that of a module with those weights.

        It does if a part of the model runs again during the backward pass, which then uses the module's own weights.
        """
        module = copy.deepcopy(self.module)
        own = [p for p in module.parameters() if p.requires_grad]
        with torch.enable_grad():
            x = (1.5 * self.initial + 0.1).requires_grad_()
            for parameter, value in zip(own, self.views(x.detach()).values(), strict=True):
                parameter.data.copy_(value)
            ours, theirs = self(x, *inputs).sum(), module(*inputs).sum()
            if not ours.requires_grad or not theirs.requires_grad:
                return
            gradient = torch.autograd.grad(ours, x)[0]
            parts = torch.autograd.grad(theirs, own, materialize_grads=True)
        expected = torch.cat([part.reshape(-1) for part in parts])
        if torch.isfinite(expected).all() and (gradient - expected).norm() > 0.01 * expected.norm():
            raise InputError(
                f"The gradient of the model {type(self.module).__name__} is wrong: a part of it runs again in the "
                "backward pass, with other weights. Build it without activation checkpointing."
            )

    def state_dict(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state_dict of the module with the weights in ``x``, on the device of ``x``."""
        state = self.module.state_dict()
        state.update({n: v.to(x.device) for n, v in state.items()})
        state.update({n: v.detach().clone() for n, v in self.views(x).items()})
        state.update({alias: state[n] for alias, n in self._aliases.items()})
        return state

    def to_module(self, x: torch.Tensor) -> nn.Module:
        """Return an ordinary module with the weights in ``x``."""
        module = copy.deepcopy(self.module).to(x.device)
        module.load_state_dict(self.state_dict(x))
        for name, part in list(module.named_modules(remove_duplicate=False)):
            if isinstance(part, Dropout):
                module = _replaced(module, name, part.original[0].train(part.training))
            elif isinstance(part, RandomLayer):
                part.noise = None
        setattr(module, _TRAINED, True)
        return module

    def to_vector(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the flat vector of a state_dict: the inverse of :meth:`state_dict`."""
        missing = [n for n in self.names if n not in state]
        if missing:
            raise InputError(f"The state_dict lacks {', '.join(missing)}.")
        return torch.cat([state[n].detach().reshape(-1) for n in self.names])

    def last_matrix(self) -> slice:
        """Return the slice of the vector with the matrix of the last layer, in the order of ``named_parameters``."""
        end = self.size
        for shape, size in zip(reversed(self.shapes), reversed(self.sizes), strict=True):
            if len(shape) >= 2:
                return slice(end - size, end)
            end -= size
        raise InputError(f"The model {type(self.module).__name__} has no layer with a matrix.")

    def layers(self) -> Literal["dense", "convolutional", "attention", "recurrent"]:
        """Return the type of the model's layers, which decides how many clients should advance together."""
        modules = list(self.module.modules())
        if any(isinstance(m, nn.RNNBase) for m in modules):
            return "recurrent"
        if any(isinstance(m, nn.modules.conv._ConvNd) for m in modules):
            return "convolutional"
        return "attention" if any(isinstance(m, nn.MultiheadAttention) for m in modules) else "dense"


def _without_state(module: nn.Module, batchnorm: BatchNormRule, dropout: DropoutRule) -> nn.Module:
    """Return the module without running statistics, and with reproducible dropout or none."""
    if batchnorm not in ("refuse", "group", "batch"):
        raise invalid("batchnorm", batchnorm, "'refuse', 'group' or 'batch'")
    if dropout not in ("on", "off"):
        raise invalid("dropout", dropout, "'on' or 'off'")
    if dropout == "off":
        switch_off_dropout(module)
    replacements: dict[int, nn.Module | None] = {}  # by layer, since one may have several names
    for name, part in list(module.named_modules(remove_duplicate=False)):
        if id(part) not in replacements:
            replacements[id(part)] = by_names(name, part) or _stateless(name, part, batchnorm)
        replacement = replacements[id(part)]
        if replacement is not None:
            module = _replaced(module, name, replacement)
    return module


def _stateless(name: str, part: nn.Module, batchnorm: BatchNormRule) -> nn.Module | None:
    """Return what replaces a layer with running statistics; None if it stays, without them."""
    if not isinstance(part, nn.modules.batchnorm._NormBase) or not part.track_running_stats:
        return None
    if batchnorm == "refuse":
        raise InputError(
            f"The layer {name!r} ({type(part).__name__}) keeps running statistics, which a pure function of the "
            "weights cannot hold. Pass batchnorm='group' (GroupNorm instead) or batchnorm='batch' (always the "
            "statistics of the batch)."
        )
    if batchnorm == "group":
        return _group_norm(part)
    part.track_running_stats = False
    part.running_mean = part.running_var = part.num_batches_tracked = None
    return None


def _replaced(module: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Return the module with its layer ``name`` replaced."""
    if not name:
        return layer
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, layer)
    return module


def _group_norm(norm: nn.modules.batchnorm._NormBase) -> nn.GroupNorm:
    """Return a GroupNorm over the same channels, with the same scale and shift."""
    channels = norm.num_features
    group = nn.GroupNorm(math.gcd(channels, 8), channels, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        group.load_state_dict({"weight": norm.weight, "bias": norm.bias})
        group.to(norm.weight.dtype)
    return group
