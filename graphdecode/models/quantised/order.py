"""Columns whose groups are dealt out by importance (GPTQ's `desc_act`, "act order"): brought together."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from graphdecode.linear.groups import Groups, packed, unpacked
from graphdecode.models.weight_map import CheckpointError


def reordered(groups: Groups, group_of: Tensor, name: str) -> Groups:
    """Return a weight whose columns stand by their groups.

    Args:
        groups: with columns in the order of the input features, whatever group they are in.
        group_of: integers [in_features], the group of each column.
        name: for the message.

    Raises:
        CheckpointError: a group has more or fewer columns than the others.
    """
    expected = torch.arange(groups.shape[1]) // groups.group_size
    if torch.equal(group_of.long(), expected):
        return groups
    order = torch.argsort(group_of, stable=True)
    if not torch.equal(group_of[order].long(), expected):
        raise CheckpointError(f"{name}: g_idx has groups that have not {groups.group_size} columns each")
    codes = unpacked(groups.codes) if groups.bits == 4 else groups.codes
    codes = codes.index_select(1, order)
    return replace(groups, codes=packed(codes) if groups.bits == 4 else codes, order=order.int())
