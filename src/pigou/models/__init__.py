"""The model that ships with the package, and what can be wrong with a model."""

from __future__ import annotations

from pathlib import Path


class ModelError(ValueError):
    """A model that cannot be run: says which file or field is wrong, and the remedy."""


def model_folder(model: str | Path) -> Path | None:
    """Return the local folder of a model; None for a hub id, whose folder the hub's cache has.

    Raises ModelError: neither a folder nor a hub id.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    name = str(model)
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or folder.exists():
        raise ModelError(f"model {name!r} is no folder; give a folder or a Hugging Face hub id")
    return None


def bundled_path() -> Path:
    """Return the folder of the bundled model: a Hugging Face folder with weights and tokenizer."""
    return Path(__file__).parent / "tiny"
