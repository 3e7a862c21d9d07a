"""Your own images of one size, from a folder: data=images data.path=<folder>.

Folders named train, valid and test are the splits where there are such. Else, in the sorted order of all images, every
20th (9, 29, ...) is valid and every 20th (19, 39, ...) test, counted from 0; of fewer than 20 the last but one and the
last.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rtx.config import DataConfig
from rtx.data.disk import Report
from rtx.data.files import SourceFile
from rtx.data.imagefiles import ImageFolder, Listing, list_images, read_image
from rtx.data.imageset import file_identity, image_options, image_settings, image_stamps, parts_of, wanted
from rtx.data.pixels import SUFFIXES, image_size
from rtx.data.source import Part, Source
from rtx.errors import UserError

SPLITS = ("train", "valid", "test")
EVERY = 20
FEWEST = 3


def source(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the images below data.path, as large as the first one or scaled to data.size.

    Raises:
        UserError: there are too few, a split is missing, the first one cannot be read, or settings do not fit.
    """
    if not data.path:
        raise UserError("data=images needs data.path=<folder with images>")
    place = Path(data.path).expanduser()
    if not place.is_dir():
        found = "a file" if place.exists() else "nothing"
        raise UserError(f"data.path={data.path}: expected a folder with images, found {found}; give the folder")
    splits, others = _splits(data.path, place, root)
    files = [file for split in splits.values() for file in split]
    if others:
        report(f"data.path={data.path}: {others:,} files are left out: their names do not end as an image's")
    first = splits["train"][0].path
    height, width = (1, 1) if data.size else image_size(read_image(first), str(first))
    lossy = any(SUFFIXES[os.path.splitext(file.path.name)[1].lower()] for file in files)
    want = wanted(data, height, width, lossy)

    def parts() -> Mapping[str, Sequence[Part]]:
        return {
            name: parts_of([ImageFolder(tuple(file.path for file in split))], want) for name, split in splits.items()
        }

    return Source(
        name="images",
        options=f"data=images data.path={shlex.quote(data.path)}{image_options(data)}",
        identity=[*file_identity(files), *(len(split) for split in splits.values()), image_settings(want)],
        place={"place": data.path, "files": len(files)},
        parts=parts,
        stamps=image_stamps(want),
        units={name: len(split) * want.units for name, split in splits.items()},
        image=(want.height, want.width),
    )


def _splits(path: str, place: Path, root: Path) -> tuple[dict[str, list[SourceFile]], int]:
    """Return the image files of each split, and how many others there are."""
    named = [name for name in SPLITS if (place / name).is_dir()]
    if named and len(named) < len(SPLITS):
        raise UserError(
            f"data.path={path}: expected folders train, valid and test, found {' and '.join(named)} alone; add the "
            "others, or give a folder without any of the three, which is cut by itself"
        )
    if named:
        listings = {name: list_images(place / name, root) for name in SPLITS}
        for name, listing in listings.items():
            if not listing.images:
                raise _too_few(place / name, listing, 1)
        return {name: listing.images for name, listing in listings.items()}, sum(
            listing.others for listing in listings.values()
        )
    listing = list_images(place, root)
    if len(listing.images) < FEWEST:
        raise _too_few(place, listing, FEWEST)
    return cut(listing.images), listing.others


def cut(files: list[SourceFile]) -> dict[str, list[SourceFile]]:
    """Share sorted files out among train, valid and test, as the module's docstring says."""
    if len(files) < EVERY:
        return {"train": files[:-2], "valid": files[-2:-1], "test": files[-1:]}
    valid, test = EVERY // 2 - 1, EVERY - 1
    return {
        "train": [file for place, file in enumerate(files) if place % EVERY not in (valid, test)],
        "valid": files[valid::EVERY],
        "test": files[test::EVERY],
    }


def _too_few(place: Path, listing: Listing, wanted: int) -> UserError:
    others = f" and {listing.others:,} other files" if listing.others else ""
    return UserError(
        f"{place}: expected at least {wanted} image{'s' if wanted > 1 else ''} (.png, .jpg, ...), found "
        f"{len(listing.images)}{others}; give a folder with more"
    )
