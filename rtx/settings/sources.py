"""Hydra's sources for the files of `conf/` with the schema, and for presets of the user.

rtx registers these plug-ins when it first composes. In `hydra_plugins/` every program that uses
Hydra would import them.
"""

import functools
import pickle
from pathlib import Path

# Hydra has no public name for the source of files on disk, which these extend.
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from rtx.settings.preset_files import content, preset_text
from rtx.settings.presets import CACHES, conf_dir, read_text
from rtx.settings.schema import Config, to_dict

PRIMARY = "config"
"""The name, without .yaml, of the file in `conf/` that Hydra composes first."""


class TextSource(FileConfigSource):
    """A folder of files, whose texts are each parsed once for all compositions."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = self.file(config_path)
        text = self.text(path)
        result = self.parsed(path, text)
        # Hydra, too, reads its directives from the first 512 characters.
        header = self._get_header_dict(text[:512])
        return ConfigResult(self.provider, self.full_path(), result, header)

    def file(self, config_path: str) -> Path:
        """Return the file of an option, such as `data/text`."""
        return Path(self.path, self._normalize_file_name(config_path))

    def text(self, path: Path) -> str:
        """Return the text of a file; `UserError` where it cannot be read."""
        return read_text(path)

    def parsed(self, path: Path, text: str) -> DictConfig:
        """Return the content of a file, for Hydra to change."""
        return content(path, text)


class ConfSource(TextSource):
    """The folder `conf/`, by `rtx-conf://<folder>` in Hydra's search path.

    The schema's defaults are added to the primary file. In Hydra's ConfigStore each composition
    would copy them.
    """

    @staticmethod
    def scheme() -> str:
        return "rtx-conf"

    def parsed(self, path: Path, text: str) -> DictConfig:
        if path == Path(self.path, f"{PRIMARY}.yaml"):
            return pickle.loads(pickled_with_schema(path, text))
        return super().parsed(path, text)


class PresetSource(TextSource):
    """Presets of the user, by `rtx://<folder>` in Hydra's search path.

    Such a folder may be a stranger's, so that each file is checked before Hydra reads it.
    """

    @staticmethod
    def scheme() -> str:
        return "rtx"

    def text(self, path: Path) -> str:
        """Return the text of a file; `UserError` also for more than plain values."""
        return preset_text(path)


class ConfSearchPath(SearchPathPlugin):
    """Hydra's search path, with `ConfSource` for `conf/`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folder = str(conf_dir())
        for element in search_path.get_path():
            if element.path == folder:
                element.path = f"{ConfSource.scheme()}://{folder}"


@functools.lru_cache(maxsize=1)
def pickled_with_schema(path: Path, text: str) -> bytes:
    """Return the schema's defaults with the values of a file over them, pickled."""
    return pickle.dumps(OmegaConf.merge(to_dict(Config()), content(path, text)))


CACHES.append(pickled_with_schema.cache_clear)
