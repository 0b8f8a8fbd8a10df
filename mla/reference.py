"""The maths in its plainest form: expanded causal attention in fp64.

The oracle of the tests, and the definition of what ``mla.attention`` computes faster.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(
    query: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, nope: int, scaling: float
) -> Tensor:
    """Causal MLA of one sequence, in fp64.

    ``query [H, S, dn + dr]`` are the last S of T tokens, ``latent [T, R]`` and ``rope
    [T, dr]`` what is cached, ``weight [H * (dn + dv), R]`` that of ``kv_b_proj``, ``nope``
    is dn. Returns ``[S, H, dv]``:

        k_t = [W_UK c_t, r_t]     v_t = W_UV c_t
        o_s = sum over t <= s of softmax_t(scaling * q_s . k_t) v_t
    """
    heads, queries, _ = query.shape
    tokens = latent.shape[0]
    q, c, r, w = (tensor.detach().double() for tensor in (query, latent, rope, weight))
    both = (c @ w.T).view(tokens, heads, -1).transpose(0, 1)
    key = torch.cat((both[..., :nope], r.expand(heads, -1, -1)), dim=-1)
    scores = scaling * q @ key.transpose(1, 2)
    positions = torch.arange(tokens, device=q.device)
    future = positions[None, :] > positions[tokens - queries :, None]
    probabilities = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
    return (probabilities @ both[..., nope:]).transpose(0, 1)
