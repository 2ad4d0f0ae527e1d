"""What speculation keeps of each row, in device memory, named once."""

from typing import NamedTuple

from ..native.signature import Int32

HELD = 2  # `finished` of a row whose step is over before those of its neighbours; 1 is a row that has ended
DRAFT_COLUMNS = 4  # of one step's entry in the ring of drafts:
VERIFIED, ACCEPTED, FOUND, MATCHED = range(DRAFT_COLUMNS)


class DraftConstants(NamedTuple):
    """The numbers above, by the names that they have in kernels, of Triton and in C."""

    ACCEPTED: int = ACCEPTED
    DRAFT_COLUMNS: int = DRAFT_COLUMNS
    FOUND: int = FOUND
    HELD: int = HELD
    MATCHED: int = MATCHED
    VERIFIED: int = VERIFIED


CONSTANTS = DraftConstants()


class DraftSizes(NamedTuple):
    """How many drafts a row has at most, how many steps the rings keep, and of how many rows."""

    most: int
    ring_length: int
    ring_rows: int


class DraftSlots(NamedTuple):
    """The drafts of a batch.

    Attributes:
        drafts: int32 [b, most], tokens that may follow the one to feed.
        num_drafts: int32 [b], how many of them there are.
        match_lengths: int32 [b], how many tokens agreed where they were found; 0: a guess of a model.
        draft_limit: int32 [b], how many of them a step may take; 0 for rows that are not to draft.
    """

    drafts: Int32
    num_drafts: Int32
    match_lengths: Int32
    draft_limit: Int32
