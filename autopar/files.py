"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the whole new one, with the usual permissions."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with unfinished.open("x", encoding="utf-8") as out:  # unlike mkstemp's, its mode follows the umask
        try:
            out.write(text)
            out.close()
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
