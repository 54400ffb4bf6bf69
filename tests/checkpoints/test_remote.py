"""Files on the web are downloaded. The server runs here.

Covers `checkpoints/formats.py`.
"""

import socket
import threading

import numpy as np
import pytest

from keras_softmoe import checkpoints, converters
from keras_softmoe.checkpoints import formats as remote
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


@pytest.mark.parametrize("suffix", [".safetensors", ""])
def test_read_a_copy(web, tmp_path, monkeypatch, suffix):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    folder, url, handler = web
    if suffix:
        safetensors_file.save(folder / f"model{suffix}", ARRAYS)
    else:
        writer.write_checkpoint(folder / "model", ARRAYS, num_shards=2)
    for _ in range(2):
        checkpoint = converters.read_checkpoint(f"{url}/model{suffix}")
        np.testing.assert_equal(dict(checkpoint), ARRAYS)
    # Each file was fetched once.
    fetched = [path for method, path in handler.asked if method == "GET"]
    assert len(fetched) == len(set(fetched)) == (1 if suffix else 3)


@pytest.mark.parametrize("verbose", [0, 1])
def test_download_of_one_file(web, tmp_path, capsys, verbose):
    folder, url, _ = web
    np.savez(folder / "vit.npz", **ARRAYS)
    copy = checkpoints.download_checkpoint(f"{url}/vit.npz", tmp_path, verbose)
    assert copy == str(tmp_path / "vit.npz")
    assert (tmp_path / "vit.npz").read_bytes() == (folder / "vit.npz").read_bytes()
    output = capsys.readouterr().out
    assert ("Downloading data from" in output) == bool(verbose)


def test_download_of_shards(web, tmp_path):
    folder, url, _ = web
    writer.write_checkpoint(folder / "vmoe", ARRAYS, num_shards=2)
    copy = checkpoints.download_checkpoint(f"{url}/vmoe", tmp_path, verbose=0)
    np.testing.assert_equal(dict(converters.read_checkpoint(copy)), ARRAYS)


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

    def look_up(*_, **__):
        done.wait(60)
        raise OSError

    monkeypatch.setattr(remote.urllib.request, "urlopen", look_up)
    with pytest.raises(converters.CheckpointError, match="no answer within"):
        checkpoints.download_checkpoint("gs://bucket/vit.npz", tmp_path, verbose=0)
    done.set()
