"""Small image sets made for tests: every schema, and every fault."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from rtx.data.source import Part, Source


def random_images(count: int, height: int = 32, width: int = 32, seed: int = 0) -> np.ndarray:
    """Return images that compress badly: uint8 `[count, height, width, 3]`."""
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def encoded(image: np.ndarray | Image.Image, kind: str = "PNG") -> bytes:
    """Return an image as the content of a file."""
    target = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(target, kind)
    return target.getvalue()


def write_table(path: Path, rows: Sequence[bytes | None], column: str = "img", group: int = 4) -> Path:
    """Write a parquet file in the hub's schema: image files as bytes and path, and a label."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [{"bytes": raw, "path": f"{place}.png"} for place, raw in enumerate(rows)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    labels = pa.array([place % 10 for place in range(len(rows))], pa.int64())
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: pa.array(images, kind), "label": labels}), path, row_group_size=group)
    return path


def records(images: np.ndarray) -> bytes:
    """Return images as CIFAR-10's binary records: a label, then the red, the green and the blue plane."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    labels = (np.arange(len(images), dtype=np.uint8) % 10)[:, None]
    return np.concatenate([labels, planes], axis=1).tobytes()


def write_tar(path: Path, members: Mapping[str, bytes] | Sequence[tarfile.TarInfo | tuple[str, bytes]]) -> Path:
    """Write a tar, gzipped where its name says so, of (name, content) or of headers alone."""
    entries = list(members.items()) if isinstance(members, Mapping) else members
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                archive.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                archive.addfile(info, io.BytesIO(entry[1]))
    return path


def read_parts(parts: Sequence[Part], image: tuple[int, int]) -> np.ndarray:
    """Return all images of a split: uint8 `[images, height, width, 3]`; each document is one, each part as it says."""
    images = []
    for part in parts:
        documents = [b"".join(document) for document in part.documents()]
        assert sum(map(len, documents)) == part.size  # type: ignore[attr-defined]
        images += [np.frombuffer(raw, dtype=np.uint8).reshape(*image, 3) for raw in documents]
    return np.stack(images)


def read_source(source: Source) -> dict[str, np.ndarray]:
    """Return all images of a source by split, checked against the units that it states."""
    assert source.image is not None and source.units is not None
    splits = {name: read_parts(parts, source.image) for name, parts in source.parts().items()}
    assert list(splits) == ["train", "valid", "test"]
    assert {name: images.size for name, images in splits.items()} == source.units
    return splits
