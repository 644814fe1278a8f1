"""How much of the attention do the chosen pages hold?"""

import torch


def mass_curve(mass, scores, *, sink=1, local=2):
    """Attention mass kept by the first 1, 2, ... N pages of a ranking.

    mass: [B, Hkv, N], each page's share of the softmax (``reference.page_mass``). scores: [B, Hkv, N], the ranking, highest first;
    the first ``sink`` and last ``local`` pages come before all others. Returns N floats, averaged over B and Hkv; the last is 1.
    """
    pages = mass.shape[-1]
    page = torch.arange(pages, device=scores.device)
    ranked = scores.double().masked_fill((page < sink) | (page >= pages - local), float("inf"))
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    return mass.gather(-1, order.to(mass.device)).cumsum(-1).mean((0, 1)).tolist()
