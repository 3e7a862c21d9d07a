"""What a store is made by: a source and the tokenizer's settings, known before anything is read or written."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx.config import DataConfig
from rtx.data.source import Source
from rtx.sets import USUAL_TOKENIZER, USUAL_VOCABULARY

FORMAT = 2
"""Version of the files of a store; another one is another folder."""


@dataclass(frozen=True)
class Recipe:
    """A source and the settings of its data set."""

    source: Source
    data: DataConfig

    @property
    def name(self) -> str:
        """Data set: the first part of the folder's name."""
        return self.source.name

    @property
    def tokenizer(self) -> list[Any]:
        """What decides the tokenizer, as JSON values."""
        if self.source.image:
            return ["bytes", "dim"]
        trained = self.data.tokenizer == "sentencepiece"
        return [self.data.tokenizer, *([self.data.vocabulary, self.data.tokenizer_sample] if trained else [])]

    @property
    def options(self) -> str:
        """The command-line options that ask for this store, for messages."""
        data, options = self.data, self.source.options
        if self.source.image or "data.tokenizer=" in options:
            return options
        if data.tokenizer != USUAL_TOKENIZER.get(data.name, "bytes"):
            options += f" data.tokenizer={data.tokenizer}"
        if data.tokenizer == "sentencepiece":
            usual = DataConfig()
            if data.vocabulary != USUAL_VOCABULARY.get(data.name, usual.vocabulary):
                options += f" data.vocabulary={data.vocabulary}"
            if data.tokenizer_sample != usual.tokenizer_sample:
                options += f" data.tokenizer_sample={data.tokenizer_sample}"
        return options

    @property
    def processes(self) -> int:
        """Processes that may work on it at once."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return self.data.processes or cores or 1

    def folder(self, root: Path) -> Path:
        """Return where the store lies below `root`; the key names the source and the settings."""
        source = self.source
        text = json.dumps([FORMAT, source.name, source.identity, self.tokenizer, source.stamps, source.image])
        return root / f"{source.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
