"""The report of each trained preset opens in a browser and asks it for nothing else."""

import pytest

import keras_softmoe as ksm
from keras_softmoe.analysis import routing_report
from keras_softmoe.analysis._page import MOST_BYTES
from tests.analysis.browser import CHROMIUM, browser
from tests.analysis.reading import Reading
from tests.skips import REASONS

TRAINED = [n for n in ksm.presets.names() if n.endswith(("_glyphs", "_shapes"))]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=REASONS["browser"])


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


def report(name, path):
    if name.endswith("_shapes"):
        model = ksm.models.LIMoEContrastive.from_preset(name)
        data = ksm.datasets.sample("shapes", 64)
        return routing_report(
            model, data.images, path, data.captions, num_pictures=1, verbose=0
        )
    model = ksm.models.ViTMoEImageClassifier.from_preset(name)
    images, labels, *_ = ksm.datasets.sample("glyphs", 64)
    return routing_report(model, images, path, labels=labels, num_pictures=1, verbose=0)


def test_there_are_presets_of_all_kinds():
    assert len(TRAINED) == 7


@pytest.mark.parametrize("name", TRAINED)
def test_report_of_a_trained_preset(name, chromium, tmp_path):
    path = report(name, tmp_path / "report.html")
    assert path.stat().st_size < MOST_BYTES
    found = chromium.open(path)
    assert found == {"requests": [], "complaints": [], "drawn": True}
    is_dense = name.startswith("vit_") or "_dense_" in name
    assert bool(Reading(path).images) == (not is_dense)


def test_a_page_that_asks_and_complains_is_noticed(chromium, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(
        "<!DOCTYPE html><title>x</title><img src='http://localhost:9/missing.png'>"
        "<script>console.error('no'); undefined.x</script>"
    )
    found = chromium.open(path)
    assert found["requests"] == ["http://localhost:9/missing.png"]
    assert len(found["complaints"]) >= 2
    assert not found["drawn"]
