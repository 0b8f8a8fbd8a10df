"""The up-projection ``kv_b_proj``, expanded or absorbed into query and output.

``kv_b_proj`` maps a latent ``[R]`` to a key half ``[H, dn]`` and a value half
``[H, dv]``: with ``W_UK [H, dn, R]`` and ``W_UV [H, dv, R]`` inside its weight,

    q_nope . (W_UK c) = (q_nope W_UK) . c        fold_query
    sum_t p_t (W_UV c_t) = W_UV (sum_t p_t c_t)  fold_output

so no expanded key or value of a cached token need ever exist. Where it has a bias (an adapter's, say),
the values' half of it is added to the sum once, for the p_t sum to one.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mla.errors import Unsupported

_AFFINE_WITHIN = 0.05  # of a projection's output; bf16 and quantised weights round
_affine: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # projections that were found to be affine


def kv_b_weight(projection: nn.Module, rank: int, like: Tensor) -> Tensor:
    """Weight ``[H * (dn + dv), rank]`` of a projection; see ``kv_b_affine``."""
    return kv_b_affine(projection, rank, like)[0]


def kv_b_affine(projection: nn.Module, rank: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight ``[H * (dn + dv), rank]`` and bias ``[H * (dn + dv)]`` of a projection.

    A plain ``nn.Linear`` gives its parameters; anything else (quantised, offloaded,
    wrapped by an adapter) is asked for its images of zero, which is the bias, and of the unit
    vectors, made with the dtype and device of ``like``. Raises ``Unsupported`` for one that is
    no affine map, since there is nothing to absorb in it.
    """
    if isinstance(projection, nn.Linear) and is_plain(projection):
        return projection.weight, projection.bias
    unit = torch.eye(rank, dtype=like.dtype, device=like.device)
    image: Tensor = projection(torch.cat((unit, unit.new_zeros(1, rank))))
    weight, bias = (image[:rank] - image[rank]).T, image[rank]
    if projection not in _affine:
        _require_affine(projection, weight, bias, like)
        _affine.add(projection)
    return weight, bias


def _require_affine(projection: nn.Module, weight: Tensor, bias: Tensor, like: Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn((2, weight.shape[1]), generator=generator).to(like)
    probe[1] *= -3
    want = probe.double() @ weight.double().T + bias.double()
    off = (projection(probe).double() - want).norm() / want.norm()
    if off > _AFFINE_WITHIN:
        raise Unsupported(
            f"kv_b_proj is a {type(projection).__name__} that is not linear (off by {float(off):.0%}), so it"
            " cannot be absorbed into queries: use the model without latent attention"
        )


def is_plain(projection: nn.Module) -> bool:
    """Whether a module is an ``nn.Linear`` and nothing else, so that its parameters say all of it."""
    # Offloading replaces `forward` on the instance and leaves the weight on "meta"; quantising
    # may put a tensor of another class in the weight's place.
    return (
        type(projection) is nn.Linear
        and "forward" not in vars(projection)
        and not projection._forward_hooks
        and not projection._forward_pre_hooks
        and type(projection.weight) in (nn.Parameter, Tensor)
        and not projection.weight.is_meta
    )


@dataclass(frozen=True)
class UpProjection:
    """``kv_b_proj`` of one layer with its geometry: ``nope`` is dn, ``value`` is dv, ``rank`` R."""

    projection: nn.Module
    heads: int
    nope: int
    value: int
    rank: int

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Latents ``[n, R]`` to keys ``[H, n, dn]`` and values ``[H, n, dv]``, in the model's dtype.

        Views of one tensor, rounded exactly as the stock model rounds them.
        """
        both: Tensor = self.projection(latent).view(-1, self.heads, self.nope + self.value)
        key, value = both.transpose(0, 1).tensor_split([self.nope], dim=-1)
        return key, value

    def halves(self, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """``W_UK [H, dn, R]``, ``W_UV [H, dv, R]`` and the values' bias ``[H, 1, dv]`` in ``dtype``.

        The keys' bias is left out: it adds the same to all scores of a query, which no softmax sees.
        """
        weight, bias = kv_b_affine(self.projection, self.rank, like)
        both = weight.detach().view(self.heads, self.nope + self.value, self.rank).to(dtype)
        key, value = both.tensor_split([self.nope], dim=1)
        if bias is None:
            return key, value, None
        return key, value, bias.detach().view(self.heads, 1, -1)[..., self.nope :].to(dtype)


def fold_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """``q_nope [H, S, dn]`` times ``W_UK [H, dn, R]``: queries ``[H, S, R]`` against latents."""
    return torch.bmm(q_nope, w_uk)


def fold_output(latents: Tensor, w_uv: Tensor, bias: Tensor | None) -> Tensor:
    """Summed latents ``[H, S, R]`` through ``W_UV [H, dv, R]`` and its bias: outputs ``[H, S, dv]``."""
    output = torch.bmm(latents, w_uv.transpose(1, 2))
    return output if bias is None else output + bias
