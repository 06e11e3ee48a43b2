"""Model folders, the bundled model, and the error of an unusable model."""

from __future__ import annotations

from pathlib import Path


class ModelError(ValueError):
    """Raised for a model that cannot be run; names the file or field and the remedy."""


def model_folder(model: str | Path) -> Path | None:
    """Return a local model folder, None for a hub id; raises ModelError if neither."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    name = str(model)
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or folder.exists():
        raise ModelError(f"model {name!r} is no folder; give a folder or a Hugging Face hub id")
    return None


def bundled_path() -> Path:
    """Return the bundled model's Hugging Face folder, with weights and tokenizer."""
    return Path(__file__).parent / "tiny"
