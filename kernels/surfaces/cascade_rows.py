"""The keys that each query of a cascade's level sees, from lists of rows of queries and of pages."""

import numpy as np
import torch

from ..attention.attention_plan import check_page_lists
from ..native.registration import Int32, Written, operator


def check_query_lists(qo_indptr: np.ndarray, last_qo_indptr: np.ndarray) -> None:
    """Raise ValueError for lists of queries that no level could have; see `cascade_rows`."""
    if qo_indptr[0] != 0 or (np.diff(qo_indptr) < 0).any():
        raise ValueError(f"qo_indptr must rise from 0, got {qo_indptr.tolist()}")
    if qo_indptr[-1] != last_qo_indptr[-1]:
        raise ValueError(
            f"qo_indptr must end with the queries of the last level, {last_qo_indptr[-1]}, got {qo_indptr.tolist()}"
        )


@operator()
def cascade_rows(
    begins: Written[Int32],
    lens: Written[Int32],
    newer: Written[Int32],
    qo_indptr: Int32,
    last_qo_indptr: Int32,
    indptr: Int32,
    last_page_len: Int32,
    page_size: int,
    num_indices: int,
) -> None:
    """Write of each query where its row's pages begin, how many keys they hold, and how many queries are newer.

    Nothing is read on the host, but on a CPU, where lists that cannot be are refused.

    Args:
        begins: int32 [queries + 1]; the last is 0.
        lens: int32 [queries], 0 past the last query of the lists.
        newer: int32 [queries], of the same row.
        qo_indptr: int32 [rows + 1], where each row's queries begin.
        last_qo_indptr: int32, the same of the cascade's last level.
        indptr: int32 [rows + 1], where each row's pages begin.
        last_page_len: int32 [rows], tokens in each row's last page.
        page_size: tokens a page.
        num_indices: pages that are listed.

    Raises:
        ValueError: on a CPU, lists that cannot be. A GPU is not waited for.
    """
    if qo_indptr.is_cpu:
        check_query_lists(qo_indptr.numpy(), last_qo_indptr.numpy())
        check_page_lists(indptr.numpy(), last_page_len.numpy(), num_indices, page_size)
    queries = torch.arange(lens.shape[0], dtype=torch.int32, device=lens.device)
    row = torch.searchsorted(qo_indptr[1:].contiguous(), queries, right=True)
    is_listed = row < last_page_len.shape[0]
    row = row.clamp_(max=last_page_len.shape[0] - 1)
    pages = indptr.diff()
    tokens = torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0)
    begins[:-1].copy_(torch.where(is_listed, indptr[row], 0))
    begins[-1:].zero_()
    lens.copy_(torch.where(is_listed, tokens[row], 0))
    newer.copy_(torch.where(is_listed, qo_indptr[row + 1] - 1 - queries, 0))


@operator()
def require_queries(qo_indptr: Int32, count: int) -> None:
    """Raise ValueError on a CPU unless there are so many queries; a GPU is not waited for.

    Args:
        qo_indptr: int32 [rows + 1], where each row's queries begin.
        count: how many there should be.
    """
    if qo_indptr.is_cpu and (queries := int(qo_indptr[-1])) != count:
        raise ValueError(f"q must have the {queries} queries that were planned, got {count}")
