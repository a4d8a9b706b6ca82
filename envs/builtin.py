"""Where the worlds lie that need no --data: in .cache, made once per version of their generator."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path


def made_once(name: str, sources: Iterable[Path], build: Callable[[Path], object]) -> Path:
    """A folder that `build` fills on first use. Its name holds a digest of the generator's sources, so that
    another version makes another folder; processes that make it at the same time write the same bytes."""
    digest = hashlib.blake2b(b"".join(path.read_bytes() for path in sources), digest_size=4).hexdigest()
    folder = Path(__file__).resolve().parents[1] / ".cache" / f"{name}-{digest}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
            build(Path(draft) / "world")
            try:
                os.rename(Path(draft) / "world", folder)
            except OSError:  # another process was first
                if not folder.exists():
                    raise
    return folder
