"""Files on the web: downloads, and reading without one. The server runs here.

Covers `checkpoints/opening.py` and the copies of `checkpoints/formats.py`.
"""

import socket
import threading

import numpy as np
import pytest

from keras_softmoe import checkpoints, converters
from keras_softmoe.checkpoints import opening as remote
from tests.support import checkpoint_writer as writer, safetensors_file, server

ARRAYS = {"a": np.arange(12, dtype="float32"), "b": np.ones((3, 4), "float32")}


@pytest.fixture
def web(tmp_path):
    folder = tmp_path / "web"
    folder.mkdir()
    with server.serve(folder) as (url, handler):
        yield folder, url, handler


def test_buckets_are_read_over_https():
    expected = "https://storage.googleapis.com/bucket/a/name.npz"
    assert remote.web_address("gs://bucket/a/name.npz") == expected
    assert remote.web_address("file:///folder/name") is None
    assert remote.web_address("/folder/name") is None


def test_read_in_place(web):
    folder, url, handler = web
    padding = {"c": np.zeros(1 << 20, "float32")}
    safetensors_file.save(folder / "model.safetensors", ARRAYS | padding)
    checkpoint = converters.read_checkpoint(f"{url}/model.safetensors")
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(checkpoint[name], array)
    np.testing.assert_array_equal(checkpoint["c"], padding["c"])
    # Nothing was asked for as a whole.
    assert all(wanted for method, _, wanted in handler.asked if method == "GET")


def test_server_without_ranges(web):
    folder, url, handler = web
    handler.sends_ranges = False
    safetensors_file.save(folder / "model.safetensors", ARRAYS)
    with pytest.raises(converters.CheckpointError, match="does not send parts"):
        converters.read_checkpoint(f"{url}/model.safetensors")


@pytest.mark.parametrize("verbose", [0, 1])
def test_download_of_one_file(web, tmp_path, capsys, verbose):
    folder, url, _ = web
    np.savez(folder / "vit.npz", **ARRAYS)
    copy = checkpoints.download_checkpoint(f"{url}/vit.npz", tmp_path, verbose)
    assert copy == str(tmp_path / "vit.npz")
    content = (folder / "vit.npz").read_bytes()
    assert (tmp_path / "vit.npz").read_bytes() == content
    output = capsys.readouterr().out
    assert ("Downloading data from" in output) == bool(verbose)


def test_download_of_shards(web, tmp_path):
    folder, url, _ = web
    writer.write_checkpoint(folder / "vmoe", ARRAYS, num_shards=2)
    copy = checkpoints.download_checkpoint(f"{url}/vmoe", tmp_path, verbose=0)
    checkpoint = converters.read_checkpoint(copy)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(checkpoint[name], array)


def test_download_that_is_cut(web, tmp_path):
    folder, url, handler = web
    np.savez(folder / "vit.npz", **ARRAYS)
    handler.cuts = True
    with pytest.raises(converters.CheckpointError, match="cannot be fetched"):
        checkpoints.download_checkpoint(f"{url}/vit.npz", tmp_path, verbose=0)
    # The next one begins anew.
    assert not (tmp_path / "vit.npz").exists()
    handler.cuts = False
    checkpoints.download_checkpoint(f"{url}/vit.npz", tmp_path, verbose=0)
    assert (tmp_path / "vit.npz").exists()


def test_missing_file(web, tmp_path):
    _, url, _ = web
    with pytest.raises(converters.CheckpointError, match="404"):
        checkpoints.download_checkpoint(f"{url}/vit.npz", tmp_path, verbose=0)
    with pytest.raises(converters.CheckpointError, match="404"):
        converters.read_checkpoint(f"{url}/vit.npz")


def test_server_that_is_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/vit.npz"
        with pytest.raises(converters.CheckpointError, match="cannot be fetched"):
            checkpoints.download_checkpoint(url, tmp_path, verbose=0)


def test_name_that_is_never_found(tmp_path, monkeypatch):
    """Looking a server up may take longer than any timeout of a connection."""
    done = threading.Event()
    monkeypatch.setattr(remote, "_PATIENCE", 0.2)

    def answer(request):
        done.wait(60)
        raise OSError

    monkeypatch.setattr(remote, "_answer", answer)
    with pytest.raises(converters.CheckpointError, match="no answer within"):
        checkpoints.download_checkpoint("gs://bucket/vit.npz", tmp_path, verbose=0)
    done.set()
