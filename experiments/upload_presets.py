"""Uploads trained presets with their cards to a hub. Without `--yes` it only says what.

    python -m experiments.upload_presets hf://your-name            # what would happen
    python -m experiments.upload_presets hf://your-name --yes
    python -m experiments.upload_presets kaggle://your-name/keras-softmoe/keras --yes

Needs the hub's own credentials, as its documentation tells. Presets whose weights
others released are left out: they are converted where they are used.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from experiments.lib.cards import CARD
from keras_softmoe import presets
from keras_softmoe.catalogue import names_of_kind

HUBS = ("hf://", "kaggle://")


def upload(name, hub, is_dry=True):
    """Upload one preset, or say what would be uploaded.

    Args:
        name: str, a trained preset.
        hub: str, `"hf://user"` or `"kaggle://user/model/framework"`.
        is_dry: bool, whether nothing is sent.

    Returns:
        str, the address of the preset on the hub.
    """
    if not hub.startswith(HUBS) or not hub.split("://")[1]:
        raise ValueError(
            f"Give the hub and the user: one of {HUBS} and a name. Received: {hub!r}."
        )
    trained = names_of_kind("trained")
    if name not in trained:
        raise ValueError(f"Accepted: {trained}. Received: name={name!r}.")
    uri = f"{hub.rstrip('/')}/{name}"
    with tempfile.TemporaryDirectory() as folder:
        # KerasHub may write a card of its own into the directory, and delete it again.
        copy = shutil.copytree(presets.describe(name).path, Path(folder, name))
        files = [path for path in sorted(copy.rglob("*")) if path.is_file()]
        size = sum(path.stat().st_size for path in files) / 1e6
        print(f"{name} -> {uri}: {len(files)} files, {size:.1f} MB")
        if not is_dry:
            import keras_hub

            if uri.startswith(HUBS[0]):
                _send_card(uri.removeprefix(HUBS[0]), copy / CARD)
            keras_hub.upload_preset(uri, str(copy))
    return uri


def _send_card(repository, card):
    """Send the card first: KerasHub replaces it where a repository has none yet."""
    import huggingface_hub

    huggingface_hub.create_repo(repository, exist_ok=True)
    huggingface_hub.upload_file(
        path_or_fileobj=card, path_in_repo=CARD, repo_id=repository
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("hub", help="hf://user, or kaggle://user/model/framework")
    parser.add_argument("--presets", nargs="*", metavar="NAME", help="all if left out")
    parser.add_argument("--yes", action="store_true", help="upload, do not only say so")
    chosen = parser.parse_args(arguments)
    for name in chosen.presets or names_of_kind("trained"):
        upload(name, chosen.hub, is_dry=not chosen.yes)
    if not chosen.yes:
        print("Nothing was sent. With --yes it is.")


if __name__ == "__main__":
    main()
