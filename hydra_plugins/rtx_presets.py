"""A plug-in for Hydra that reads the folder of `--config-dir`.

Such a folder may be a stranger's, so that each file is checked before Hydra reads it. Hydra imports
this file whenever it starts, so that it imports little itself.
"""

from pathlib import Path

# Hydra has no public name for the source of files on disk, which this one extends.
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult


class PresetSource(FileConfigSource):
    """Presets of the user, by `rtx://<folder>` in Hydra's search path."""

    @staticmethod
    def scheme() -> str:
        return "rtx"

    def load_config(self, config_path: str) -> ConfigResult:
        from rtx.settings.preset_files import preset_text

        # Raises an error unless the file has plain values alone.
        preset_text(Path(self.path, self._normalize_file_name(config_path)))
        return super().load_config(config_path)
