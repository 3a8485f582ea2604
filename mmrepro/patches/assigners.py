"""Assigners that choose candidates for all objects at once instead of in a loop."""
from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch import Tensor

from ..ops import aten


def matching_at_once(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``dynamic_k_matching`` of SimOTA and its relatives without a loop over the objects.

    Where mmrepro's ``topk`` is installed, equal costs go by index, whatever k is: so the k best of
    each object are the first k of one ``topk``. Elsewhere the stock method runs.
    """
    @functools.wraps(stock)
    def dynamic_k_matching(self: Any, cost: Tensor, pairwise_ious: Tensor, num_gt: int,
                           valid_mask: Tensor) -> Any:
        if cost.device.type not in aten.installed() or not num_gt or not len(cost):
            return stock(self, cost, pairwise_ious, num_gt, valid_mask)
        # the two classes have different names for it
        candidates = getattr(self, 'candidate_topk', None) or self.topk
        topk_ious, _ = torch.topk(pairwise_ious, min(candidates, len(pairwise_ious)), dim=0)
        wanted = torch.clamp(topk_ious.sum(0).int(), min=1)
        best = torch.topk(cost, int(wanted.max()), dim=0, largest=False)[1]
        taken = torch.arange(len(best), device=cost.device)[:, None] < wanted
        objects = torch.arange(num_gt, device=cost.device)
        matching = torch.zeros_like(cost, dtype=torch.uint8)
        matching[best, objects.expand_as(best)] = taken.to(torch.uint8)
        # a candidate of several objects belongs to the one that it costs least
        cheapest = torch.min(cost, dim=1)[1][:, None] == objects
        matching = torch.where(matching.sum(1, keepdim=True) > 1, cheapest.to(torch.uint8),
                               matching)
        chosen = matching.sum(1) > 0
        valid_mask.masked_scatter_(valid_mask.clone(), chosen)
        rows = chosen.nonzero()[:, 0]
        matched = matching.index_select(0, rows)
        return ((matching * pairwise_ious).sum(1).index_select(0, rows), matched.argmax(1))

    return dynamic_k_matching
