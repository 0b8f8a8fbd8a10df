"""The up-projection ``kv_b_proj``, expanded or absorbed into query and output.

``kv_b_proj`` maps a latent ``[R]`` to a key half ``[H, dn]`` and a value half
``[H, dv]``: with ``W_UK [H, dn, R]`` and ``W_UV [H, dv, R]`` inside its weight,

    q_nope . (W_UK c) = (q_nope W_UK) . c        fold_query
    sum_t p_t (W_UV c_t) = W_UV (sum_t p_t c_t)  fold_output

so no expanded key or value of a cached token need ever exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


def kv_b_weight(projection: nn.Module, rank: int, like: Tensor) -> Tensor:
    """Weight ``[H * (dn + dv), rank]`` of a bias-free projection.

    A plain ``nn.Linear`` gives its parameter; anything else (quantised, offloaded,
    wrapped by an adapter) is asked for its images of the unit vectors, made with the
    dtype and device of ``like``.
    """
    if isinstance(projection, nn.Linear) and _is_plain(projection):
        return projection.weight
    unit = torch.eye(rank, dtype=like.dtype, device=like.device)
    image: Tensor = projection(unit)
    return image.T


def _is_plain(projection: nn.Linear) -> bool:
    # Offloading replaces `forward` on the instance and leaves the weight on "meta".
    return (
        type(projection) is nn.Linear
        and "forward" not in vars(projection)
        and not projection._forward_hooks
        and not projection._forward_pre_hooks
        and projection.weight.device.type != "meta"
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

    def halves(self, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``W_UK [H, dn, R]`` and ``W_UV [H, dv, R]`` in ``dtype``."""
        weight = kv_b_weight(self.projection, self.rank, like)
        both = weight.detach().view(self.heads, self.nope + self.value, self.rank).to(dtype)
        key, value = both.tensor_split([self.nope], dim=1)
        return key, value


def fold_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """``q_nope [H, S, dn]`` times ``W_UK [H, dn, R]``: queries ``[H, S, R]`` against latents."""
    return torch.bmm(q_nope, w_uk)


def fold_output(latents: Tensor, w_uv: Tensor) -> Tensor:
    """Summed latents ``[H, S, R]`` through ``W_UV [H, dv, R]``: outputs ``[H, S, dv]``."""
    return torch.bmm(latents, w_uv.transpose(1, 2))
