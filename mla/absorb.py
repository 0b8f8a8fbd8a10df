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

from mla.errors import Unsupported


def kv_b_weight(projection: nn.Module, rank: int, like: Tensor) -> Tensor:
    """Weight ``[H * (dn + dv), rank]`` of a bias-free projection.

    A plain ``nn.Linear`` gives its parameter; anything else (quantised, offloaded,
    wrapped by an adapter) is asked for its images of the unit vectors, made with the
    dtype and device of ``like``. Raises ``Unsupported`` if it adds a bias, since each image
    would hold it.
    """
    if isinstance(projection, nn.Linear) and is_plain(projection):
        return projection.weight
    unit = torch.eye(rank + 1, rank, dtype=like.dtype, device=like.device)  # the last row is zero
    image: Tensor = projection(unit)
    if bool(image[rank].any()):
        raise Unsupported(
            f"kv_b_proj ({type(projection).__qualname__}) adds a bias, which cannot be absorbed: merge or"
            " drop it"
        )
    return image[:rank].T


def is_plain(projection: nn.Module) -> bool:
    """Whether a module is an ``nn.Linear`` and nothing else, so that its weight says all of it."""
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
