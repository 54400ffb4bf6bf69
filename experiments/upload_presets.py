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

from keras_softmoe import presets

HUBS = ("hf://", "kaggle://")
CARD = "README.md"
# What the card of a model on a hub begins with, and what hubs filter by.
HEADER = """---
library_name: keras-hub
license: {licence}
tags: [keras, mixture-of-experts, vision]
---

"""
# Licences by the names that the hubs know.
LICENCES = {"Apache-2.0": "apache-2.0"}


def trained():
    """Names of the presets with weights of this repository."""
    return [
        name for name in presets.names() if presets.describe(name).kind == "trained"
    ]


def staged(name, folder):
    """A copy of a preset's directory whose card begins as the hubs want it."""
    preset = presets.describe(name)
    copy = Path(folder, name)
    shutil.copytree(preset.path, copy)
    if preset.licence not in LICENCES:
        raise ValueError(
            f"The hubs' name of a licence is not known. Accepted: {list(LICENCES)}; "
            f"others go into `LICENCES`. Received: {preset.licence!r} of {name!r}."
        )
    card = copy / CARD
    header = HEADER.format(licence=LICENCES[preset.licence])
    card.write_text(header + card.read_text(encoding="utf-8"), encoding="utf-8")
    return copy


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
    if name not in trained():
        raise ValueError(f"Accepted: {trained()}. Received: name={name!r}.")
    uri = f"{hub.rstrip('/')}/{name}"
    with tempfile.TemporaryDirectory() as folder:
        copy = staged(name, folder)
        files = [path for path in sorted(copy.rglob("*")) if path.is_file()]
        size = sum(path.stat().st_size for path in files) / 1e6
        print(f"{name} -> {uri}: {len(files)} files, {size:.1f} MB")
        if not is_dry:
            import keras_hub

            keras_hub.upload_preset(uri, str(copy))
    return uri


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("hub", help="hf://user, or kaggle://user/model/framework")
    parser.add_argument("--presets", nargs="*", default=trained(), metavar="NAME")
    parser.add_argument("--yes", action="store_true", help="upload, do not only say so")
    chosen = parser.parse_args(arguments)
    for name in chosen.presets:
        upload(name, chosen.hub, is_dry=not chosen.yes)
    if not chosen.yes:
        print("Nothing was sent. With --yes it is.")


if __name__ == "__main__":
    main()
