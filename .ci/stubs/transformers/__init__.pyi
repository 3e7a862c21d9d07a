"""The names of transformers as Any, for pyright; "stubPath" in pyproject.toml says why."""

from typing import Any

def __getattr__(name: str) -> Any: ...
