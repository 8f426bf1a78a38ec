"""Only the elements that changed since the last update of the same engine.

A step of 1e-6 moves few weights to the next bfloat16. Both ends keep what travelled last, so that
positions and new values do; what is compared is bits, so the engine has the trainer's again.
"""

from collections.abc import Sequence

import torch

_POSITION_BYTES = 4
_CHUNK_ELEMENTS = 1 << 20
SCRATCH_BYTES = 24 * _CHUNK_ELEMENTS
"""The most memory that `encode` and `decode` take beside what they return."""


def count_changed(counts: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """How many positions and how many values a message holds.

    Args:
        counts: of every piece, as `encode` returns them.
        sizes: elements of every piece.
    """
    num_positions = sum(count for count in counts if count >= 0)
    return num_positions, num_positions + sum(
        size for count, size in zip(counts, sizes, strict=True) if count < 0
    )


def count_bytes(counts: Sequence[int], sizes: Sequence[int], element_bytes: int) -> int:
    """Bytes of a message; `count_changed` explains the arguments."""
    num_positions, num_values = count_changed(counts, sizes)
    return _POSITION_BYTES * num_positions + element_bytes * num_values


def encode(
    news: Sequence[torch.Tensor], olds: Sequence[torch.Tensor]
) -> tuple[list[int], torch.Tensor]:
    """Compare pieces with what travelled last.

    Args:
        news: each [rows, columns], of 2 or 4 bytes per element.
        olds: of the same shapes, on any device.

    Returns:
        Of every piece the number of changed elements, or -1 where all of it is shorter; and [bytes]
        uint8: the positions in each piece, int32, then the values.
    """
    counts, positions, values = [], [], []
    for new, old in zip(news, olds, strict=True):
        found = _find_changes(new, old)
        if found is None:
            counts.append(-1)
            values.append(new.reshape(-1))
        else:
            counts.append(len(found))
            positions.append(found)
            values.append(_take(new, found))
    parts = [tensor.contiguous().view(torch.uint8) for tensor in positions + values]
    return counts, torch.cat(parts)


def decode(counts: Sequence[int], message: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    """Write the changes into places [rows, columns] that hold what travelled last."""
    sizes = [place.numel() for place in places]
    num_positions, _ = count_changed(counts, sizes)
    positions = message[: _POSITION_BYTES * num_positions].view(torch.int32)
    values = message[_POSITION_BYTES * num_positions :].view(places[0].dtype)
    for count, place in zip(counts, places, strict=True):
        if count < 0:
            place.copy_(values[: place.numel()].view(place.shape))
            values = values[place.numel() :]
            continue
        for first in range(0, count, _CHUNK_ELEMENTS):
            end = min(count, first + _CHUNK_ELEMENTS)
            at = positions[first:end].long()
            place[at // place.shape[1], at % place.shape[1]] = values[first:end]
        positions, values = positions[count:], values[count:]


def _find_changes(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
    """Positions whose bits differ, int32; None where they and the values are no shorter than all
    values."""
    bits = {2: torch.int16, 4: torch.int32}[new.element_size()]
    element_bytes, num_columns = new.element_size(), new.shape[1]
    limit = new.numel() * element_bytes // (_POSITION_BYTES + element_bytes)
    found: list[torch.Tensor] = []
    num_found = 0
    rows = max(1, _CHUNK_ELEMENTS // num_columns)
    for first in range(0, new.shape[0], rows):
        now = new[first : first + rows].contiguous().view(bits)
        before = old[first : first + rows].to(new.device).contiguous().view(bits)
        at = (now != before).view(-1).nonzero()[:, 0]
        num_found += len(at)
        if num_found > limit:
            return None
        found.append((at + first * num_columns).int())
    return torch.cat(found)


def _take(matrix: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    chunks = [chunk.long() for chunk in positions.split(_CHUNK_ELEMENTS)]
    return torch.cat([matrix[at // matrix.shape[1], at % matrix.shape[1]] for at in chunks])
