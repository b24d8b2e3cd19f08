"""Checkpoints of the Hugging Face Hub: found in its cache, or downloaded into it.

Only `*.json` and `*.safetensors` are fetched: nothing that is fetched is ever run.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from breeze_rtc.errors import CheckpointError
from breeze_rtc.models.weights import read_json

PATTERNS = ["*.json", "*.safetensors", "merges.txt"]
CONNECT_S = 5.0
"""Nothing that is there takes longer to be connected with, however slow it is then."""
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_repository(name: str) -> bool:
    """Looks like `org/name`, and no such folder is here."""
    return _REPOSITORY.fullmatch(name) is not None and not Path(name).exists()


def cached(repository: str) -> Path | None:
    """The newest snapshot of a repository in the Hugging Face cache, or None."""
    found = sorted(_snapshots(repository).glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None


def find(repository: str) -> Path:
    """The snapshot in the cache.  Raises CheckpointError when there is none."""
    folder = cached(repository)
    if folder is None:
        raise CheckpointError(
            f"{repository} is not in the Hugging Face cache ({_snapshots(repository).parents[1]}): "
            f"run 'hf download {repository}', or give its folder or, to download it now, --model {repository}"
        )
    return folder


def download(repository: str, kinds: Collection[str]) -> Path:
    """The newest snapshot, downloaded with a progress bar unless it is in the cache in full.

    kinds: model types that can be loaded; the config comes first, so that a foreign model is refused before its
    weights are fetched.  Raises CheckpointError with what to do: offline, no such repository, no permission.
    """
    try:
        from huggingface_hub import constants, hf_hub_download, snapshot_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError:
        if cached(repository) is not None:
            return find(repository)
        raise CheckpointError(
            f"{repository} is not in the Hugging Face cache, and to download it takes the extra 'hub': "
            "pip install 'breeze_rtc[hub]'"
        ) from None
    if cached(repository) is None and not _is_reachable(constants.ENDPOINT):
        raise _unreachable(repository)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what goes wrong is said below, once
    try:
        config = read_json(Path(hf_hub_download(repository, "config.json")))
        if config.get("model_type") not in kinds:
            raise CheckpointError(
                f"{repository} is of model type {config.get('model_type')!r}; {' and '.join(map(repr, kinds))} "
                "can be loaded.  Nothing else was downloaded"
            )
        # Then `model.safetensors` is another copy, for other software.
        ignored = ["model.safetensors"] if "transformers_weights" in config else None
        return Path(snapshot_download(repository, allow_patterns=PATTERNS, ignore_patterns=ignored))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repository} asks for its terms to be accepted: do so at https://huggingface.co/{repository}, then run "
            "'hf auth login'"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"no folder {repository} is here, and no model of that name at huggingface.co, or it is private"
        ) from error
    except LocalEntryNotFoundError as error:
        raise _unreachable(repository) from error
    except OSError as error:
        raise CheckpointError(f"{repository} cannot be downloaded: {error}") from error


def _is_reachable(endpoint: str) -> bool:
    """Whether anything can be connected with there; the client itself would try for half a minute.  What a proxy can
    reach is not known, and taken for reachable."""
    if getproxies():
        return True
    address = urlsplit(endpoint)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=CONNECT_S):
            return True
    except OSError:
        return False


def _unreachable(repository: str) -> CheckpointError:
    return CheckpointError(
        f"no folder {repository} is here nor in the Hugging Face cache, and huggingface.co cannot be reached: run "
        f"'hf download {repository} --local-dir FOLDER' where it can, copy the folder and give it as --model"
    )


def _snapshots(repository: str) -> Path:
    cache = os.environ.get("HF_HUB_CACHE")
    home = os.environ.get("HF_HOME")
    base = Path(cache) if cache else (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"
    return base / f"models--{repository.replace('/', '--')}" / "snapshots"
