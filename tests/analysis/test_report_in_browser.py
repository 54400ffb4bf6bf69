"""The report of each trained preset opens in a browser and asks it for nothing else."""

import pytest

import keras_softmoe as ksm
from keras_softmoe.analysis import analyze
from tests.skips import REASONS
from tests.support.browser import CHROMIUM, browser
from tests.support.reading import Reading

TRAINED = [n for n in ksm.presets.names() if n.endswith(("_glyphs", "_shapes"))]
ROUTED = [n for n in TRAINED if not n.startswith("vit_") and "_dense_" not in n]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=REASONS["browser"])


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


def report(name, path):
    if name.endswith("_shapes"):
        model = ksm.models.LIMoEContrastive.from_preset(name)
        data = ksm.datasets.sample("shapes", 64)
        given = {"data": data.images, "captions": data.captions}
    else:
        model = ksm.models.ViTMoEImageClassifier.from_preset(name)
        images, labels, *_ = ksm.datasets.sample("glyphs", 64)
        given = {"data": images, "labels": labels}
    return analyze(model, **given, num_pictures=1, verbose=0).save(path)


def test_there_are_presets_of_all_kinds():
    assert len(TRAINED) == 7 and len(ROUTED) == 5


@pytest.mark.parametrize("name", ROUTED)
def test_report_of_a_trained_preset(name, chromium, tmp_path):
    path = report(name, tmp_path / "report.html")
    # Small enough for e-mail.
    assert path.stat().st_size < 5e6
    found = chromium.open(path)
    assert found == {"requests": [], "complaints": [], "drawn": True}
    assert Reading(path).images


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
