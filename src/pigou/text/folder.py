"""Where a model's tokenizer is: a local folder, the bundled model, or the hub's cache."""

from __future__ import annotations

from pathlib import Path

from pigou.models import bundled_path

_FILES = ["tokenizer*.json", "special_tokens_map.json", "generation_config.json", "config.json",
          "chat_template.json", "*.jinja"]  # fmt: skip
BUNDLED = "bundled"


def find_tokenizer(name: str, *, download: bool = False) -> Path | None:
    """Return the folder that has a model's `tokenizer.json`; None when it cannot be had.

    Args:
        name: folder, hub id ("owner/name"), or "bundled".
        download: ask the hub when its cache does not have it.
    """
    if name == BUNDLED:
        return bundled_path()
    if not name:
        return None
    folder = Path(name)
    if folder.is_dir():
        return folder if (folder / "tokenizer.json").is_file() else None
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=not download))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError):
        return None
    return folder if (folder / "tokenizer.json").is_file() else None
