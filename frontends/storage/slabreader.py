"""Read a slab: a stretch comes back in one piece, of which the arrays are views.

A checksum is compared while its bytes are in the processor's cache.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from xxhash import xxh3_64_intdigest

from attrax.core.packed import Memory, Packed, take_packed
from attrax.core.schema import Form
from attrax.frontends.storage.h5types import bytes_of, read_bytes
from attrax.frontends.storage.slabs import PIECE, PIECES, Layout, Place, Slab, Stretch


def lazily(
    layout: Layout, read: Callable[[Stretch], Mapping[str, Packed]], *, keep: bool
) -> Callable[[str], Packed]:
    """Leaves of a slab, read when they are asked for, a stretch at a time.

    Args:
        layout: Where they lie.
        read: Reads a stretch; see `read_stretch`.
        keep: Whether to hold all that was read, or only the last stretch: the memory of a large block is that of its
            largest leaf, if every leaf is done with before the next is asked for.

    Returns:
        Gives the packed leaf of a name.
    """
    held: dict[str, Packed] = {}

    def leaf(name: str) -> Packed:
        if name not in held:
            if not keep:
                held.clear()
            held.update(read(layout.stretches[layout.stretch_of[name]]))
        return held[name]

    return leaf


def read_stretch(
    descriptor: int, at: int, slab: Slab, stretch: Stretch, rows: Int[np.ndarray, " n"], memory: Memory
) -> dict[str, Packed]:
    """Read examples of a stretch, and no more than the pieces that they lie in.

    Args:
        descriptor: The file.
        at: Where the slab begins.
        slab: The slab.
        stretch: The stretch.
        rows: Positions in the slab, ascending and distinct.
        memory: Makes memory for the stretch.

    Returns:
        Its packed leaves by name.

    Raises:
        ValueError: If a checksum does not fit, or ids are not in the vocabulary; names the leaf.
    """
    some = len(rows) < slab.examples
    out = memory((stretch.size,), torch.uint8)
    data, start = bytes_of(out), at + stretch.at
    for first, last in _runs(_needed(stretch, rows)) if some else [(0, stretch.pieces)]:
        for number in range(first, last, PIECES):
            stop = min(number + PIECES, last)
            read_bytes(descriptor, start + number * PIECE, data[number * PIECE : stop * PIECE])
            for n in range(number, stop):
                if xxh3_64_intdigest(data[n * PIECE : (n + 1) * PIECE]) != slab.checksums[stretch.first + n]:
                    raise ValueError(
                        f"{_leaf_at(stretch, n * PIECE)}the checksum of the bytes from "
                        f"{slab.at + stretch.at + n * PIECE} of the data on does not fit"
                    )
    arrays = iter(
        [
            x
            for same in stretch.arrays
            for x in out.view(same.dtype).as_strided(same.shape, same.stride, same.first).unbind()
        ]
    )
    leaves: dict[str, Packed] = {}
    for name, (form, places) in stretch.leaves.items():
        packed = _uses(form, iter(places), arrays) if form.uses else _arrays(form, places[0], arrays)
        leaves[name] = take_packed(packed, rows) if some else packed
        if form.kind in ("Lookup", "Sum"):
            _check_ids(name, leaves[name])
    return leaves


def _needed(stretch: Stretch, rows: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " pieces"]:
    """Which pieces hold rows of some examples."""
    opened = np.zeros(stretch.pieces + 1, np.int64)
    for place in (place for _, places in stretch.leaves.values() for place in places):
        begins, ends = place.offsets[rows], place.offsets[rows + 1]
        begins, ends = begins[ends > begins], ends[ends > begins]
        for array in place.arrays:
            if array.row:
                np.add.at(opened, (array.at + begins * array.row) // PIECE, 1)
                np.add.at(opened, (array.at + ends * array.row - 1) // PIECE + 1, -1)
    return opened.cumsum()[:-1] > 0


def _runs(chosen: Bool[np.ndarray, " n"]) -> list[tuple[int, int]]:
    """First and last of each run of neighbors, the last one not included."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _leaf_at(stretch: Stretch, begin: int) -> str:
    """The leaves whose arrays reach into a piece, as the begin of a message."""
    touched = [
        name
        for name, (_, places) in stretch.leaves.items()
        if any(x.at < begin + PIECE and x.end > begin for place in places for x in place.arrays)
    ]
    return f"leaf {' or '.join(map(repr, touched[:5]))}: " if touched else ""


def _arrays(form: Form, place: Place, arrays: Iterator[Tensor]) -> Packed:
    return Packed(form, tuple(islice(arrays, len(place.arrays))), place.offsets)


def _uses(form: Form, places: Iterator[Place], arrays: Iterator[Tensor]) -> Packed:
    uses = tuple(
        _uses(use, places, arrays) if use.uses else _arrays(use, next(places), arrays) for use in form.uses
    )
    return Packed(form, (), np.arange(len(uses[0].offsets)), uses)


def _check_ids(name: str, packed: Packed) -> None:
    for use in packed.uses:
        _check_ids(name, use)
    if packed.form.kind == "Lookup" and packed.arrays[0].numel():
        low, high = (int(x) for x in packed.arrays[0].aminmax())
        if low < -1 or high >= packed.form.rows:
            raise ValueError(
                f"leaf '{name}': its ids reach from {low} to {high}, its vocabulary has {packed.form.rows} entries"
            )
