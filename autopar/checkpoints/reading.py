"""Whether a checkpoint is whole: all of its files there, as long as they were, and every value as it was written."""

from __future__ import annotations

import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.serialization import get_crc32_options

from autopar.errors import EmitError


class Piece(NamedTuple):
    """Where a value, or a part of one, lies: so many bytes of a file."""

    file: str
    offset: int
    length: int


def read(path: Path, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """What the checkpoint at `path` holds, by name. Raises EmitError where something of it is missing or damaged.

    Sums are looked at for the `part`-th of `parts` of the values: all ranks together look at all.
    """
    try:
        metadata = FileSystemReader(path).read_metadata()
        found = (metadata.storage_data or {}).values()
        pieces = sorted({Piece(p.relative_path, p.offset, p.length) for p in found})
    except Exception as error:  # a damaged pickle may raise anything
        raise EmitError(f"{path}: can't be read as a checkpoint ({error}). Load another, with step=.") from error
    ends = {piece.file: piece.offset + piece.length for piece in pieces}
    if short := [n for n, end in ends.items() if not (path / n).is_file() or (path / n).stat().st_size < end]:
        raise EmitError(f"{path} is damaged: {', '.join(short[:8])} missing or cut off. Load another, with step=.")
    if changed := sorted({piece.file for piece in pieces[part::parts] if not _is_whole(path, piece)}):
        raise EmitError(f"{path} is damaged: {', '.join(changed[:8])} has changed. Load another, with step=.")
    return dict(metadata.state_dict_metadata)


def _is_whole(path: Path, piece: Piece) -> bool:
    """Whether the sums agree that torch writes beside each value (an archive of its own) unless it is told not to."""
    with (path / piece.file).open("rb") as file:
        file.seek(piece.offset)
        data = BytesIO(file.read(piece.length))
    try:
        with zipfile.ZipFile(data) as archive:
            return not get_crc32_options() or archive.testzip() is None
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError):
        return False
