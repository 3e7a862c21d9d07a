"""store.json, the record of a store on disk: which values it may have."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

Count = Annotated[int, Field(ge=0, lt=2**63)]


class SplitRecord(BaseModel):
    """A split: its sizes, and the sha256 of its files by their endings."""

    units: Count
    documents: Count
    bytes: Count
    words: Count
    sha256: dict[Literal["bin", "starts.npy"], str]


class StoreRecord(BaseModel):
    """All of store.json. The names of splits become names of files."""

    format: int
    name: str
    options: str
    source: dict[str, Any]
    splits: dict[Literal["train", "valid", "test"], SplitRecord]
    tokenizer: dict[str, Any]
    dtype: Literal["uint8", "uint16", "uint32"]
    stamps: dict[str, Any]
    image: tuple[Count, Count] | None
    fingerprint: str
    made: str
    sha256: str

    @field_validator("fingerprint")
    @classmethod
    def check_fingerprint(cls, text: str) -> str:
        """Raise ValueError where a fingerprint is no sha256; a part of it becomes a file name."""
        if not re.fullmatch("[0-9a-f]{64}", text):
            raise ValueError("is no sha256")
        return text


def check_store_record(record: dict[str, Any]) -> None:
    """Raise ValueError, in one line, where a record lacks a field or has one of another type."""
    try:
        StoreRecord.model_validate_json(json.dumps(record), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{field}: {first['msg']}") from error
