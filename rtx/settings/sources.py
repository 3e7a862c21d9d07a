"""Where Hydra finds the files of `conf/` with the schema, and presets of the user.

Only programs of rtx register these plug-ins: other programs on the same machine that use Hydra do
not import rtx.
"""

import functools
import pickle
from pathlib import Path

# Hydra has no public name for the source of files on disk, which these extend.
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import YAMLError

from rtx.settings.preset_files import TEXTS_KEPT, loaded, preset_text
from rtx.settings.presets import CACHES, conf_dir, read_text
from rtx.settings.schema import Config, to_dict

PRIMARY = "config"
"""The file of `conf/` that has the list of all groups."""


class TextSource(FileConfigSource):
    """A folder of files, whose texts are each parsed once for all compositions."""

    def load_config(self, config_path: str) -> ConfigResult:
        text = self.text(self.file(config_path))
        try:
            content = self.content(config_path, text)
        except YAMLError:
            # Fails as well, with a message that has the name of the file.
            super().load_config(config_path)
            raise
        # Hydra looks for its directives in as much of a file.
        header = self._get_header_dict(text[:512])
        return ConfigResult(self.provider, self.full_path(), content, header)

    def file(self, config_path: str) -> Path:
        """Return the file of an option, such as `data/text`."""
        return Path(self.path, self._normalize_file_name(config_path))

    def text(self, path: Path) -> str:
        """Return the text of a file; `UserError` where it cannot be read."""
        return read_text(path)

    def content(self, config_path: str, text: str) -> DictConfig | ListConfig:
        """Return what a file says, for Hydra to change."""
        return loaded(text)


class ConfSource(TextSource):
    """The folder `conf/`, by `rtx-conf://<folder>` in Hydra's search path.

    The schema is part of the primary file, because each composition makes a deep copy of Hydra's
    ConfigStore.
    """

    @staticmethod
    def scheme() -> str:
        return "rtx-conf"

    def content(self, config_path: str, text: str) -> DictConfig | ListConfig:
        if config_path == PRIMARY:
            return pickle.loads(pickled_with_schema(text))
        return super().content(config_path, text)


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


@functools.lru_cache(maxsize=TEXTS_KEPT)
def pickled_with_schema(text: str) -> bytes:
    """Return the schema's defaults with the values of a file of YAML over them, pickled."""
    return pickle.dumps(OmegaConf.merge(to_dict(Config()), loaded(text)))


CACHES.append(pickled_with_schema.cache_clear)
