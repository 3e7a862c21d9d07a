"""Plug-ins for Hydra: sources of `conf/` and of the user's presets, and the search path to them.

rtx registers them before its first composition. They are not in `hydra_plugins/`, because every
program that uses Hydra would import them from there.
"""

import functools
import pickle
from pathlib import Path

# `TextSource` extends Hydra's source of files on disk, which has no public name.
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
    """A source of YAML files in a folder. Parsed texts are kept between compositions."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = self.file_path(config_path)
        text = self.text(path)
        config = self.parsed(path, text)
        # Directives are lines such as `# @package`. Hydra's own source reads as much of a file.
        header = self._get_header_dict(text[:512])
        return ConfigResult(self.provider, self.full_path(), config, header)

    def file_path(self, config_path: str) -> Path:
        """Return the path of an option's file: for `data/text` `<folder>/data/text.yaml`."""
        return Path(self.path, self._normalize_file_name(config_path))

    def text(self, path: Path) -> str:
        """Return the text of a file; `UserError` where it cannot be read."""
        return read_text(path)

    def parsed(self, path: Path, text: str) -> DictConfig:
        """Return the content of a file as a new object, because Hydra may change it."""
        return content(path, text)


class ConfSource(TextSource):
    """The source for `conf/`. Its URL in Hydra's search path is `rtx-conf://<folder>`.

    The values of the primary file are merged over the schema's defaults. These are not in Hydra's
    ConfigStore, because each composition would copy them from there.
    """

    @staticmethod
    def scheme() -> str:
        return "rtx-conf"

    def parsed(self, path: Path, text: str) -> DictConfig:
        if path == Path(self.path, f"{PRIMARY}.yaml"):
            return pickle.loads(pickled_with_schema(path, text))
        return super().parsed(path, text)


class PresetSource(TextSource):
    """The source for a folder of the user's presets.

    Its URL in Hydra's search path is `rtx://<folder>`. Someone else may have written the presets,
    so each file is checked before Hydra gets it.
    """

    @staticmethod
    def scheme() -> str:
        return "rtx"

    def text(self, path: Path) -> str:
        """Return the text of a file; `UserError` also if it holds more than plain values."""
        return preset_text(path)


class ConfSearchPath(SearchPathPlugin):
    """Changes the entry for `conf/` in Hydra's search path, so that `ConfSource` reads it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folder = str(conf_dir())
        for element in search_path.get_path():
            if element.path == folder:
                element.path = f"{ConfSource.scheme()}://{folder}"


@functools.lru_cache(maxsize=1)
def pickled_with_schema(path: Path, text: str) -> bytes:
    """Merge the values of a file over the schema's defaults, and return the result pickled."""
    return pickle.dumps(OmegaConf.merge(to_dict(Config()), content(path, text)))


CACHES.append(pickled_with_schema.cache_clear)
